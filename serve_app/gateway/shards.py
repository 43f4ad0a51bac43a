"""Limiter and accounting in several processes: each account belongs to one shard of either, told by its id's hash.

All gateways must agree on the number of limiter shards, so it is changed with the service stopped; who counts otherwise
than a limiter lets nothing in (serve_app.limits.shard_count). Accounting may be asked by any count: the ledger orders.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from serve_app.gateway.coalesce import Unavailable
from serve_app.gateway.leases import Leases
from serve_app.gateway.ports import AccountingPort, SettleAnswer
from serve_app.ledger.errors import LedgerUnavailable
from serve_app.ledger.messages import Settlement
from serve_app.limits.messages import Adjust, Admit, Grant, Identify, OpenHold, Refusal, Release, Status, UnknownKey

MOST_KEYS: Final = 100_000  # whose account a gateway remembers: about 20 MB


def shard_of(account_id: str, count: int) -> int:
    """The shard of an account among `count`; the same in every process and release."""
    return zlib.crc32(account_id.encode()) % count


def shard_name(deployment: str, index: int) -> str:
    """The name of a shard's deployment: Limiter, Limiter-1, Limiter-2."""
    return deployment if index == 0 else f"{deployment}-{index}"


class AccountingShards:
    """AccountingPort over the shards. All write one ledger, so any of them could answer: the split shares the work."""

    def __init__(self, shards: Sequence[AccountingPort]) -> None:
        self.shards = tuple(shards)

    def of(self, account_id: str) -> AccountingPort:
        """The shard of an account."""
        return self.shards[shard_of(account_id, len(self.shards))]

    async def settle(self, settlements: list[Settlement]) -> Sequence[SettleAnswer]:
        """See AccountingPort. A shard that is away leaves LedgerUnavailable in its settlements' places."""
        if len(self.shards) == 1:
            return await self.shards[0].settle(settlements)
        parts: dict[int, list[int]] = {}
        for position, settlement in enumerate(settlements):
            parts.setdefault(shard_of(settlement.account_id, len(self.shards)), []).append(position)
        answers: list[SettleAnswer] = [LedgerUnavailable("not asked")] * len(settlements)

        async def ask(index: int, positions: list[int]) -> None:
            part = [settlements[position] for position in positions]
            try:
                found = await self.shards[index].settle(part)
            except Unavailable as error:
                found = [LedgerUnavailable(str(error))] * len(part)
            for position, answer in zip(positions, found, strict=True):
                answers[position] = answer

        await asyncio.gather(*(ask(index, positions) for index, positions in parts.items()))
        return answers

    async def call(self, operation: str, arguments: dict[str, Any]) -> Any:
        """See AccountingPort."""
        account_id = arguments.get("account_id")
        shard = self.of(account_id) if isinstance(account_id, str) else self.shards[0]
        return await shard.call(operation, arguments)


