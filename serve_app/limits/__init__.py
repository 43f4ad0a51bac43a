"""Limits: who may run now. Decides from what it is told, with clock and randomness handed in; talks to nobody."""

from serve_app.limits.admission import Admission
from serve_app.limits.gcra import Bucket
from serve_app.limits.messages import (
    AccountState,
    AccountStatus,
    Adjust,
    Admit,
    Announce,
    BudgetPeriod,
    Contract,
    Grant,
    Identify,
    Identity,
    KeyState,
    OpenHold,
    PressureReport,
    Recovering,
    Refusal,
    Release,
    Renew,
    Status,
    UnknownKey,
    Window,
)
from serve_app.limits.stats import Stats

__all__ = [
    "AccountState",
    "AccountStatus",
    "Adjust",
    "Admission",
    "Admit",
    "Announce",
    "Bucket",
    "BudgetPeriod",
    "Contract",
    "Grant",
    "Identify",
    "Identity",
    "KeyState",
    "OpenHold",
    "PressureReport",
    "Recovering",
    "Refusal",
    "Release",
    "Renew",
    "Stats",
    "Status",
    "UnknownKey",
    "Window",
]
