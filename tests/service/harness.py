"""The requests that the service tests send to a running service."""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import ssl
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import httpx
import psutil
from jinja2 import Environment
from openai import AsyncOpenAI, OpenAI
from tokenizers import Tokenizer

from serve_app.cli.__main__ import app as cli_app

FRANCE = [{"role": "user", "content": "Name the capital of France."}]
PRICE_IN, PRICE_CACHED, PRICE_OUT = 270, 70, 1100  # nano-units a token, as configured
NANO = 10**9
HELD = "svc-coder"  # its backend is `held`, whose replies stand still until a test lets them go on
#: What runs of `config.yaml`: replicas by deployment, and by backend.
PARTS = {"gateway:Gateway": 1, "gateway:Limiter": 1, "gateway:Accounting": 1}
BACKENDS = {"smollm2": 1, "held": 2, "broken": 1}

Found = TypeVar("Found")


def until(look: Callable[[], Found], timeout_s: float = 120.0, every_s: float = 0.1) -> Found:
    """Polls `look`, which another process makes true, and returns its first true result. Fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"still {found!r} after {timeout_s} s"
        time.sleep(every_s)
    return found


def charge(usage: Any) -> int:
    """Nano-units that a reply's usage costs: of the SDK's object, or of an aggregate of the admin API."""
    if isinstance(usage, dict):
        prompt, cached, completion = (usage[f"{name}_tokens"] for name in ("prompt", "cached", "completion"))
    else:
        prompt, completion = usage.prompt_tokens, usage.completion_tokens
        cached = usage.prompt_tokens_details.cached_tokens
    return (prompt - cached) * PRICE_IN + cached * PRICE_CACHED + completion * PRICE_OUT


@dataclass(frozen=True)
class Account:
    id: str
    key: str
    service: Service

    def show(self) -> dict[str, Any]:
        return self.service.admin("GET", f"/admin/accounts/{self.id}")

    @property
    def nano(self) -> int:
        return nano(self.show()["balance"])

    def client(self, **options: Any) -> OpenAI:
        return self.service.client(self.key, **options)

    def settled(self, requests: int, timeout_s: float = 120.0) -> dict[str, Any]:
        """The account once so many requests are settled and nothing is held any more."""

        def look() -> dict[str, Any] | None:
            view = self.show()
            done = view["usage"]["requests"] >= requests and nano(view["held"]) == 0 and not view["open_requests"]
            return view if done else None

        return until(look, timeout_s)


class Hold:
    """A question to `HELD`: each of its replies stands still after `after` tokens, until `release`."""

    def __init__(self, service: Service, after: int) -> None:
        name = secrets.token_hex(8)
        self.after = after
        self.messages: Any = [{"role": "user", "content": f"hold {name} after {after}"}]
        self._folder = service.home / "held" / name
        self._folder.mkdir(parents=True)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def reached(self, replies: int = 1) -> None:
        """Returns when so many replies have stood still."""
        until(lambda: len(list(self._folder.iterdir())) >= replies)

    def release(self) -> None:
        (self._folder / "go").touch()


class Service:
    def __init__(self, document: dict[str, Any], process: subprocess.Popen[str]) -> None:
        self.base_url: str = document["base_url"]
        self.first_key: str = document["api_key"]
        self.metrics_url: str = document["metrics_url"]
        self.haproxy_metrics_url: str = document["haproxy_metrics_url"]
        self.dashboard_url: str | None = document["dashboard_url"]
        self.home = Path(document["home"])
        self.process = process
        self.verify = trusted(document)
        self.http = httpx.Client(base_url=self.base_url, timeout=120, trust_env=False, verify=self.verify)

    @cached_property
    def operator_key(self) -> str:
        return (self.home / "secrets" / "operator-key").read_text().strip()

    @cached_property
    def _model(self) -> Path:
        return self.home / "models" / "smollm2-135m-instruct"

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self._model / "tokenizer.json"))

    def prompt_tokens(self, messages: list[dict[str, str]]) -> int:
        """Returns the bundled model's token count for a prompt."""
        template = Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False).from_string(
            (self._model / "chat_template.jinja").read_text()
        )
        return self.reply_tokens(template.render(messages=messages, add_generation_prompt=True))

    def reply_tokens(self, text: str) -> int:
        """Returns the bundled model's token count for a reply."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def client(self, key: str | None = None, **options: Any) -> OpenAI:
        options = {"max_retries": 0, "timeout": 300, "base_url": f"{self.base_url}/v1", **options}
        return OpenAI(api_key=key or self.first_key, **options)

    def async_client(self, key: str | None = None, **options: Any) -> AsyncOpenAI:
        options = {"max_retries": 0, "timeout": 300, "base_url": f"{self.base_url}/v1", **options}
        return AsyncOpenAI(api_key=key or self.first_key, **options)

    def admin(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        answer = self.http.request(method, path, json=body, headers={"authorization": f"Bearer {self.operator_key}"})
        assert answer.is_success, answer.text
        return answer.json()

    def account(self, name: str, credit: str | None = "5", **limits: int) -> Account:
        body = {"name": name, **({"credit": credit} if credit else {}), **limits}
        account_id = self.admin("POST", "/admin/accounts", body)["id"]
        key = self.admin("POST", f"/admin/accounts/{account_id}/keys", {"name": "test"})["key"]
        return Account(account_id, key, self)

    def chat(
        self, key: str, messages: Any = FRANCE, timeout: float = 120, request_id: str = "", **body: Any
    ) -> httpx.Response:
        """A raw call, for what an SDK would not send."""
        body = {"model": "svc-chat", "messages": messages, "temperature": 0, **body}
        headers = {"authorization": f"Bearer {key}"} | ({"x-request-id": request_id} if request_id else {})
        return self.http.post("/chat/completions", json=body, headers=headers, timeout=timeout)

    def cli(self, *arguments: str) -> Any:
        """Runs `serve-app … --json` as an operator would and answers its document. Not for two threads at once."""
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, {"SERVE_APP_HOME": str(self.home)}),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            status = cli_app(["--url", self.base_url, *arguments, "--json"], "serve-app", standalone_mode=False)
        assert not status, err.getvalue()
        return json.loads(out.getvalue())

    def hold(self, after: int = 3) -> Hold:
        return Hold(self, after)

    def pids(self, deployment: str) -> list[int]:
        """Processes of a deployment's replicas, such as `gateway:Accounting`."""
        title = f"ray::ServeReplica:{deployment}"
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                name = " ".join(process.cmdline()) or process.name()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            if name == title or name.startswith((f"{title}:", f"{title} ", f"{title}.")):
                found.append(process.pid)
        return found

    def answers(self, model: str = "svc-chat") -> bool:
        """Returns whether a complete request succeeds."""
        try:
            return self.chat(self.first_key, model=model, max_tokens=1).status_code == 200
        except httpx.HTTPError:
            return False

    def ready(self) -> None:
        """Returns when all parts of `config.yaml` run, none more than once, and requests go through."""

        def look() -> bool:
            if any(len(self.pids(part)) != count for part, count in PARTS.items()):
                return False
            with contextlib.suppress(httpx.HTTPError, AssertionError):  # no gateway, no ledger
                found = {one["name"]: one["replicas"] for one in self.admin("GET", "/admin/backends")["data"]}
                is_ready = self.http.get("/ready").is_success and self.answers() and self.answers(HELD)
                return is_ready and found.items() >= BACKENDS.items()
            return False

        until(look, 600, 0.5)


def trusted(document: dict[str, Any]) -> ssl.SSLContext | bool:
    """Returns what clients of a started service trust: its own authority, if it has one."""
    return ssl.create_default_context(cafile=document["ca_file"]) if document.get("ca_file") else True


def nano(amount: str) -> int:
    """A decimal amount in nano-units, exactly."""
    whole, _, fraction = amount.partition(".")
    return int(whole) * NANO + int(fraction.ljust(9, "0") or 0)
