"""Errors of the ledger and of the spool. Each message says what the caller can do."""

from __future__ import annotations


class LedgerError(Exception):
    """Any error of the ledger or of the spool."""


class InvalidValue(LedgerError, ValueError):
    """A name, limit or date that the ledger does not accept; the message names the accepted form."""


class InvalidAmount(InvalidValue):
    """An amount of money that is no exact, sensible number of nano-units."""


class OtherCurrency(InvalidValue):
    """A setting or an account is in another currency than the ledger."""


class AccountNotFound(LedgerError, LookupError):
    """Its only argument is the account's id."""

    def __str__(self) -> str:  # not the arguments of the exception: errors are pickled with them
        return f"no account {self.args[0]!r}: list the accounts to see the ids that exist"


class KeyNotFound(LedgerError, LookupError):
    """Its only argument is the key's id."""

    def __str__(self) -> str:
        return f"no key {self.args[0]!r}: list the account's keys to see the ids that exist"


class GrantNotFound(LedgerError, LookupError):
    """Its arguments are the account's id and the number of a grant that the account does not have."""

    def __str__(self) -> str:
        return f"{self.args[0]} has no grant {self.args[1]}: list its grants to see their numbers"


class ModelNotFound(LedgerError, LookupError):
    """Its only argument is an identifier that was not created by command."""

    def __str__(self) -> str:
        return f"no identifier {self.args[0]!r} was created: list the models to see those that are served"


class BackendNotFound(LedgerError, LookupError):
    """Its only argument is the name of a backend that was not deployed by command."""

    def __str__(self) -> str:
        return f"no backend {self.args[0]!r} was deployed by command: list the models to see those that exist"


class Conflict(LedgerError):
    """A name or a key stands for something else already, or another change came first."""


class InsufficientBalance(LedgerError):
    """More would be taken than the account, or the grant, has."""


class LedgerUnavailable(LedgerError):
    """The database did not answer. A write may or may not have happened: repeat it with the same id."""


class SchemaMismatch(LedgerError):
    """The database was migrated by a newer release than this one."""


class SpoolFull(LedgerError):
    """The spool has reached its bound, or its disk is full: admit no more requests until it is replayed."""


class SpoolBusy(LedgerError):
    """Another process uses a spool of this name."""


class ToolMissing(LedgerError):
    """A program of the database is not installed, or is too old."""
