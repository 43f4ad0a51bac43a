"""The last of the tests of the shared service in the order of names: it stops the service."""

from __future__ import annotations

import signal

import psutil
import pytest

from serve_app import __version__
from serve_app.launch.preflight import is_free
from tests.service.harness import HELD, Service

pytestmark = pytest.mark.service


def test_sigterm_ends_every_process_although_a_reply_never_ends(service: Service) -> None:
    with service.hold() as hold:
        stream = service.client().chat.completions.create(
            model=HELD, messages=hold.messages, stream=True, max_tokens=100
        )
        next(iter(stream))
        hold.reached()
        family = psutil.Process(service.process.pid).children(recursive=True)
        assert any("haproxy" in process.name() for process in family)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(120) == 0
        stream.response.close()
        _, alive = psutil.wait_procs(family, timeout=0)
        assert not alive
    assert is_free(int(service.base_url.rsplit(":", 1)[1]))
    assert not (service.home / "logs" / "ray").exists()
    for deployment in ("Gateway", "Limiter", "Accounting", "Model"):
        logs = (service.home / "logs").glob(f"ray-*/serve/replica_*_{deployment}_*.log")
        assert f"serve-app {__version__}" in "".join(path.read_text(encoding="utf-8") for path in logs), deployment
