"""10. Moving to Temporal: one setting. The agent's file does not change.

OUTLAST_ENGINE=temporal://temporal:7233/default?task_queue=kitebase  outlast worker kitebase.agents:app
outlast move run-kite-142 --to temporal
"""

from outlast import Outlast
from outlast.engines import Temporal
from p02_kitebase import support

app = Outlast("postgresql:///kitebase", agents=[support], engine="temporal://temporal:7233/default?task_queue=kitebase")
own = Outlast("postgresql:///kitebase", agents=[support], engine=Temporal(client=object()))
