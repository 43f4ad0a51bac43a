"""A LiteLLM proxy before the service: each of its doors, one after the other, without a deployment put aside."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

KEY = "sk-proxy-of-the-tests"
HI = [{"role": "user", "content": "Name the capital of France."}]
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("litellm")
    url, key = os.environ["SERVICE_URL"], os.environ["SERVICE_KEY"]
    deployments = {
        "by-openai": {"model": "openai/svc-chat", "api_base": url, "api_key": key},
        "by-anthropic": {"model": "anthropic/svc-chat", "api_base": url.removesuffix("/v1"), "api_key": key},
    }
    settings = {
        "model_list": [
            {"model_name": name, "litellm_params": {**params, "num_retries": 0}} for name, params in deployments.items()
        ],
        "general_settings": {"master_key": KEY},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("litellm"), "--config", folder / "config.yaml", "--host", "127.0.0.1"]
    with (folder / "log").open("w") as log:
        running = subprocess.Popen([*command, "--port", str(port)], cwd=folder, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180
        while not is_up(address):
            assert running.poll() is None, (folder / "log").read_text()[-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield address
    finally:
        running.terminate()
        running.wait(60)


def is_up(address: str) -> bool:
    try:
        return requests.get(f"{address}/health/liveliness", timeout=10).ok
    except requests.ConnectionError:
        return False


def post(proxy: str, path: str, **body: Any) -> Any:
    answer = requests.post(f"{proxy}{path}", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("model", ["by-openai", "by-anthropic"])
def test_each_of_its_doors_answers_after_the_others(proxy: str, model: str) -> None:
    for _ in range(2):
        chat = post(proxy, "/v1/chat/completions", model=model, messages=HI)
        assert chat["choices"][0]["message"]["content"] == PARIS
        response = post(proxy, "/v1/responses", model=model, input=HI)
        assert response["output"][0]["content"][0]["text"] == PARIS
        message = post(proxy, "/v1/messages", model=model, messages=HI, max_tokens=100)
        assert message["content"][0]["text"] == PARIS
        assert message["stop_reason"] == "end_turn"
        count = post(proxy, "/v1/messages/count_tokens", model=model, messages=HI)
        assert count["input_tokens"] > 0


@pytest.mark.parametrize("model", ["by-openai", "by-anthropic"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_stream_comes_through(proxy: str, path: str, model: str) -> None:
    body: dict[str, Any] = {"model": model, "stream": True, "max_tokens": 100}
    body |= {"input": HI} if path == "/v1/responses" else {"messages": HI}
    headers = {"authorization": f"Bearer {KEY}"}
    with requests.post(f"{proxy}{path}", json=body, headers=headers, stream=True, timeout=60) as answer:
        assert answer.status_code == 200, answer.text
        events = [line for line in answer.iter_lines() if line.startswith(b"data:")]
    assert len(events) > 3
    assert not [event for event in events if b'"error":{' in event.replace(b" ", b"")]
