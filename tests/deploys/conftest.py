"""What tests of deploys have: a store that is there, a world outside of it, and applications that are closed at the end."""

from tests.cases.conftest import clock, ledger, make_app, no_hang, provider, store_url  # noqa: F401 - fixtures, found here by name
