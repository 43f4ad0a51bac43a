"""Seals anew what the current key secret does not open, or one that is gone still does."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from serve_app.contracts.calls import Unavailable
from serve_app.contracts.errors import LedgerError
from serve_app.contracts.key_format import KeySecrets
from serve_app.contracts.key_secrets import ListSealed, Reseal, SealedSecret
from serve_app.contracts.ports import BooksPort
from serve_app.contracts.sealed import is_current, seal, unseal

logger = logging.getLogger("ray.serve")

RETRY_S: Final = 5.0
AGAIN_S: Final = 300.0  # processes that know the secret before alone may still seal something under it


class Resealing:
    """What no valid secret opens is left as it is, and logged."""

    def __init__(self, books: BooksPort, key_secrets: KeySecrets) -> None:
        self._books = books
        self._key_secrets = key_secrets

    async def run(self) -> None:
        """Until it is cancelled; without a secret before, it returns after one turn."""
        while True:
            wait_s = AGAIN_S
            try:
                if resealed := await self.turn():
                    logger.info("%d secrets are sealed under the present key secret now", resealed)
                if not self._key_secrets.previous:
                    return
            except (Unavailable, LedgerError) as error:
                logger.warning("sealed secrets wait for the ledger: %s", error)
                wait_s = RETRY_S
            except Exception:
                logger.exception("sealing secrets anew failed")
            await asyncio.sleep(wait_s)

    async def turn(self) -> int:
        """Looks at all sealed secrets once; returns how many it has sealed anew."""
        resealed = 0
        after: str | None = ""
        while after is not None:
            listed, after = await self._books.run(ListSealed(after))
            due = [(one, anew) for one in listed if (anew := self._sealed_anew(one)) is not None]
            if due:
                resealed += await self._books.run(Reseal(tuple(one for one, _ in due), tuple(anew for _, anew in due)))
        return resealed

    def _sealed_anew(self, one: SealedSecret) -> str | None:
        if is_current(one.stored, self._key_secrets, one.purpose):
            return None
        try:
            return seal(unseal(one.stored, self._key_secrets, one.purpose), self._key_secrets, one.purpose)
        except ValueError as error:
            logger.warning("%s of %s: %s", one.purpose, one.row_id, error)
            return None
