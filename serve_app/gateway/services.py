"""Holds the parts that all exchanges of one gateway share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from serve_app.contracts.ports import BackendPort
from serve_app.gateway.backends import Catalogue
from serve_app.gateway.background import BackgroundRuns
from serve_app.gateway.limiter_client import LimiterClient
from serve_app.gateway.observer import Observer
from serve_app.gateway.record import RequestRecord
from serve_app.gateway.settlements import Settlements
from serve_app.gateway.starts import Starts
from serve_app.gateway.tracing import Tracing
from serve_app.settings import GatewaySettings


@dataclass(slots=True)
class Services:
    """The parts of one gateway."""

    settings: GatewaySettings
    catalogue: Catalogue
    limiter: LimiterClient
    settlements: Settlements
    backends: BackendPort
    observer: Observer
    tracing: Tracing | None = None
    orphan_delay_s: float = 2.0  # seconds after which a replica settles an interrupted stream in this gateway's place
    clock: Callable[[], float] = time.monotonic  # seconds, to time requests
    background: BackgroundRuns = field(init=False)
    starts: Starts = field(default_factory=Starts)
    calls: set[RequestRecord] = field(default_factory=set)  # requests at backends; `Lifecycle` removes ended ones

    def __post_init__(self) -> None:
        self.background = BackgroundRuns(self.settlements)
