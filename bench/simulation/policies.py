"""Policies that a simulation can run: the service's rule, and a fixed number of replicas."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.scaling.rule import State, decide
from serve_app.scaling.scaling_settings import ScalingSettings
from serve_app.scaling.signals import Signals


class Rule:
    """The service's scaling rule."""

    def __init__(self, settings: ScalingSettings | None = None) -> None:
        self._settings = settings or ScalingSettings()
        self._state: State | None = None

    def wanted(self, signals: Signals) -> int:
        decision = decide(self._settings, self._state, signals)
        self._state = decision.state
        return decision.wanted


@dataclass(frozen=True, slots=True)
class Fixed:
    """A fixed number of replicas."""

    replicas: int

    def wanted(self, signals: Signals) -> int:
        return self.replicas
