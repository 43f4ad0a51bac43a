"""The fixed identifiers that clients name, and the backends behind each."""

from __future__ import annotations

import random

from serve_app.settings import GatewaySettings, IdentifierSettings


class Catalogue:
    """Chooses a backend by weight, so that a new one can take over behind a fixed identifier step by step."""

    def __init__(self, settings: GatewaySettings, rng: random.Random) -> None:
        self._models = settings.models
        self._rng = rng

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._models

    def __getitem__(self, identifier: str) -> IdentifierSettings:
        return self._models[identifier]

    @property
    def identifiers(self) -> tuple[str, ...]:
        """In the order of the configuration."""
        return tuple(self._models)

    def choose(self, identifier: str) -> str:
        """The backend for one request."""
        backends = self._models[identifier].backends
        if len(backends) == 1:
            return next(iter(backends))
        return self._rng.choices(list(backends), weights=list(backends.values()))[0]

    def backends(self) -> tuple[str, ...]:
        """All backends that can be chosen, each once."""
        return tuple(
            dict.fromkeys(name for model in self._models.values() for name, weight in model.backends.items() if weight)
        )

    def behind(self, identifier: str) -> tuple[str, ...]:
        """The backends that can be chosen for one identifier."""
        return tuple(name for name, weight in self._models[identifier].backends.items() if weight)


def system_fingerprint(backend: str, fingerprint: str = "") -> str:
    """`system_fingerprint` of a reply: changes when another backend answers, or the same one with other weights.

    `fingerprint` is what a replica tells of its weights; empty where none has.
    """
    return f"fp_{backend}_{fingerprint}" if fingerprint else f"fp_{backend}"
