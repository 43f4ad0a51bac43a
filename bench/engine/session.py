"""Runs the benchmark once: starts the servers in turn, measures each load, and always stops all servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from bench.engine import measure
from bench.engine.figures import CountTokens
from bench.engine.plan import Cell, Scope, turns
from bench.engine.servers import EngineServer
from bench.harness.command import say
from bench.harness.servers import ServerError

#: CPU use, in seconds per second, below which a server counts as idle. `_settles` adds the server's own idle use.
IDLE_CPU = 0.25
SETTLE_S = 10.0


class Session:
    """The servers of one run and their records."""

    def __init__(
        self, servers: Iterable[EngineServer], scope: Scope, count: CountTokens, budget_s: float, seed: str
    ) -> None:
        self.servers = {server.name: server for server in servers}
        self.scope = scope
        self.records: list[dict[str, Any]] = []
        self.missing: dict[str, str] = {}  # server -> why it isn't in the tables
        self.cut_short = False
        self._count = count
        self._began = time.monotonic()
        self._until = self._began + budget_s
        self._salt = seed

    def run(self) -> None:
        """Measures all rounds. Stops all servers before it returns or raises."""
        try:
            for number, name, cells in turns(self.scope, self.servers):
                if name in self.missing:
                    continue
                if time.monotonic() > self._until:
                    self.cut_short = True
                    say("time limit reached: the remaining rounds are not measured")
                    break
                say(f"round {number + 1} of {self.scope.rounds}: {name}, {time.monotonic() - self._began:.0f} s so far")
                self._turn(self.servers[name], cells)
        finally:
            for server in self.servers.values():
                server.stop()

    def _turn(self, server: EngineServer, cells: list[Cell]) -> None:
        try:
            self._wake(server)
        except ServerError as error:
            self.missing[server.name] = str(error).splitlines()[0][:200]  # the other lines are its log
            say(str(error))
            return
        assert server.tree is not None
        last = cells[-1]
        for cell in cells:
            began = server.tree.cpu_s()
            record = asyncio.run(measure.measure(server, cell, self._count, self._salt))
            server_cpu = server.tree.cpu_s() - began
            server.peak_memory = max(server.peak_memory, server.tree.memory())
            self.records.append(
                {
                    "server": cell.server,
                    "workload": cell.workload,
                    "clients": cell.clients,
                    "round": cell.round,
                    "server_cpu_s": server_cpu,
                    **record,
                }
            )
            say(f"  {line(self.records[-1])}")
            if cell is last and not server.pausable:
                break  # after its last load, the server is stopped below
            if not self._settles(server):
                say(f"  {server.name} is still busy {SETTLE_S:.0f} s after its requests were cancelled: restarting it")
                server.stop()
                if cell is not last:
                    self._wake(server)
        if server.pausable and server.tree is not None:
            server.tree.pause()
        else:
            server.stop()

    def _wake(self, server: EngineServer) -> None:
        """Starts or resumes the server, warms it up, and measures its idle CPU use once."""
        fresh = server.tree is None
        if server.tree is not None:
            server.tree.resume()
        else:
            began = time.monotonic()
            server.start()
            say(f"  {server.name} replies after {time.monotonic() - began:.0f} s")
        parallel = max((count for count in self.scope.clients if count <= 16), default=1)
        problems = asyncio.run(measure.warm_up(server, f"{self._salt}/{time.time_ns():x}", parallel if fresh else 2))
        if problems:
            server.stop()
            raise ServerError(f"{server.name} does not reply as expected: {problems[0]}")
        assert server.tree is not None
        self._settles(server)
        if server.idle_cpu is None:
            server.idle_cpu = server.tree.busy(1.0)

    def _settles(self, server: EngineServer) -> bool:
        """Waits until the server has dropped cancelled requests. Returns False if it is still busy after SETTLE_S."""
        assert server.tree is not None
        until = time.monotonic() + SETTLE_S
        while server.tree.busy(0.25) > IDLE_CPU + min(1.5 * (server.idle_cpu or 0.0), IDLE_CPU):
            if time.monotonic() > until:
                return False
        return True


def line(record: dict[str, Any]) -> str:
    """One record as one line of progress."""
    parts = [f"{record['workload']:9} {record['clients']:3} clients"]
    names = (
        ("tokens_per_s", "{:.1f} tok/s"), ("ttft_p50_s", "TTFT {:.2f} s"), ("token_p50_s", "{:.4f} s/token"),
        ("ttft_first_s", "first turn {:.2f} s"), ("ttft_second_s", "second {:.2f} s"),
        ("calm_tokens_per_s", "calm {:.1f} tok/s each"), ("kept", "kept {:.2f}"), ("intruder_ttft_s", "TTFT {:.1f} s"),
        ("client_cpu", "client {:.0%} of a core"),
    )  # fmt: skip
    parts += [form.format(record[name]) for name, form in names if record.get(name) is not None]
    parts += [f"PROBLEM {problem}" for problem in record["problems"]]
    return ", ".join(parts)
