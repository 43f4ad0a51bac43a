"""Runs the benchmark once: starts the systems in turn, measures each load, and always stops all systems."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.gateway import load
from bench.gateway.systems import System
from bench.harness import parts
from bench.harness.command import say
from bench.harness.servers import ServerError
from bench.harness.stub_request import wrong_with

WORKLOAD = "complete"  # replies that are not streamed
WARM_UP_CLIENTS = 16


@dataclass(frozen=True, slots=True)
class Scope:
    """Settings of a measurement. Seconds are integers, as wrk needs them."""

    rounds: int = 3
    clients: tuple[int, ...] = (1, 16, 64)
    warm_up_s: int = 10
    window_s: int = 15


def turns(rounds: int, names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yields turns back and forth (A B C, C B A, ...), so that a change in the machine's speed favours no system."""
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            yield number, name


class Session:
    """The systems of one run and their records."""

    def __init__(self, systems: Sequence[System], scope: Scope) -> None:
        self._systems = {system.name: system for system in systems}
        self._scope = scope
        self.records: list[dict[str, Any]] = []
        self.audits: list[dict[str, Any]] = []
        self.missing: dict[str, str] = {}  # system -> why it isn't in the tables

    def run(self) -> None:
        """Measures all rounds. Stops each system after its turn, also after an error."""
        began = time.monotonic()
        for number, name in turns(self._scope.rounds, list(self._systems)):
            if name in self.missing:
                continue
            say(f"round {number + 1} of {self._scope.rounds}: {name}, {time.monotonic() - began:.0f} s so far")
            system = self._systems[name]
            try:
                system.start()
                self._turn(system, number)
            except (ServerError, load.LoadError) as error:
                self.missing[name] = str(error).splitlines()[0][:200]  # the other lines are the server's log
                say(str(error))
            finally:
                system.stop()

    def _turn(self, system: System, number: int) -> None:
        if wrong := wrong_with(system.base_url, system.key):
            raise ServerError(f"{system.name} does not reply as expected: {wrong}")
        assert system.tree is not None
        warm, _ = load.run(system.base_url, system.key, WARM_UP_CLIENTS, self._scope.warm_up_s)
        answered, cut = 1 + warm.requests, WARM_UP_CLIENTS  # wrk cuts each client's last request
        for clients in self._scope.clients:
            before = parts.cpu_by_part(system.tree)
            seen, wrk_cpu_s = load.run(system.base_url, system.key, clients, self._scope.window_s)
            cpu = parts.spent(before, parts.cpu_by_part(system.tree))
            answered, cut = answered + seen.requests, cut + clients
            self.records.append(
                {
                    "server": system.name,
                    "workload": WORKLOAD,
                    "clients": clients,
                    "round": number,
                    **asdict(seen),
                    "requests_per_s": seen.requests_per_s,
                    "cpu_ms": 1000 * sum(cpu.values()) / max(1, seen.requests),
                    "cpu_ms_by_part": parts.per_request_ms(cpu, seen.requests),
                    "client_cpu": wrk_cpu_s / seen.seconds if seen.seconds else 0.0,
                    "machine_load": os.getloadavg()[0],
                    "problems": seen.problems,
                }
            )
            say(f"  {line(self.records[-1])}")
        if books := system.audit(answered, cut):
            self.audits.append({"server": system.name, "round": number, **books})
            say(f"  {books}")


def line(record: dict[str, Any]) -> str:
    """One record as one line of progress."""
    text = (
        f"{record['clients']:3} clients, {record['requests_per_s']:.0f} requests/s, "
        f"p50 {record['p50_ms']:.1f} ms, p99 {record['p99_ms']:.1f} ms, CPU {record['cpu_ms']:.2f} ms a request"
    )
    return ", ".join([text, *(f"PROBLEM {problem}" for problem in record["problems"])])
