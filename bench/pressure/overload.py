"""An overload: ten accounts with different weights request three times the capacity of a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from bench.pressure.clients import Shape, Stream
from bench.pressure.record import jain, weighted
from bench.pressure.world import World
from bench.simulation.replica import Device, Job, Replica
from serve_app.contracts.limits import Contract

WEIGHTS = (50, 60, 80, 100, 120, 150, 200, 250, 300, 400)
WARM_UP_S = 60.0  # time in which the limits become stable; goodput and shares are measured only after it


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of an overload."""

    goodput: float  # tokens of completed requests, as a share of the capacity
    worst_share: float  # largest relative difference between an account's share and its share by weight
    fairness: float  # Jain's index of tokens per unit of weight
    longest_wait_s: float  # maximum over the admitted requests, warm-up included
    late: int  # admitted, but not started by the deadline
    admitted: int
    refused: int
    given: dict[str, float]  # share of the tokens, by account


def capacity(device: Device, shape: Shape, seed: int = 0, seconds: float = 1_200.0) -> float:
    """Tokens per second, in completed requests, of one replica that always has enough to do."""
    world = World(seed, replicas=0, device=device)
    replica = Replica("full", device, 0.0)
    done = number = 0
    warm = 120.0

    def ended(job: Job) -> Callable[[str, float], None]:
        def run(kind: str, now: float) -> None:
            nonlocal done
            done += (job.prompt + job.output) * (now > warm)

        return run

    now = 0.0
    while now < seconds:
        while replica.waiting < device.slots:
            prompt, output = shape.draw(world)
            job = Job(f"r{number}", "a", 1.0, prompt, output, number, now, inf, lambda kind, now: None)
            job.on_end = ended(job)
            replica.add(job, now)
            number += 1
        now = replica.next_event()
        replica.run_until(now)
    return done / (seconds - warm)


def run(
    seed: int = 1,
    *,
    times: float = 3.0,
    seconds: float = 600.0,
    replicas: int = 4,
    shards: int = 1,
    shape: Shape | None = None,
    prepare: Callable[[World], None] = lambda world: None,
) -> tuple[World, Outcome]:
    """Runs ten accounts that together request `times` times the capacity. Each requests a tenth of that."""
    shape = shape or Shape()
    contract = Contract(rpm=100_000, tpm=3_000_000, concurrency=10_000)
    world = World(seed, replicas=replicas, shards=shards, contract=contract, window_s=10.0)
    most = capacity(world.device, shape) * replicas
    per_s = times * most / len(WEIGHTS) / shape.mean(World(seed))
    weights = {f"account-{weight}": float(weight) for weight in WEIGHTS}
    streams = []
    for account_id, weight in weights.items():
        world.add_account(account_id, Contract(contract.rpm, contract.tpm, contract.concurrency, int(weight)))
        streams.append(Stream(world, account_id, shape, per_s))
    prepare(world)
    world.run(WARM_UP_S + seconds)
    tokens = world.record.tokens(WARM_UP_S, WARM_UP_S + seconds)
    total, sum_of_weights = sum(tokens.values()), sum(weights.values())
    given = {account_id: tokens[account_id] / total for account_id in weights}
    refusals = world.record.refusals()
    sent = sum(stream.sent for stream in streams)
    refused = sum(stream.refused for stream in streams)
    return world, Outcome(
        goodput=total / seconds / most,
        worst_share=max(abs(given[name] * sum_of_weights / weight - 1.0) for name, weight in weights.items()),
        fairness=jain(weighted(tokens, weights)),
        longest_wait_s=max(window.longest_wait_s for window in world.record.windows.values()),
        late=refusals["late"],
        admitted=sent - refused,
        refused=refused,
        given=given,
    )
