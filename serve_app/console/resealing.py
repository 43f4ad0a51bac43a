"""Reseals stored secrets after the secret key was replaced."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from serve_app.contracts.calls import Unavailable
from serve_app.contracts.errors import LedgerError
from serve_app.contracts.ports import BooksPort
from serve_app.contracts.sealed_secrets import ListSealed, Reseal, SealedSecret
from serve_app.storage.sealing import SecretKeys, is_current, seal, unseal

logger = logging.getLogger("ray.serve")

RETRY_S: Final = 5.0
AGAIN_S: Final = 300.0  # between runs; a process that knows only the previous key may still seal secrets under it


class Resealing:
    """Reseals secrets. A secret that no valid key opens stays as it is and is logged."""

    def __init__(self, books: BooksPort, secret_keys: SecretKeys) -> None:
        self._books = books
        self._secret_keys = secret_keys

    async def run(self) -> None:
        """Runs until it is cancelled. Without a previous key, it returns after one turn."""
        while True:
            wait_s = AGAIN_S
            try:
                if resealed := await self.turn():
                    logger.info("sealed %d secrets again under the current secret key", resealed)
                if not self._secret_keys.previous:
                    return
            except (Unavailable, LedgerError) as error:
                logger.warning("sealed secrets wait for the ledger: %s", error)
                wait_s = RETRY_S
            except Exception:
                logger.exception("encrypting the secrets with the new key failed")
            await asyncio.sleep(wait_s)

    async def turn(self) -> int:
        """Checks every sealed secret once; returns the number of resealed secrets."""
        resealed = 0
        after: str | None = ""
        while after is not None:
            listed, after = await self._books.run(ListSealed(after))
            due = [(one, anew) for one in listed if (anew := self._sealed_anew(one)) is not None]
            if due:
                resealed += await self._books.run(Reseal(tuple(one for one, _ in due), tuple(anew for _, anew in due)))
        return resealed

    def _sealed_anew(self, one: SealedSecret) -> str | None:
        if is_current(one.stored, self._secret_keys, one.purpose):
            return None
        try:
            return seal(unseal(one.stored, self._secret_keys, one.purpose), self._secret_keys, one.purpose)
        except ValueError as error:
            logger.warning("%s of %s: %s", one.purpose, one.row_id, error)
            return None
