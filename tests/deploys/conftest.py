"""What tests of deploys have: a store that is there, a world outside of it, and applications that are closed at the end."""

from tests.cases.conftest import (  # noqa: F401 - fixtures and a hook, found here by name
    clock,
    edit,
    ledger,
    make_app,
    no_hang,
    postgres,
    provider,
    pytest_generate_tests,
    store_kind,
    store_url,
)
