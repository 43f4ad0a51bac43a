"""A limiter with a clock that the test moves, short ways to ask it, and builders of the ledger's snapshots."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random
from typing import Any

from serve_app.contracts.books import AccountSnapshot, KeySnapshot
from serve_app.contracts.limiting import Adjust, Admit, Grant, OpenHold, Recovering, Refusal, Release, UnknownKey
from serve_app.contracts.limits import ACCOUNT_LIMITS, KEY_LIMITS, Contract
from serve_app.limiter.admission import Admission

CONTRACT = Contract(rpm=60, tpm=60_000, concurrency=10)
PROMPT_PRICE, OUTPUT_PRICE = 2, 5
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp()
MIDNIGHT = NOON + 12 * 3600


def account_snapshot(
    account_id: str = "a",
    balance: int = 1_000_000,
    version: int = 1,
    active: bool = True,
    expiring: tuple[tuple[float, int], ...] = (),
    **limits: int,
) -> AccountSnapshot:
    """An account as the ledger reports it; `limits` are those of its own."""
    assert set(limits) <= set(ACCOUNT_LIMITS)
    return AccountSnapshot(account_id, "", active, "EUR", 0, balance, version, 0.0, limits, expiring)


def key_snapshot(
    digest: str = "d", key_id: str = "k", account_id: str = "a", active: bool = True, version: int = 1, **terms: Any
) -> KeySnapshot:
    """A key as the ledger reports it; `terms` are its limits and other fields of a snapshot."""
    limits = {name: terms.pop(name) for name in KEY_LIMITS if name in terms}
    return KeySnapshot(key_id, account_id, "", digest, "", active, version, 0.0, limits=limits, **terms)


class World:
    """Account `a` with key `d` and a balance of a million, unless given otherwise. Two clocks: `now` and `at`."""

    def __init__(
        self, contract: Contract = CONTRACT, balance: int = 1_000_000, recovery_s: float = 0.0, **limits: int
    ) -> None:
        self.now = 5000.0
        self.at = NOON
        self.contract = contract
        self.restart(recovery_s)
        self.admission.apply(account_snapshot(balance=balance, **limits))
        self.admission.apply(key_snapshot())

    def restart(self, recovery_s: float = 0.0) -> None:
        """Restarts the limiter: it has no state."""
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
        return self.admission.adjust(Adjust(request_id, prompt, "d"))

    def end(self, request_id: str = "r", prompt: int = 0, output: int = 0, **more: Any) -> None:
        self.admission.release(Release(request_id, prompt, output, **more))

    def announce(self, grant: Grant, holder: str = "g", **more: Any) -> None:
        """The hold of a grant, as its gateway announces it to a limiter that does not know it."""
        amounts = grant.hold, grant.tokens_charged, PROMPT_PRICE, OUTPUT_PRICE, grant.max_tokens
        open_hold = OpenHold(grant.request_id, grant.account_id, grant.key_id, *amounts, **more)
        self.admission.announce(open_hold, holder)

    def account(self, balance: int = 1_000_000, version: int = 2, active: bool = True, **more: Any) -> None:
        self.admission.apply(account_snapshot("a", balance, version, active, **more))

    def key(self, version: int = 2, digest: str = "d", key_id: str = "k", active: bool = True, **more: Any) -> None:
        self.admission.apply(key_snapshot(digest, key_id, "a", active, version, **more))

    def sizes(self) -> tuple[int, int]:
        """The known accounts and keys."""
        return len(self.admission._accounts), len(self.admission._keys)

    def everything(self) -> Any:
        """The state that a refusal must not change."""
        account = self.admission._accounts["a"]
        buckets = [bucket for key in account.keys.values() for bucket in (*key.requests, *key.tokens)]
        return (
            [bucket.tat for bucket in buckets],
            (account.held, sorted(account.holds), dict(account.idempotent), account.mean_output),
            [(key.held, key.open, key.mean_output) for key in account.keys.values()],
            len(self.admission._open_holds),
        )

    def windows(self) -> tuple[int, int]:
        """Requests and tokens that remain, seen by a request that is undone at once."""
        grant = self.grant("probe", 0, 1)
        seen = grant.requests.remaining + 1, grant.tokens.remaining + grant.tokens_charged
        self.end("probe", refused=True)
        return seen
