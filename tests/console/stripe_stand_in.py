"""Stripe's API can't be had in tests: this stands in for the calls that are made, and for how Stripe repeats answers.

An order is answered the same again under its idempotency key, errors included, until `keys` is emptied.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.accounting.books import NOON

SECRET = "whsec_of_the_endpoint"
HOOK = "/console/payments/stripe"
Answer = tuple[int, dict[str, Any]]


class StandIn:
    """`asked` has the forms that it was sent but for orders, `payments` those ordered, by their ids.

    `card` is what becomes of an order: "succeeded", "processing", or the code of a refusal. While `is_mute`, no answer
    to an order comes back. `error` is what it answers to everything, when `status` is 400 or more.
    """

    def __init__(self, account_id: str, now: Callable[[], float]) -> None:
        self.asked: list[dict[str, list[str]]] = []
        self.status, self.account_id, self.now = 200, account_id, now
        self.card, self.is_mute = "succeeded", False
        self.error = {"type": "api_error", "message": "away"}
        self.payments: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, Answer] = {}
        self.detached: list[str] = []
        self.methods = {"seti_1": "pm_1", "seti_2": "pm_2"}
        self._lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805
                form = parse_qs(handler.rfile.read(int(handler.headers.get("content-length", 0))).decode())
                path = urlsplit(handler.path).path
                if path == "/v1/payment_intents":
                    with self._lock:
                        answer = self.order(form, handler.headers["idempotency-key"])
                    if not self.is_mute:
                        handler.reply(*answer)
                elif found := re.fullmatch(r"/v1/payment_methods/(\w+)/detach", path):
                    self.detached.append(found[1])
                    handler.reply(self.status, {"id": found[1], "object": "payment_method"})
                else:
                    self.asked.append(form)
                    session = {"id": "cs_1", "object": "checkout.session"}
                    handler.reply(self.status, session | {"url": "https://checkout.stripe.com/c/cs_1"})

            def do_GET(handler) -> None:  # noqa: N805
                url = urlsplit(handler.path)
                path, query = url.path, parse_qs(url.query)
                if path == "/v1/payment_intents":
                    found = [one for one in self.payments.values() if one["customer"] == query["customer"][0]]
                    found = [one for one in found if one["created"] >= int(query["created[gte]"][0])]
                    handler.reply(self.status, {"object": "list", "data": found[::-1], "has_more": False, "url": path})
                elif path.startswith("/v1/setup_intents/"):
                    setup = path.rpartition("/")[2]
                    method = self.methods[setup]
                    handler.reply(self.status, {"id": setup, "object": "setup_intent", "payment_method": method})
                else:
                    metadata = {"account_id": self.account_id}
                    one = {"id": path.rpartition("/")[2], "object": "payment_intent", "metadata": metadata}
                    handler.reply(self.status, self.payments.get(one["id"], one))

            def reply(handler, status: int, document: dict[str, Any]) -> None:  # noqa: N805
                if status >= 400 and "error" not in document:
                    document = {"error": self.error}
                body = json.dumps(document).encode()
                handler.send_response(status)
                handler.send_header("content-type", "application/json")
                handler.send_header("content-length", str(len(body)))
                if status >= 400:
                    handler.send_header("stripe-should-retry", "false")
                handler.end_headers()
                handler.wfile.write(body)

            def log_message(handler, *_: Any) -> None:  # noqa: N805
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def order(self, form: dict[str, list[str]], key: str) -> Answer:
        """Orders a payment as the form says, or repeats what was answered under the key."""
        if key not in self.keys:
            self.keys[key] = self._order({name: values[0] for name, values in form.items()})
        return self.keys[key]

    def settle(self) -> None:
        """Marks every payment that is processing as paid."""
        for payment in self.payments.values():
            if payment["status"] == "processing":
                payment.update(status="succeeded", amount_received=payment["amount"])

    def _order(self, form: dict[str, str]) -> Answer:
        if self.status != 200:
            return self.status, {}
        assert (form["confirm"], form["off_session"]) == ("true", "true")
        if form["payment_method"] in self.detached:
            return 400, {"error": {"type": "invalid_request_error", "message": "No such payment method."}}
        amount = int(form["amount"])
        payment = {
            "id": f"pi_{len(self.payments) + 1}",
            "object": "payment_intent",
            "amount": amount,
            "amount_received": amount if self.card == "succeeded" else 0,
            "currency": form["currency"],
            "customer": form["customer"],
            "payment_method": form["payment_method"],
            "created": int(self.now()),
            "metadata": {name: form[f"metadata[{name}]"] for name in ("account_id", "attempt_id")},
            "status": self.card if self.card in ("succeeded", "processing") else "requires_payment_method",
        }
        self.payments[str(payment["id"])] = payment
        if payment["status"] != "requires_payment_method":
            return 200, payment
        error = {"type": "card_error", "code": self.card, "message": f"Your card was refused: {self.card}."}
        payment["last_payment_error"] = error
        return 402, {"error": error}


def event(kind: str, found: dict[str, Any], *, age_s: float = 0.0, **data: Any) -> str:
    """A report of Stripe's, made `age_s` before NOON."""
    created = int(NOON - age_s)
    document = {"id": "evt_1", "object": "event", "api_version": "2026-01-01", "created": created, "type": kind}
    return json.dumps(document | {"data": {"object": found, **data}})
