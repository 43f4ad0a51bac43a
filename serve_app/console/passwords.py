"""Passwords (argon2), one-time codes, and recovery codes.

Each of two queues computes one hash at a time, because a hash needs 64 MiB. Known browsers have a separate queue, so a
flood of attempts from elsewhere does not delay them.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable
from typing import Final, TypeVar

import pyotp
from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from serve_app.contracts.key_format import digest
from serve_app.contracts.people import RESET
from serve_app.contracts.sign_in import RECOVERY_CODES

MIN_LENGTH: Final = 12  # characters
MAX_LENGTH: Final = 200
STEP_S: Final = 30
_LETTERS: Final = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base32
_RECOVERY: Final = 16  # characters, 80 bits: too many to find a code by its digest

Result = TypeVar("Result")

_HASHER: Final = PasswordHasher()
# Checked for unknown e-mail addresses, so the response time does not reveal them.
_NOBODYS: Final = _HASHER.hash("the password of nobody")


class Turns:
    """Runs functions in a thread, one after the other."""

    def __init__(self) -> None:
        self.waiting = 0
        self._turn = asyncio.Semaphore(1)

    async def run(self, function: Callable[..., Result], *args: str) -> Result:
        self.waiting += 1
        try:
            async with self._turn:
                return await asyncio.to_thread(function, *args)
        finally:
            self.waiting -= 1


KNOWN: Final = Turns()  # hashes for people with a session, an invitation or a known browser
UNKNOWN: Final = Turns()


async def hashed(password: str) -> str:
    return await KNOWN.run(_HASHER.hash, password)


async def is_right(stored: str | None, password: str, turns: Turns = KNOWN) -> bool:
    """Whether the password is right. False for people without one: unknown, reset, or with an OpenID identity only."""
    own = None if not stored or stored.startswith(RESET) else stored
    return await turns.run(_verify, own or _NOBODYS, password[:MAX_LENGTH]) and own is not None


def step_of(secret: str, code: str, now: float) -> int | None:
    """Returns the 30 s step of a valid code: the current step, the one before or the one after. None: it is wrong."""
    present = int(now // STEP_S)
    codes = pyotp.TOTP(secret)
    typed = code.replace(" ", "")
    for step in (present, present - 1, present + 1):
        if hmac.compare_digest(codes.generate_otp(step).encode(), typed.encode()):
            return step
    return None


def new_recovery_codes() -> list[str]:
    """Returns new codes such as "4fgh-x9qz-0k2m-7c5d"."""
    texts = ["".join(secrets.choice(_LETTERS) for _ in range(_RECOVERY)) for _ in range(RECOVERY_CODES)]
    return ["-".join(text[at : at + 4] for at in range(0, _RECOVERY, 4)) for text in texts]


def recovery_digest(typed: str) -> str | None:
    """Returns the digest of a recovery code that a person typed. None: the text is not a recovery code."""
    text = typed.lower().translate(str.maketrans("oil", "011", " -"))
    is_code = len(text) == _RECOVERY and all(letter in _LETTERS for letter in text)
    return digest(text) if is_code else None


def _verify(stored: str, password: str) -> bool:
    try:
        return _HASHER.verify(stored, password)
    except (VerificationError, InvalidHashError):
        return False
