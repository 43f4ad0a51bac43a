"""The ledger: accounts, API keys, balances and usage, on SQLite or PostgreSQL. Start at `Ledger`."""

from serve_app.ledger.accounts import UNSET
from serve_app.ledger.check import CheckReport, Difference
from serve_app.ledger.database import migrate
from serve_app.ledger.errors import (
    AccountNotFound,
    Conflict,
    InsufficientBalance,
    InvalidAmount,
    InvalidValue,
    KeyNotFound,
    LedgerError,
    LedgerUnavailable,
    SchemaMismatch,
    SettlementRefused,
    SpoolBusy,
    SpoolFull,
)
from serve_app.ledger.ledger import Ledger
from serve_app.ledger.messages import (
    AccountSnapshot,
    Changes,
    KeySnapshot,
    Outcome,
    Price,
    Refusal,
    Settled,
    Settlement,
    SettlementRejected,
    UsageRow,
)
from serve_app.ledger.money import format_amount, format_price, parse_amount, price_per_million

__all__ = [
    "UNSET",
    "AccountNotFound",
    "AccountSnapshot",
    "Changes",
    "CheckReport",
    "Conflict",
    "Difference",
    "InsufficientBalance",
    "InvalidAmount",
    "InvalidValue",
    "KeyNotFound",
    "KeySnapshot",
    "Ledger",
    "LedgerError",
    "LedgerUnavailable",
    "Outcome",
    "Price",
    "Refusal",
    "SchemaMismatch",
    "Settled",
    "Settlement",
    "SettlementRefused",
    "SettlementRejected",
    "SpoolBusy",
    "SpoolFull",
    "UsageRow",
    "format_amount",
    "format_price",
    "migrate",
    "parse_amount",
    "price_per_million",
]
