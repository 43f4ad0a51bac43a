"""Authentication, rate limits and balance holds: soft state over the ledger, decided by serve_app.limits."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.ports import AccountingHandle
from serve_app.ledger.messages import AccountSnapshot, Changes, KeySnapshot
from serve_app.limits import Admission, UnknownKey
from serve_app.limits.messages import (
    AccountState,
    AccountStatus,
    Adjust,
    Admit,
    Announce,
    Contract,
    Identify,
    KeyState,
    Recovering,
    Refusal,
    Release,
    Renew,
    Status,
)  # fmt: skip
from serve_app.settings import GatewayArgs, LimiterSettings, parse

logger = logging.getLogger("ray.serve")

POLL_S = 0.25  # how stale a revocation or a top-up can be
FROM_NOW = 2**62  # beyond any version: answers only where the ledger stands
RECOVERY_S = 1.5  # three heartbeats of a gateway, in which it announces its open holds


@serve.deployment(
    name="Limiter",
    num_replicas=1,
    max_ongoing_requests=1000,
    health_check_period_s=1,
    health_check_timeout_s=10,
    ray_actor_options={"num_cpus": 0},
)
class Limiter:
    """One replica: admission is a decision over all requests of an account at once."""

    def __init__(self, settings: GatewayArgs, accounting: DeploymentHandle) -> None:
        self._accounting = AccountingHandle(accounting)
        self._admission = Admission(
            clock=time.monotonic,
            rng=random.Random(),
            default_contract=LimiterSettings().default_contract(),
            lease_s=settings.lease_s,
            recovery_s=RECOVERY_S,
        )
        self._version: int | None = None
        self._tasks = [
            asyncio.get_running_loop().create_task(self._follow_ledger()),
            asyncio.get_running_loop().create_task(self._expire_leases()),
        ]

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Applies `user_config`: the contract of accounts that have none of their own."""
        self._admission.default_contract = parse(LimiterSettings, config, "Limiter.user_config").default_contract()

    async def ask(self, asks: Sequence[Any]) -> list[Any]:
        """One answer for each ask, in order."""
        answers = [self._decide(ask) for ask in asks]
        unknown = {ask.key_digest for ask, answer in zip(asks, answers, strict=True) if isinstance(answer, UnknownKey)}
        if not unknown:
            return answers
        if self._version is None:
            # A key looked up before the ledger is followed could be revoked without this limiter hearing of it.
            return [
                Recovering(getattr(ask, "request_id", ""), POLL_S) if isinstance(answer, UnknownKey) else answer
                for ask, answer in zip(asks, answers, strict=True)
            ]
        found = await asyncio.gather(*(self._accounting.call("find_key", {"digest": digest}) for digest in unknown))
        for pair in found:
            if pair is not None:
                key, account = pair
                self._admission.apply(_account_state(account))
                self._admission.apply(_key_state(key))
            else:
                logger.info("a key that the ledger does not know was refused")
        return [
            _refuse_unknown(ask, self._decide(ask)) if isinstance(answer, UnknownKey) else answer
            for ask, answer in zip(asks, answers, strict=True)
        ]

    def _decide(self, ask: Any) -> Any:
        match ask:
            case Admit():
                return self._admission.admit(ask)
            case Release():
                return self._admission.release(ask)
            case Renew():
                return self._admission.renew(ask)
            case Adjust():
                return self._admission.adjust(ask)
            case Identify():
                return self._admission.identify(ask)
            case Announce():
                for hold in ask.holds:
                    self._admission.announce(hold, ask.holder)
                return True
            case Status():
                return tuple(self._status(account_id) for account_id in ask.account_ids)
        raise TypeError(f"the limiter does not know {type(ask).__name__}")

    def _status(self, account_id: str) -> AccountStatus:
        contract: Contract = self._admission.effective(account_id)
        return AccountStatus(
            account_id, self._admission.held(account_id), self._admission.open_requests(account_id), contract
        )

    async def _follow_ledger(self) -> None:
        """Applies what changed in the ledger: revocations, limits, top-ups, suspensions."""
        while True:
            try:
                # The first poll only learns where the ledger stands: accounts are looked up when their keys come.
                since = FROM_NOW if self._version is None else self._version
                changes: Changes = await self._accounting.call("changes", {"since": since, "limit": 1000})
                for account in changes.accounts:
                    self._admission.apply(_account_state(account))
                for key in changes.keys:
                    self._admission.apply(_key_state(key))
                self._version = changes.version
                if changes.more:
                    continue
            except Exception as error:
                logger.warning("the ledger could not be followed: %s: %s", type(error).__name__, error)
            await asyncio.sleep(POLL_S)

    async def _expire_leases(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for request_id in self._admission.expire():
                logger.warning("hold of %s expired: its gateway is gone", request_id)


def _account_state(account: AccountSnapshot) -> AccountState:
    return AccountState(
        account.account_id, account.active, account.balance, account.version, account.rpm, account.tpm,
        account.concurrency,
    )  # fmt: skip


def _key_state(key: KeySnapshot) -> KeyState:
    return KeyState(key.digest, key.key_id, key.account_id, key.active, key.version)


def _refuse_unknown(ask: Any, answer: Any) -> Any:
    if not isinstance(answer, UnknownKey):
        return answer
    request_id = getattr(ask, "request_id", "")
    return Refusal(request_id, 401, "invalid_api_key", "the API key is not known here: check it or create a new one")
