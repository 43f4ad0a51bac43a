"""Passwords (argon2) and one-time codes."""

from __future__ import annotations

import asyncio
import hmac
from typing import Final

import pyotp
from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

MIN_LENGTH: Final = 12  # characters
MAX_LENGTH: Final = 200
STEP_S: Final = 30

_HASHER: Final = PasswordHasher()
_NOBODYS: Final = _HASHER.hash("the password of nobody")  # makes unknown addresses take as long as known ones
_turns: Final = asyncio.Semaphore(2)  # 64 MiB each


async def hashed(password: str) -> str:
    async with _turns:
        return await asyncio.to_thread(_HASHER.hash, password)


async def is_right(stored: str | None, password: str) -> bool:
    """Whether the password is right. False for None, and for the empty password of people with an OpenID identity."""
    async with _turns:
        found = await asyncio.to_thread(_verify, stored or _NOBODYS, password[:MAX_LENGTH])
    return found and bool(stored)


def step_of(secret: str, code: str, now: float) -> int | None:
    """Returns the 30 s step of a valid code: the current or the previous step. None: the code is wrong."""
    present = int(now // STEP_S)
    codes = pyotp.TOTP(secret)
    typed = code.replace(" ", "")
    for step in (present, present - 1):
        if hmac.compare_digest(codes.generate_otp(step).encode(), typed.encode()):
            return step
    return None


def _verify(stored: str, password: str) -> bool:
    try:
        return _HASHER.verify(stored, password)
    except (VerificationError, InvalidHashError):
        return False
