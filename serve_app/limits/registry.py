"""The accounts and keys that are known here. What nobody has used for long is forgotten, and looked up again."""

from __future__ import annotations

from itertools import islice

from serve_app.limits.accounts import Account
from serve_app.limits.holds import Hold
from serve_app.limits.keys import Key
from serve_app.limits.messages import AccountState, Contract, KeyState


class Registry:
    """Accounts by id and keys by digest.

    `_idle` holds the keys without open requests and the accounts without keys, the longest idle first. Beginning and
    ending a request and taking over a state move a key to the end or out, so whatever was heard of it is remembered
    for as long as idle things are: a look-up that was read before and arrives later is recognised as old, as long as
    look-ups do not take longer than that.
    """

    __slots__ = ("_default", "_idle", "accounts", "keys")

    def __init__(self, default: Contract) -> None:
        self._default = default
        self.accounts: dict[str, Account] = {}
        self.keys: dict[str, Key] = {}
        self._idle: dict[Key | Account, float] = {}  # since when

    @property
    def default(self) -> Contract:
        """The limits of accounts that have none of their own; may be set at any time."""
        return self._default

    @default.setter
    def default(self, contract: Contract) -> None:
        self._default = contract
        for account in self.accounts.values():
            account.limit(contract)

    def account(self, account_id: str, now: float) -> Account:
        """The account; a new one, of which nothing is known, where there was none."""
        account = self.accounts.get(account_id)
        if account is None:
            account = self.accounts[account_id] = Account(account_id, self._default)
            self._idle[account] = now
        return account

    def key(self, account: Account, key_id: str, now: float) -> Key:
        """The account's key; a new one, of which nothing is known, where there was none."""
        key = account.keys.get(key_id)
        if key is None:
            key = account.keys[key_id] = Key(account, key_id)
            self._idle.pop(account, None)
            self._idle[key] = now
        return key

    def heard_of(self, one: Key | Account, now: float) -> None:
        """Something was learnt of it: if it is idle, it is from now on."""
        if self._idle.pop(one, None) is not None:
            self._idle[one] = now

    def apply(self, state: AccountState | KeyState, now: float) -> None:
        """Takes over what the ledger committed; anything older than what is known is ignored."""
        account = self.account(state.account_id, now)
        if isinstance(state, AccountState):
            account.apply(state, self._default)
            self.heard_of(account, now)
            return
        key = self.key(account, state.key_id, now)
        if key.apply(state, now):
            self.keys[state.digest] = key
        self.heard_of(key, now)

    def open(self, request_id: str, hold: Hold) -> None:
        """See Account."""
        if not hold.key.open:
            del self._idle[hold.key]
        hold.account.open(request_id, hold)

    def close(self, request_id: str, hold: Hold, now: float) -> None:
        """See Account."""
        hold.account.close(request_id)
        if not hold.key.open:
            self._idle[hold.key] = now

    def forget_idle(self, idle_s: float, most: int, now: float) -> int:
        """Forgets what has been idle for `idle_s` seconds; answers how many keys and accounts that were.

        Looks at no more than `most` of them, and at nothing that is not idle. What has not drained yet stays for
        another round.
        """
        found = []
        for one in islice(self._idle, most):
            if self._idle[one] > now - idle_s:
                break
            found.append(one)
        forgotten = 0
        for one in found:
            if one.is_settled(now):
                self._forget(one, now)
                forgotten += 1
            else:
                self.heard_of(one, now)
        return forgotten

    def _forget(self, one: Key | Account, now: float) -> None:
        del self._idle[one]
        if isinstance(one, Account):
            del self.accounts[one.account_id]
            return
        if one.state is not None:
            del self.keys[one.state.digest]
        keys = one.account.keys
        del keys[one.key_id]
        if not keys:
            self._idle[one.account] = now
