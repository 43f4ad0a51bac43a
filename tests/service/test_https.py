"""`make serve TLS=1`: clients that trust its authority are served, others and plain HTTP are refused."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import APIConnectionError

from serve_app.launch import laptop_tls
from tests.service.harness import FRANCE, Service
from tests.service.started import started

pytestmark = [pytest.mark.slow, pytest.mark.service]


@pytest.fixture(scope="module")
def https(model_path: Path) -> Iterator[Service]:
    with started(model_path, "tests/service/one_backend.yaml", TLS="1") as running:
        yield running


def test_a_client_that_trusts_the_authority_is_served_whole_and_streamed(
    https: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert https.base_url.startswith("https://127.0.0.1:")
    monkeypatch.setenv("SSL_CERT_FILE", str(laptop_tls.authority_file(https.home)))
    chat: Any = {"model": "svc-chat", "messages": FRANCE, "temperature": 0, "max_tokens": 8}
    whole = https.client().chat.completions.create(**chat)
    stream = https.client().chat.completions.create(**chat, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content


def test_the_command_line_trusts_its_own_machines_authority(https: Service) -> None:
    assert https.cli("doctor", "--url", https.base_url)["ok"]


def test_plain_http_gets_no_reply(https: Service) -> None:
    with pytest.raises(httpx.RemoteProtocolError), httpx.Client(trust_env=False) as plain:
        plain.get(https.base_url.replace("https://", "http://") + "/health")


def test_another_authority_is_refused(https: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(laptop_tls.prepare(tmp_path, datetime.now(UTC)).authority))
    with pytest.raises(APIConnectionError) as error:
        https.client().models.list()
    assert "certificate verify failed" in str(error.value.__cause__)


def test_ctrl_c_leaves_nothing(https: Service) -> None:
    family = psutil.Process(https.process.pid).children(recursive=True)
    https.process.send_signal(signal.SIGINT)
    assert https.process.wait(30) == 0
    _, alive = psutil.wait_procs(family, timeout=0)
    assert not alive
