"""Limits: who may run now. Decides from what it is told, with clock and randomness handed in; talks to nobody."""

from serve_app.limits.admission import Admission, Stats
from serve_app.limits.gcra import Bucket
from serve_app.limits.messages import (
    AccountState,
    AccountStatus,
    Adjust,
    Admit,
    Announce,
    Contract,
    Grant,
    Identify,
    Identity,
    KeyState,
    OpenHold,
    Recovering,
    Refusal,
    Release,
    Renew,
    Status,
    UnknownKey,
    Window,
)

__all__ = [
    "AccountState",
    "AccountStatus",
    "Adjust",
    "Admission",
    "Admit",
    "Announce",
    "Bucket",
    "Contract",
    "Grant",
    "Identify",
    "Identity",
    "KeyState",
    "OpenHold",
    "Recovering",
    "Refusal",
    "Release",
    "Renew",
    "Stats",
    "Status",
    "UnknownKey",
    "Window",
]
