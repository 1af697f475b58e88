"""The names that OpenTelemetry's GenAI conventions give to what we report, in one place: they still move."""

from __future__ import annotations

OPERATION = "gen_ai.operation.name"
AGENT = "gen_ai.agent.name"
CONVERSATION = "gen_ai.conversation.id"  # the run id
TOOL = "gen_ai.tool.name"
CALL = "gen_ai.tool.call.id"
TOOL_TYPE = "gen_ai.tool.type"
ARGUMENTS = "gen_ai.tool.call.arguments"  # content: by opt-in only
RESULT = "gen_ai.tool.call.result"  # the same
REQUEST_MODEL = "gen_ai.request.model"
INPUT_TOKENS = "gen_ai.usage.input_tokens"  # of a segment: what its own answers used, cached ones included
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE_TOKENS = "gen_ai.usage.cache_creation.input_tokens"
ERROR = "error.type"

INVOKE_AGENT = "invoke_agent"
EXECUTE_TOOL = "execute_tool"

# Ours
STATUS = "outlast.run.status"
SEQ = "outlast.seq"
FENCE = "outlast.fence"
WORKER = "outlast.worker"
RECOVERED = "outlast.recovered"  # this segment took over a lease that nobody had released
EFFECT = "outlast.tool.effect"
ATTEMPT = "outlast.tool.attempt"
REPLAY = "outlast.tool.possible_replay"  # an earlier attempt's outcome was not saved: not to be counted as a new effect
KEY_DIGEST = "outlast.tool.key_digest"  # of the idempotency key: keys themselves are never exported
COST = "outlast.cost_usd"  # of a segment: what its own answers cost; missing where a price is unknown
