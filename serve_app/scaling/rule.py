"""The scaling rule: decides how many replicas a backend should have. It is a pure function.

Its input is the signals, the time and the state from its last evaluation; its output is a number of replicas. The need
is the number of replicas for all running work, waiting work, and work that pressure refused. The rule compares the need
with the target, which includes replicas that are starting, so it does not request these twice. It scales up at once if
requests wait for a replica, wait too long, or were refused. It scales down only to the highest need of the
last `down_after_s`, so that repeated bursts do not start the same replica again and again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, inf, sqrt
from typing import Final

from serve_app.scaling.scaling_settings import ScalingSettings
from serve_app.scaling.schedule import bounds
from serve_app.scaling.signals import ReplicaLoad, Signals

LOOK_S: Final = 1.0  # minimum time between two evaluations; Serve calls the policy ten times a second
LONG_WAIT: Final = "requests wait too long"
_FULL: Final = 0.9  # share of a replica's slots or KV cache; at or above it, its token rate counts as its capacity
_BUSY: Final = 0.25  # share of a replica's slots; above it, the capacity is estimated from the rate
_LEARN_S: Final = 60.0  # time constant for learning the capacity
_ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True)
class State:
    """The rule's state between two evaluations."""

    began_at: float  # time of the first evaluation; earlier demand is unknown
    looked_at: float
    active_at: float  # last time at which the backend had work
    highs: tuple[tuple[float, float], ...] = ()  # highest needs within `down_after_s`: (time, need), highest first
    demand: float | None = None  # in replicas, smoothed
    capacity: float = 0.0  # tokens per second of a full replica, last value
    slots: float = inf  # slots per replica, last value


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of replicas to run, the reason if this is a change, and the next state."""

    wanted: int
    reason: str
    state: State
    need: float = 0.0  # replicas that the demand needs, with spare room, before rounding


@dataclass(frozen=True, slots=True)
class _Demand:
    """The total work, in replicas."""

    replicas: float
    urgent: str  # reason to act on the demand without smoothing; empty if there is none
    capacity: float  # see State
    slots: float


def decide(settings: ScalingSettings, state: State | None, signals: Signals) -> Decision:
    """Returns the next number of replicas.

    `state` is None at the start. No load is known then, so the rule removes no replica.
    """
    now = signals.now
    least, most = bounds(settings.schedule, signals.least, signals.most, now)
    if state is None:
        state = State(now, now - LOOK_S, now)
    passed = now - state.looked_at
    if passed < LOOK_S:
        return Decision(max(least, min(most, signals.target)), "", state)
    demand = _demand(settings, signals, state, passed)
    before = demand.replicas if state.demand is None else state.demand
    smooth = before + (1.0 - exp(-passed / settings.smooth_s)) * (demand.replicas - before)
    need = _with_room(settings, max(smooth, demand.replicas) if demand.urgent else smooth, demand.slots)
    need = min(need, float(signals.most))
    if signals.held > 0:
        need = max(1.0, need)
    if demand.urgent == LONG_WAIT and signals.target <= len(signals.replicas):
        # Requests wait too long, although the load shows room: add one replica, then evaluate again.
        need = max(need, len(signals.replicas) + 1.0)
    idle = signals.held <= 0 and all(load is not None and _is_idle(load) for load in signals.replicas)
    highs = (pair for pair in state.highs if now - pair[0] <= settings.down_after_s and pair[1] > need)
    state = State(
        began_at=state.began_at,
        looked_at=now,
        active_at=state.active_at if idle else now,
        highs=(*highs, (now, need)),
        demand=smooth,
        capacity=demand.capacity,
        slots=demand.slots,
    )
    wanted, reason = _wanted(settings, state, need, demand.urgent, signals)
    bounded = max(least, min(most, wanted))
    if bounded != wanted:
        reason = "minimum or maximum of this hour"
    return Decision(bounded, reason if bounded != signals.target else "", state, need)


def _wanted(settings: ScalingSettings, state: State, need: float, urgent: str, signals: Signals) -> tuple[int, str]:
    now, target = signals.now, signals.target
    if _round_up(need) > target:
        return _round_up(need), urgent or "replicas are full"
    if now - max(state.active_at, state.began_at) >= settings.zero_after_s:
        return 0, "idle"
    if None in signals.replicas or now - state.began_at < settings.down_after_s:
        return target, ""
    kept = max(1, _round_up(state.highs[0][1]))
    return (kept, "less demand") if kept < target else (target, "")


def _demand(settings: ScalingSettings, signals: Signals, state: State, passed: float) -> _Demand:
    loads = [load for load in signals.replicas if load is not None]
    slots = sum(load.slots for load in loads) / len(loads) if loads else state.slots
    learned = _learned(state.capacity, [load.tokens_per_s for load in loads if _is_full(load)], passed)
    capacity = learned or _guessed(loads)
    refused = max((load.refused_tokens_per_s for load in loads), default=0.0)
    in_use = sum(_share(load, settings, capacity) for load in loads)
    in_use += (sum(load.waiting for load in loads) + signals.held) / slots
    if learned > 0:
        # Throughput does not grow in proportion to the batch: a replica with half of its slots in use already does more
        # than half of its maximum work.
        in_use = max(in_use, sum(load.tokens_per_s for load in loads) / capacity)
    if refused > 0:
        urgent = "refused demand"
    elif signals.held > 0:
        urgent = "requests wait for a replica"
    else:
        waits_long = _lower_median([load.queue_age_s for load in loads]) >= settings.queue_age_s
        urgent = LONG_WAIT if waits_long else ""
    unserved = refused / capacity if capacity > 0 else float(refused > 0)
    return _Demand(in_use + unserved, urgent, learned, slots)


def _is_idle(load: ReplicaLoad) -> bool:
    # Ignores the token rate, because it decays without reaching 0.
    return not (load.running or load.waiting or load.refused_tokens_per_s)


def _is_full(load: ReplicaLoad) -> bool:
    return load.waiting > 0 or load.running >= _FULL * load.slots or load.kv_used >= _FULL


def _learned(capacity: float, rates: list[float], passed: float) -> float:
    """Returns the capacity of a replica, updated with the rates of full replicas."""
    seen = sum(rates) / len(rates) if rates else 0.0
    if seen <= 0 or capacity <= 0:
        return capacity or seen
    return capacity + (1.0 - exp(-passed / _LEARN_S)) * (seen - capacity)


def _guessed(loads: list[ReplicaLoad]) -> float:
    """Estimates a replica's capacity from the token rates of busy replicas, until a replica has been full.

    The estimate is high, because a half-full replica already has more than half of its maximum rate.
    """
    busy = [load for load in loads if load.running >= _BUSY * load.slots]
    return sum(load.tokens_per_s for load in busy) / (sum(load.running / load.slots for load in busy) or 1.0)


def _with_room(settings: ScalingSettings, demand: float, slots: float) -> float:
    """Returns the number of replicas for a demand, including spare capacity for its variation.

    Random demand varies with the square root of its size, so the larger the demand, the smaller the spare share.
    """
    return (demand + settings.spare * sqrt(demand / slots)) / settings.fill


def _share(load: ReplicaLoad, settings: ScalingSettings, capacity: float) -> float:
    """Returns the share of a replica that is in use, 0 to 1."""
    prompts_s = load.queued_prefill_tokens / capacity if capacity > 0 else 0.0
    return min(1.0, max(load.running / load.slots, load.kv_used, prompts_s / settings.prefill_s))


def _round_up(replicas: float) -> int:
    return ceil(replicas - _ROUNDING)


def _lower_median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0