class LimiterShards:
    """This gateway's side of all limiter shards: sends each ask where its account belongs. See Leases.

    With several shards a key's account must be known before anybody can be asked. It never changes, so each gateway
    looks it up once; whether the key is still good is the shard's to say.
    """

    def __init__(self, leases: Sequence[Leases], accounting: AccountingPort, *, most_keys: int = MOST_KEYS) -> None:
        self.holder = leases[0].holder
        self._leases = tuple(leases)
        self._accounting = accounting
        self._most_keys = most_keys
        self._accounts: OrderedDict[str, str] = OrderedDict()  # key digest -> account, the longest unused first
        self._routes: dict[str, Leases] = {}  # open requests, and those that are being admitted
        for one in self._leases:
            one.join(len(self._leases), lambda: self.open_requests)

    @property
    def admit_timeout_s(self) -> float:
        """How long a limiter that is restarting is waited for, in seconds; may be set at any time."""
        return self._leases[0].admit_timeout_s

    @admit_timeout_s.setter
    def admit_timeout_s(self, seconds: float) -> None:
        for leases in self._leases:
            leases.admit_timeout_s = seconds

    @property
    def open_requests(self) -> int:
        """Requests that hold something."""
        return sum(leases.open_requests for leases in self._leases)

    def start(self) -> None:
        """Starts the heartbeats."""
        for leases in self._leases:
            leases.start()

    async def stop(self) -> None:
        """Ends the heartbeats; holds that are still open then expire with their lease."""
        await asyncio.gather(*(leases.stop() for leases in self._leases))

    async def ask(self, ask: Any) -> Any:
        """The answer of the shard that knows; see Leases.ask. Raises Unavailable."""
        if len(self._leases) == 1:
            if isinstance(ask, Admit):
                await self._agree()
            return await self._leases[0].ask(ask)
        match ask:
            case Admit() | Identify():
                return await self._of_key(ask)
            case Adjust():
                leases = self._routes.get(ask.request_id)
                if leases is None:
                    raise Unavailable("the request is not open here")
                return await leases.ask(ask)
            case Status():
                return await self._status(ask)
        raise TypeError(f"{type(ask).__name__} belongs to no account")

    @property
    def disagreement(self) -> str | None:
        """Why nothing is let in: this gateway or another one does not count the limiter shards that there are."""
        return next((leases.disagreement for leases in self._leases if leases.disagreement is not None), None)

    async def _agree(self) -> None:
        """All shards must count as this gateway does: others than the one that is asked may decide over the account."""
        for leases in self._leases:
            if not leases.is_agreed:
                await leases.agree()

    def opened(self, admit: Admit, grant: Grant) -> None:
        """Keeps the grant's hold alive from here on."""
        self._of(grant.account_id).opened(admit, grant)

    def adopt(self, holds: Sequence[OpenHold]) -> None:
        """Keeps holds of a gateway that died alive from here on; they are announced before anything else is asked."""
        for leases in self._leases:
            leases.adopt([hold for hold in holds if self._of(hold.account_id) is leases])

    def release(self, release: Release) -> None:
        """Ends the hold. Never fails and never waits: it is called where a request is being cancelled."""
        leases = self._leases[0] if len(self._leases) == 1 else self._routes.pop(release.request_id, None)
        if leases is None and release.account_id is not None:
            leases = self._of(release.account_id)
        if leases is not None:  # else nobody was asked to admit it
            leases.release(release)

    def _of(self, account_id: str) -> Leases:
        return self._leases[shard_of(account_id, len(self._leases))]

    async def _of_key(self, ask: Admit | Identify) -> Any:
        request_id = ask.request_id if isinstance(ask, Admit) else ""
        account_id = self._accounts.get(ask.key_digest)
        if account_id is None:
            if not ask.look_up:
                return UnknownKey(request_id, ask.key_digest)
            account_id = await self._account_of(ask.key_digest)
            if account_id is None:
                message = "the API key is not known here: check it or create a new one"
                return Refusal(request_id, 401, "invalid_api_key", message)
        self._accounts.move_to_end(ask.key_digest)
        leases = self._of(account_id)
        if isinstance(ask, Identify):
            return await leases.ask(ask)
        await self._agree()
        # Until it is released: whether one that is cancelled here has been let in, nobody knows.
        self._routes[request_id] = leases
        answer = await leases.ask(ask)
        if not isinstance(answer, Grant):
            self._routes.pop(request_id, None)
        return answer

    async def _account_of(self, digest: str) -> str | None:
        """None for a key that the ledger does not know. Raises Unavailable while the ledger is away."""
        try:
            async with asyncio.timeout(self.admit_timeout_s):
                found = await self._accounting.call("find_key", {"digest": digest})
        except (LedgerUnavailable, TimeoutError) as error:
            raise Unavailable(f"the ledger is away: {error}") from None
        if found is None:
            return None
        key, _ = found
        account_id: str = key.account_id
        self._accounts[digest] = account_id
        while len(self._accounts) > self._most_keys:
            self._accounts.popitem(last=False)
        return account_id

    async def _status(self, ask: Status) -> tuple[Any, ...]:
        parts: dict[int, list[int]] = {}
        for position, account_id in enumerate(ask.account_ids):
            parts.setdefault(shard_of(account_id, len(self._leases)), []).append(position)
        found: list[Any] = [None] * len(ask.account_ids)

        async def of_shard(index: int, positions: list[int]) -> None:
            part = tuple(ask.account_ids[position] for position in positions)
            for position, status in zip(positions, await self._leases[index].ask(Status(part)), strict=True):
                found[position] = status

        await asyncio.gather(*(of_shard(index, positions) for index, positions in parts.items()))
        return tuple(found)
