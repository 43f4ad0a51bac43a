"""One day: a crowd of accounts with a daily curve, batch jobs that use all they can get, and failures."""

from __future__ import annotations

from bench.pressure.clients import Crowd, Shape, Workers, daily
from bench.pressure.overload import capacity
from bench.pressure.record import KINDS, jain, weighted
from bench.pressure.world import Scaling, World
from bench.simulation.replica import Device
from serve_app.contracts.limits import Contract

HOUR = 3_600.0
WINDOW_S = 300.0  # all figures and plots are per window of this length
CROWD_CONTRACT = Contract(rpm=600, tpm=200_000, concurrency=32)
BATCH_CONTRACT = Contract(rpm=6_000, tpm=1_000_000, concurrency=128)
BATCH = {f"batch-{n}": weight for n, weight in enumerate((50, 50, 100, 100, 100, 200, 200, 300, 400, 600))}
ILL = "ill-behaved"
BATCH_HOURS = 9.0, 21.0
ILL_HOURS = 12.0, 16.0
BURST_HOURS = 19.5, 19.75  # between these hours, the crowd sends three times as much
LOSS_HOURS = 11.0, 17.0  # at each of these hours, a replica dies
BACK_AFTER_S = 150.0
PEAK = 0.75  # load in the crowd's busiest hour, as a share of all replicas' capacity


def simulate(seed: int, accounts: int, hours: float, scaling: Scaling) -> dict[str, object]:
    """Runs the day and returns its series and totals, for JSON."""
    shape, device = Shape(), Device()
    each = capacity(device, shape, seed)
    world = World(
        seed, replicas=scaling.least, device=device, contract=CROWD_CONTRACT, scaling=scaling, window_s=WINDOW_S
    )
    crowd = _people(world, shape, each * scaling.most, accounts)
    for hour in LOSS_HOURS:
        world.at(hour * HOUR, lambda: world.lose_replica(BACK_AFTER_S))
    world.run(hours * HOUR)
    return _figures(world, crowd, each, accounts)


def _people(world: World, shape: Shape, most: float, accounts: int) -> Crowd:
    rng = world.rng
    wishes = [rng.paretovariate(1.4) for _ in range(accounts)]
    peak_per_s = PEAK * most / shape.mean(world)
    rates = {}
    for number, wish in enumerate(wishes):
        account_id = f"account-{number}"
        weight = rng.choices((50, 100, 200, 400), (20, 60, 15, 5))[0]
        contract = CROWD_CONTRACT
        world.add_account(account_id, Contract(contract.rpm, contract.tpm, contract.concurrency, weight))
        # Limits an account to a hundredth of the intended peak.
        rates[account_id] = peak_per_s * min(0.01, wish / sum(wishes))
    for account_id, weight in [*BATCH.items(), (ILL, 100)]:
        contract = BATCH_CONTRACT
        world.add_account(account_id, Contract(contract.rpm, contract.tpm, contract.concurrency, weight))
    for account_id, weight in BATCH.items():
        Workers(
            world, account_id, shape, max(6, weight // 15), start_s=BATCH_HOURS[0] * HOUR, end_s=BATCH_HOURS[1] * HOUR
        )
    # This account ignores retry-after, and retries each refused request after a second.
    Workers(world, ILL, shape, 12, start_s=ILL_HOURS[0] * HOUR, end_s=ILL_HOURS[1] * HOUR, retry_s=1.0)

    def curve(now: float) -> float:
        return daily(now) * (3.0 if BURST_HOURS[0] <= now / HOUR < BURST_HOURS[1] else 1.0)

    return Crowd(world, rates, shape, curve, most=3.0)


def _figures(world: World, crowd: Crowd, each: float, accounts: int) -> dict[str, object]:
    windows = world.record.between(0.0, world.now)
    hours = [(number + 0.5) * WINDOW_S / HOUR for number in range(len(windows))]
    able = [each * window.mean(window.replicas) for window in windows]
    busy = []
    for number, (window, capacity_per_s) in enumerate(zip(windows, able, strict=True)):
        limited = window.refusals["429 share"] + window.refusals["503 wait"] + window.refusals["503 queue full"] > 0
        steady = 0 < number < len(windows) - 1 and able[number - 1] == capacity_per_s == able[number + 1]
        if limited and steady:
            busy.append(window.done / WINDOW_S / capacity_per_s)
    fairness: list[float | None] = []
    for hour, window in zip(hours, windows, strict=True):
        # Measures fairness among the accounts that always want more and that were limited in this window.
        held = {name: weight for name, weight in _insatiable(hour).items() if window.limited[name]}
        fairness.append(jain(weighted(window.by_account, held)) if len(held) > 2 else None)
    refused = sum(window.refusals.total() for window in windows)
    known = [value for value in fairness if value is not None]
    return {
        "accounts": accounts + len(BATCH) + 1,
        "capacity_per_replica": each,
        "hours": hours,
        "offered": [window.offered / WINDOW_S for window in windows],
        "capacity": able,
        "goodput": [window.done / WINDOW_S for window in windows],
        "multiplier": [window.mean(window.multiplier) for window in windows],
        "least_multiplier": [window.least_multiplier for window in windows],
        "pressure": [window.mean(window.pressure) for window in windows],
        "replicas": [window.mean(window.replicas) for window in windows],
        "fairness": fairness,
        "refusals": {kind: [window.refusals[kind] for window in windows] for kind in KINDS},
        "totals": {
            "tokens": sum(window.done for window in windows),
            "refused": refused,
            "refusals": dict(world.record.refusals()),
            "given_up_by_the_crowd": crowd.given_up,
            "crowd_requests": crowd.sent,
            "longest_wait_s": max(window.longest_wait_s for window in windows),
            "busy_windows": len(busy),
            "busy_goodput": sum(busy) / len(busy) if busy else None,
            "least_busy_goodput": min(busy, default=None),
            "fairness": sum(known) / len(known) if known else None,
            "least_fairness": min(known, default=None),
        },
    }


def _insatiable(hour: float) -> dict[str, float]:
    """Weights of the accounts that always want more at this hour."""
    found = {name: float(weight) for name, weight in BATCH.items()} if BATCH_HOURS[0] < hour < BATCH_HOURS[1] else {}
    return found | {ILL: 100.0} if ILL_HOURS[0] < hour < ILL_HOURS[1] else found
