"""A gateway of the gateway's tests, for the HTTP server in front of it."""

from tests.gateway.conftest import make_world, world

__all__ = ["make_world", "world"]
