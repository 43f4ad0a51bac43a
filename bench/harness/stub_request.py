"""The request to the stub, its expected reply, the check of a reply, and the stub's application."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, Final

MODEL: Final = "svc-chat"
BACKEND: Final = "stub"  # name of the stub's application
PATH: Final = "/v1/chat/completions"
REPLY: Final = "The capital of France is Paris, a city on the Seine in which two million people live."
REPLY_TOKENS: Final = 20
PROMPT_TOKENS: Final = 40
MAX_TOKENS: Final = 64

BODY: Final = json.dumps(
    {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant. Answer in one short sentence."},
            {"role": "user", "content": "What is the capital of France, and what do you know about it?"},
        ],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
)


def wrong_with(base_url: str, key: str) -> str | None:
    """Sends the request once; returns what is wrong with the reply, or None."""
    head = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(base_url + PATH, BODY.encode(), head)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return wrong_in(json.load(answer))
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}: {error.read(300).decode(errors='replace')}"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def wrong_in(reply: Any) -> str | None:
    """Returns how `reply` differs from the expected one, or None."""
    try:
        text, usage = reply["choices"][0]["message"]["content"], reply["usage"]["completion_tokens"]
    except (KeyError, IndexError, TypeError):
        return f"no chat completion: {str(reply)[:200]}"
    if text != REPLY:
        return f"unexpected text: {str(text)[:200]}"
    return None if usage > 0 else "no usage"


def stub_application() -> dict[str, Any]:
    """Returns the configuration of the stub's application, which replaces the models'."""
    deployment = {"name": "Stub", "num_replicas": 1}
    return {
        "name": BACKEND,
        "route_prefix": None,
        "import_path": "bench.harness.stub:app",
        "deployments": [deployment],
    }
