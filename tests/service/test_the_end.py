"""The last of the service tests in the order of names: it stops the service that they share."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

from serve_app.launch.preflight import is_free
from tests.service.harness import FRANCE, Service

pytestmark = pytest.mark.service


def test_sigterm_with_a_stream_open_ends_every_process_within_15_seconds(service: Service) -> None:
    stream = service.client().chat.completions.create(
        model="svc-chat", messages=FRANCE, stream=True, max_tokens=4000, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    family = psutil.Process(service.process.pid).children(recursive=True)
    assert any("haproxy" in process.name() for process in family)
    started = time.monotonic()
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(30) == 0
    took = time.monotonic() - started
    stream.response.close()
    _, alive = psutil.wait_procs(family, timeout=0)
    assert not alive
    assert took < 15
    assert is_free(int(service.base_url.rsplit(":", 1)[1]))
    assert not (service.home / "logs" / "ray").exists()
    assert list((service.home / "logs").glob("ray-*"))
