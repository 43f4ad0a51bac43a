"""Identifiers and backends as operators see them: the configuration, the ledger's changes to it, and what runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from serve_app.admin.endpoint import AdminServices
from serve_app.api import errors
from serve_app.contracts.calls import Unavailable, application_of
from serve_app.contracts.errors import LedgerUnavailable
from serve_app.contracts.money import Price, price_at
from serve_app.contracts.served import ModelSpec, Served
from serve_app.contracts.served_commands import ReadServed
from serve_app.gateway.backends import Catalogue
from serve_app.gateway.lifecycle import is_ready
from serve_app.settings import IdentifierSettings

LEDGER_S: Final = 2.0  # timeout of a read; then the gateway's copy is used, at most 0.5 s old while the ledger works
NOT_DEPLOYED: Final[Mapping[str, Any]] = {"status": "MISSING", "replicas": 0}


@dataclass(frozen=True, slots=True)
class ServedView:
    """The identifiers of `config.yaml`, as declared there, followed by those of the ledger."""

    catalogue: Catalogue
    served: Served
    status: Mapping[str, Mapping[str, Any]]  # by Serve application
    now: float

    @classmethod
    async def read(cls, admin: AdminServices) -> Self:
        """Reads the current state. Uses this gateway's copy while the ledger is unavailable.

        Raises 503 while Serve can't be reached.
        """
        status, catalogue = await admin.backend_status(), admin.catalogue()
        try:
            async with asyncio.timeout(LEDGER_S):
                served = await admin.accounting.run(ReadServed())
        except (Unavailable, LedgerUnavailable, TimeoutError):
            served = None
        return cls(catalogue, served or catalogue.of_ledger, status, admin.now())

    @property
    def identifiers(self) -> list[str]:
        return list(dict.fromkeys([*self.catalogue.configured, *self.served.models]))

    @property
    def backends(self) -> list[str]:
        """Applications behind identifiers (also with weight 0, or as fallback), then all others that are deployed."""
        configured = self.catalogue.configured.values()
        named = [name for settings in configured for name in (*settings.backends, settings.fallback)]
        named += [name for one in self.identifiers for name in (*self.weights(one), self.spec(one).fallback)]
        deployed = [name for name, one in self.served.backends.items() if one.retired_at is None or name in self.status]
        return list(dict.fromkeys([*(application_of(name) for name in named if name), *deployed]))

    def check_identifier(self, identifier: str) -> None:
        """Raises 404 for an unknown identifier."""
        if identifier not in self.identifiers:
            served = ", ".join(self.identifiers)
            raise errors.not_found(f"the model {identifier!r} does not exist: use one of {served}")

    def is_configured(self, identifier: str) -> bool:
        return identifier in self.catalogue.configured

    def configured_weights(self, identifier: str) -> dict[str, int] | None:
        """Returns the weights of `config.yaml`; None: the identifier is not declared there."""
        settings = self.catalogue.configured.get(identifier)
        return None if settings is None else {name: weight for name, weight in settings.backends.items() if weight}

    def weights(self, identifier: str) -> dict[str, int]:
        traffic = self.served.traffic.get(identifier)
        return dict(self.catalogue.configured[identifier].backends if traffic is None else traffic.weights)

    def traffic_version(self, identifier: str) -> int:
        """Returns the version of the traffic; 0: the weights of `config.yaml` apply."""
        traffic = self.served.traffic.get(identifier)
        return 0 if traffic is None else traffic.version

    def spec(self, identifier: str) -> IdentifierSettings | ModelSpec:
        settings = self.catalogue.configured.get(identifier)
        return self.served.models[identifier].spec if settings is None else settings

    def price(self, identifier: str) -> Price:
        settings = self.catalogue.configured.get(identifier)
        configured = None if settings is None else settings.price.per_token()
        return price_at(self.served.prices.get(identifier, ()), self.now, configured)

    def state(self, backend: str) -> Mapping[str, Any]:
        """Returns status and replicas of the backend's application."""
        return self.status.get(application_of(backend), NOT_DEPLOYED)

    def is_ready(self, backend: str) -> bool:
        """Whether the backend can take requests: a replica runs, or it scales from zero."""
        return is_ready(self.status.get(application_of(backend)))

    def is_known(self, backend: str) -> bool:
        """Whether the backend runs or will run. True for a new deployment that is not yet in Serve's status."""
        application = application_of(backend)
        deployed = self.served.backends.get(application)
        return application in self.status or (deployed is not None and deployed.retired_at is None)

    def users(self, application: str) -> dict[str, dict[str, Any]]:
        """Returns the identifiers that use a backend: its share of their traffic, and whether it is their fallback."""
        found: dict[str, dict[str, Any]] = {}
        for identifier in self.identifiers:
            weights, fallback = self.weights(identifier), self.spec(identifier).fallback
            own_weight = sum(weight for name, weight in weights.items() if application_of(name) == application)
            is_fallback = fallback is not None and application_of(fallback) == application
            if own_weight or is_fallback:
                found[identifier] = {"share": own_weight / max(1, sum(weights.values())), "is_fallback": is_fallback}
        return found


def check_ready(view: ServedView, backends: set[str]) -> None:
    """Raises 422 for a backend that would get more traffic but can't reply."""
    for name in sorted(backends):
        if not view.is_ready(name):
            status = view.state(name)["status"]
            raise errors.invalid_parameters(
                f"{name} is not ready: its application is {status}. It gets traffic only once a replica runs",
                param="backend",
            )


def check_known(view: ServedView, backends: set[str]) -> None:
    """Raises 422 for a backend that does not exist."""
    for name in sorted(backends):
        if not view.is_known(name):
            raise errors.invalid_parameters(f"there is no backend {name!r}: deploy it first", param="backend")
