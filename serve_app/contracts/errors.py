"""Errors of the ledger and of the spool. Each message says what the caller can do."""

from __future__ import annotations


class LedgerError(Exception):
    """Base class of all errors of the ledger and of the spool."""


class InvalidValue(LedgerError, ValueError):
    """A name, limit or date that the ledger does not accept; the message names the accepted form."""


class InvalidAmount(InvalidValue):
    """An amount of money that is not an exact number of nano-units in the accepted range."""


class OtherCurrency(InvalidValue):
    """The currency of a setting or an account differs from the ledger's."""


class AccountNotFound(LedgerError, LookupError):
    """The account does not exist. The only argument is its id."""

    def __str__(self) -> str:  # built here, because only the class and `args` (the id) are sent
        return f"no account {self.args[0]!r}: list the accounts to see the ids that exist"


class KeyNotFound(LedgerError, LookupError):
    """The key does not exist. The only argument is its id."""

    def __str__(self) -> str:
        return f"no key {self.args[0]!r}: list the account's keys to see the ids that exist"


class GrantNotFound(LedgerError, LookupError):
    """The account has no such grant. The arguments are the account's id and the grant's number."""

    def __str__(self) -> str:
        return f"{self.args[0]} has no grant {self.args[1]}: list its grants to see their numbers"


class ModelNotFound(LedgerError, LookupError):
    """No command created the identifier, which is the only argument."""

    def __str__(self) -> str:
        return f"no identifier {self.args[0]!r} was created: list the models to see those that are served"


class BackendNotFound(LedgerError, LookupError):
    """No command deployed the backend. The only argument is its name."""

    def __str__(self) -> str:
        return f"no backend {self.args[0]!r} was deployed by command: list the models to see those that exist"


class Conflict(LedgerError):
    """A name or key is already used for something else, or another change came first."""


class InsufficientBalance(LedgerError):
    """The command would take more than the account or the grant has."""


class LedgerUnavailable(LedgerError):
    """The database did not answer. A write may or may not have happened: repeat it with the same id."""


class SchemaMismatch(LedgerError):
    """This release does not run on the database's schema."""


class SpoolFull(LedgerError):
    """The spool has reached its limit, or its disk is full: admit no requests until it is replayed."""


class SpoolBusy(LedgerError):
    """Another process uses a spool with this name."""


class ToolMissing(LedgerError):
    """A database tool is not installed, or is too old."""
