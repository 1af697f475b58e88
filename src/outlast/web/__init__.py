"""The web page: an inbox, lists, the life of a run, figures, and the same as a JSON API. `create_app` gives an ASGI app."""

from outlast.web.app import create_app

__all__ = ["create_app"]
