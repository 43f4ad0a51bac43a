"""A limiter with a clock that the test moves, and short ways to ask it."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random
from typing import Any

from serve_app.limits import (
    AccountState,
    Adjust,
    Admission,
    Admit,
    Contract,
    Grant,
    KeyState,
    OpenHold,
    Recovering,
    Refusal,
    Release,
    UnknownKey,
)

CONTRACT = Contract(rpm=60, tpm=60_000, concurrency=10)
PROMPT_PRICE, OUTPUT_PRICE = 2, 5
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp()
MIDNIGHT = NOON + 12 * 3600


class World:
    """Account `a` with key `d` and a balance of a million, unless told otherwise. `now` and `at` are its two clocks."""

    def __init__(
        self, contract: Contract = CONTRACT, balance: int = 1_000_000, recovery_s: float = 0.0, **limits: int
    ) -> None:
        self.now = 5000.0
        self.at = NOON
        self.contract = contract
        self.restart(recovery_s)
        self.admission.apply(AccountState("a", True, balance, version=1, **limits))
        self.admission.apply(KeyState("d", "k", "a", True, version=1))

    def restart(self, recovery_s: float = 0.0) -> None:
        """A limiter that knows nothing."""
        self.admission = Admission(
            lambda: self.now, Random(7), self.contract, lease_s=10.0, recovery_s=recovery_s, wall=lambda: self.at
        )

    def wait(self, seconds: float) -> None:
        """Moves both clocks."""
        self.now += seconds
        self.at += seconds

    def ask(self, request_id: str = "r", prompt: int = 100, output: int = 100, **more: Any) -> Any:
        given = {"holder": "g", "key_digest": "d", "model": "svc-chat"} | more
        prices = {"prompt_price": PROMPT_PRICE, "output_price": OUTPUT_PRICE} | {
            name: given.pop(name) for name in ("prompt_price", "output_price") if name in given
        }
        return self.admission.admit(Admit(request_id, prompt_tokens=prompt, max_tokens=output, **given, **prices))

    def grant(self, request_id: str = "r", prompt: int = 100, output: int = 100, **more: Any) -> Grant:
        answer: Grant | Refusal | UnknownKey | Recovering = self.ask(request_id, prompt, output, **more)
        assert isinstance(answer, Grant), answer
        return answer

    def refusal(self, request_id: str = "r", prompt: int = 100, output: int = 100, **more: Any) -> Refusal:
        answer: Grant | Refusal | UnknownKey | Recovering = self.ask(request_id, prompt, output, **more)
        assert isinstance(answer, Refusal), answer
        return answer

    def adjust(self, prompt: int, request_id: str = "r") -> Any:
        return self.admission.adjust(Adjust(request_id, prompt))

    def end(self, request_id: str = "r", prompt: int = 0, output: int = 0, **more: Any) -> None:
        self.admission.release(Release(request_id, prompt, output, **more))

    def announce(self, grant: Grant, holder: str = "g", **more: Any) -> None:
        """The hold of a grant, as its gateway tells it to a limiter that does not know it."""
        amounts = grant.hold, grant.tokens_charged, PROMPT_PRICE, OUTPUT_PRICE, grant.max_tokens
        open_hold = OpenHold(grant.request_id, grant.account_id, grant.key_id, *amounts, **more)
        self.admission.announce(open_hold, holder)

    def account(self, balance: int = 1_000_000, version: int = 2, active: bool = True, **more: Any) -> None:
        self.admission.apply(AccountState("a", active, balance, version, **more))

    def key(self, version: int = 2, digest: str = "d", key_id: str = "k", active: bool = True, **more: Any) -> None:
        self.admission.apply(KeyState(digest, key_id, "a", active, version, **more))

    def sizes(self) -> tuple[int, int]:
        """Accounts and keys that are known."""
        stats = self.admission.stats()
        return stats.accounts, stats.keys

    def everything(self) -> Any:
        """All that a refusal must leave as it is."""
        account = self.admission._accounts["a"]
        buckets = [account.requests, account.tokens]
        buckets += [one for key in account.keys.values() for one in (key.requests, key.tokens) if one is not None]
        return (
            [bucket.tat for bucket in buckets],
            (account.held, sorted(account.holds), dict(account.idempotent), account.mean_output),
            [(key.held, key.open, key.mean_output) for key in account.keys.values()],
            len(self.admission._leases),
        )

    def windows(self) -> tuple[int, int]:
        """Requests and tokens that remain, seen by a request that is undone at once."""
        grant = self.grant("probe", 0, 1)
        seen = grant.requests.remaining + 1, grant.tokens.remaining + grant.tokens_charged
        self.end("probe", refused=True)
        return seen
