"""What can go wrong in the ledger, each error saying what the caller can do."""

from __future__ import annotations

from typing import Any

from serve_app.ledger.messages import SettlementRejected


class LedgerError(Exception):
    """Any refusal or failure of the ledger."""


class InvalidValue(LedgerError, ValueError):
    """A name, limit or date that the ledger does not take; the message names the accepted form."""


class InvalidAmount(InvalidValue):
    """An amount of money that is no exact, sensible number of nano-units."""


class AccountNotFound(LedgerError, LookupError):
    """No account has this id."""

    def __init__(self, account_id: str) -> None:
        super().__init__(f"no account {account_id!r}: list the accounts to see the ids that exist")
        self.account_id = account_id

    def __reduce__(self) -> tuple[Any, ...]:  # errors cross processes; the default would hand the message in again
        return self.__class__, (self.account_id,)


class KeyNotFound(LedgerError, LookupError):
    """No API key has this id."""

    def __init__(self, key_id: str) -> None:
        super().__init__(f"no API key {key_id!r}: list the account's keys to see the ids that exist")
        self.key_id = key_id

    def __reduce__(self) -> tuple[Any, ...]:
        return self.__class__, (self.key_id,)


class GrantNotFound(LedgerError, LookupError):
    """The account has no grant of this number."""

    def __init__(self, account_id: str, grant_id: int) -> None:
        super().__init__(f"{account_id} has no grant {grant_id}: list its grants to see their numbers")
        self.account_id = account_id
        self.grant_id = grant_id

    def __reduce__(self) -> tuple[Any, ...]:
        return self.__class__, (self.account_id, self.grant_id)


class Conflict(LedgerError):
    """The same idempotency key, or the same API key, was used before for something else."""


class InsufficientBalance(LedgerError):
    """More would be taken than the account, or the grant, has."""


class SettlementRefused(LedgerError):
    """A settlement that can never be settled as it is; `rejected` says why."""

    def __init__(self, rejected: SettlementRejected) -> None:
        super().__init__(f"settlement {rejected.request_id!r} refused: {rejected.message}")
        self.rejected = rejected

    def __reduce__(self) -> tuple[Any, ...]:
        return self.__class__, (self.rejected,)


class LedgerUnavailable(LedgerError):
    """The database did not answer. What was asked may or may not have happened: repeat it with the same id."""


class SchemaMismatch(LedgerError):
    """The database was migrated by a newer release than this one."""


class SpoolFull(LedgerError):
    """The spool has reached its bound, or its disk is full: admit no more requests until it was replayed."""


class SpoolBusy(LedgerError):
    """Another process uses a spool of this name."""
