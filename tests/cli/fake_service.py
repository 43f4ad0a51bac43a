"""A fake stand-in for the gateway's admin API: the same shapes over real HTTP, kept in memory.

It proves what the command line sends and shows. That the service itself answers these shapes is proven by the service
tests, which run the same commands against a running service.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from .local_http import Answer, LocalServer, Request

OPERATOR_KEY = "operator-key-of-the-tests"
PROBLEM = {"kind": "unbalanced", "subject": "entry-7", "message": "postings sum to 3"}
CREATED = "2026-11-01T08:00:00Z"
DEFAULT_LIMITS = {"rpm": 600, "tpm": 200000, "concurrency": 32}


class FakeService(LocalServer):
    def __init__(self) -> None:
        super().__init__()
        self.accounts: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, dict[str, Any]] = {}
        self.booked: dict[str, str] = {}  # idempotency key -> account id
        self.ready = True
        self.problems: list[dict[str, str]] = []
        self.usage = [
            {
                "day": "2026-11-02",
                "model": "svc-chat",
                "account_id": None,
                "key_id": None,
                "requests": 1200,
                "prompt_tokens": 34000,
                "cached_tokens": 12000,
                "completion_tokens": 5600,
                "charged": "0.012345678",
            }
        ]
        price = {"input": "0.27", "cached_input": "0.07", "output": "1.10"}
        self.models = [
            {
                "id": name,
                "backends": [
                    {
                        "name": "smollm2",
                        "weight": 100,
                        "share": 1.0,
                        "status": "RUNNING",
                        "replicas": 2,
                        "healthy": True,
                        "ejected": False,
                    }
                ],
                "price": price,
                "traffic": None,
            }
            for name in ("svc-chat", "svc-coder")
        ]

    def handle(self, request: Request) -> Answer:
        if request.path in ("/health", "/ready"):
            return Answer(200 if request.path == "/health" or self.ready else 503, {"status": "ok"})
        if request.headers.get("authorization") != f"Bearer {OPERATOR_KEY}":
            return error(401, "Authentication Fails: operator key required", "invalid_api_key")
        for method, pattern, answer in self.routes():
            match = re.fullmatch(pattern, request.path)
            if match and method == request.method:
                return answer(request, *match.groups())
        return error(404, f"no such route: {request.method} {request.path}", "not_found")

    def routes(self) -> list[tuple[str, str, Callable[..., Answer]]]:
        return [
            ("POST", "/admin/accounts", self.create_account),
            ("GET", "/admin/accounts", self.list_accounts),
            ("GET", "/admin/accounts/([^/]+)", self.show_account),
            ("POST", "/admin/accounts/([^/]+)/credit", self.credit),
            ("PATCH", "/admin/accounts/([^/]+)/limits", self.limits),
            ("POST", "/admin/accounts/([^/]+)/(suspend|resume)", self.suspend),
            ("POST", "/admin/accounts/([^/]+)/keys", self.create_key),
            ("GET", "/admin/accounts/([^/]+)/keys", self.list_keys),
            ("DELETE", "/admin/keys/([^/]+)", self.revoke_key),
            ("GET", "/admin/usage", lambda request: Answer(200, {"data": self.usage})),
            ("GET", "/admin/ledger/check", self.check),
            ("GET", "/admin/models", lambda request: Answer(200, {"data": self.models})),
        ]

    def create_account(self, request: Request) -> Answer:
        body = request.body
        key = request.headers.get("idempotency-key", "")
        if key in self.booked:
            return Answer(201, shown(self.accounts[self.booked[key]]))
        account = {
            "id": f"acct_{len(self.accounts) + 1}",
            "name": body["name"],
            "status": "active",
            "currency": "USD",
            "granted": Decimal(0),
            "topped_up": Decimal(0),
            "contract": {name: body.get(name) for name in DEFAULT_LIMITS},
        }
        self.accounts[account["id"]] = account
        self.booked[key] = account["id"]
        book(account, body.get("credit", "0"), body.get("kind", "top_up"))
        return Answer(201, shown(account))

    def list_accounts(self, request: Request) -> Answer:
        ids = list(self.accounts)
        after = request.query.get("after")
        start = ids.index(after) + 1 if after else 0
        page = ids[start : start + int(request.query["limit"])]
        more = page and page[-1] != ids[-1]
        return Answer(200, {"data": [shown(self.accounts[i]) for i in page], "next": page[-1] if more else None})

    def show_account(self, request: Request, account_id: str) -> Answer:
        if account_id not in self.accounts:
            return error(404, f"there is no account {account_id}", "account_not_found")
        return Answer(200, shown(self.accounts[account_id]))

    def credit(self, request: Request, account_id: str) -> Answer:
        key = request.headers.get("idempotency-key")
        if key is None:
            return error(400, "Idempotency-Key is required", "invalid_format")
        account = self.accounts[account_id]
        if key not in self.booked:
            self.booked[key] = account_id
            book(account, request.body["amount"], request.body["kind"])
        return Answer(200, shown(account))

    def limits(self, request: Request, account_id: str) -> Answer:
        self.accounts[account_id]["contract"].update(request.body)
        return Answer(200, shown(self.accounts[account_id]))

    def suspend(self, request: Request, account_id: str, what: str) -> Answer:
        self.accounts[account_id]["status"] = "suspended" if what == "suspend" else "active"
        return Answer(200, shown(self.accounts[account_id]))

    def create_key(self, request: Request, account_id: str) -> Answer:
        key = {
            "id": f"key_{len(self.keys) + 1}",
            "account_id": account_id,
            "name": request.body.get("name"),
            "hint": "sk-…cdef",
            "created_at": CREATED,
        }
        self.keys[key["id"]] = {**key, "status": "active", "revoked_at": None}
        return Answer(201, {**key, "key": "sk-0123456789abcdef"})

    def list_keys(self, request: Request, account_id: str) -> Answer:
        return Answer(200, {"data": [key for key in self.keys.values() if key["account_id"] == account_id]})

    def revoke_key(self, request: Request, key_id: str) -> Answer:
        if key_id not in self.keys:
            return error(404, f"there is no key {key_id}", "key_not_found")
        self.keys[key_id].update(status="revoked", revoked_at=CREATED)
        return Answer(200, self.keys[key_id])

    def check(self, request: Request) -> Answer:
        counts = {"accounts": 3, "entries": 1234, "usage_rows": 56}
        return Answer(200, {"ok": not self.problems, **counts, "problems": self.problems})


def book(account: dict[str, Any], amount: str, kind: str) -> None:
    account["granted" if kind == "grant" else "topped_up"] += Decimal(amount)


def shown(account: dict[str, Any]) -> dict[str, Any]:
    contract = account["contract"]
    return {
        **account,
        "balance": str(account["granted"] + account["topped_up"]),
        "granted": str(account["granted"]),
        "topped_up": str(account["topped_up"]),
        "held": "0.001",
        "limits": {name: contract[name] or value for name, value in DEFAULT_LIMITS.items()},
        "usage": {
            "requests": 12,
            "prompt_tokens": 3400,
            "cached_tokens": 1200,
            "completion_tokens": 560,
            "charged": "0.001",
        },
        "created_at": CREATED,
    }


def error(status: int, message: str, code: str, **headers: str) -> Answer:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return Answer(status, body, headers)
