"""Plan of a run: what it measures, in which order, and its maximum duration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SHORT, LONG, CODE, PREFIX, DISTURBED = "short", "long", "code", "prefix", "disturbed"
WORKLOADS = (SHORT, LONG, CODE, PREFIX, DISTURBED)
OURS, PLAIN, ON_VLLM = "ours", "ours-plain", "ours-vllm"  # PLAIN: without speculation; ON_VLLM: vLLM as its engine
ONE_AT_A_TIME = "transformers"
SERVERS = (OURS, PLAIN, ONE_AT_A_TIME, "transformers-cb", "llama-cpp", "vllm", ON_VLLM)


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement of one round."""

    server: str
    workload: str
    clients: int
    least_s: float
    most_s: float
    round: int = 0


@dataclass(frozen=True, slots=True)
class Scope:
    rounds: int
    clients: tuple[int, ...]
    long_clients: tuple[int, ...]
    least_s: float
    most_s: float  # 1.5 times as long with up to 16 clients, because most promises are for these loads
    workloads: tuple[str, ...] = WORKLOADS
    servers: tuple[str, ...] = SERVERS


QUICK = Scope(rounds=1, clients=(1, 4), long_clients=(1,), least_s=1.0, most_s=10.0)
USUAL = Scope(rounds=3, clients=(1, 4, 16, 32, 64), long_clients=(1, 16), least_s=3.0, most_s=12.0)
FULL = Scope(rounds=3, clients=(1, 4, 16, 32, 64), long_clients=(1, 4, 16, 32, 64), least_s=5.0, most_s=45.0)


def turns(scope: Scope, there: Iterable[str]) -> Iterator[tuple[int, str, list[Cell]]]:
    """Yields the servers' turns round by round (A B C A B C), so that a slow minute affects all servers alike."""
    there = list(there)
    for number in range(scope.rounds):
        for server in scope.servers:
            if server in there and (cells := list(_cells(scope, server, number))):
                yield number, server, cells


def _cells(scope: Scope, server: str, number: int) -> Iterator[Cell]:
    # To keep runs short, other servers get only short and long prompts after the first round, except in a full run.
    all_loads = number == 0 or server in (OURS, PLAIN) or scope.most_s >= FULL.most_s
    for workload in scope.workloads:
        if workload in (SHORT, LONG):
            for count in scope.clients if workload == SHORT else scope.long_clients:
                if server == PLAIN and (workload, count) != (SHORT, 1):
                    continue  # one load is enough to show what speculation costs on text that does not repeat
                if server == ONE_AT_A_TIME and count > 4 and not all_loads:
                    continue  # this server runs one request at a time: more clients only wait longer
                most_s = scope.most_s * (1.5 if count <= 16 else 1.0)
                yield Cell(server, workload, count, scope.least_s, most_s, number)
        elif workload == CODE and all_loads:
            yield Cell(server, CODE, 1, scope.least_s, 1.5 * scope.most_s, number)
        elif workload == PREFIX and server != PLAIN and all_loads:
            yield Cell(server, PREFIX, 1, 0.0, scope.most_s, number)
        elif workload == DISTURBED and server not in (PLAIN, ONE_AT_A_TIME) and all_loads:
            yield Cell(server, DISTURBED, 4, 2.0, max(40.0, scope.most_s), number)
