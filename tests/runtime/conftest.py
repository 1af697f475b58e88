"""What tests of driving share: a world, applications that are closed at the end, and a limit for what hangs."""

from tests.cases.conftest import clock, ledger, make_app, no_hang, postgres, provider, pytest_generate_tests, store_kind, store_url

__all__ = ["clock", "ledger", "make_app", "no_hang", "postgres", "provider", "pytest_generate_tests", "store_kind", "store_url"]
