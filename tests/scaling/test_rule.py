"""The rule: up at once for what waits or was refused, down after minutes, never back and forth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, time

from hypothesis import given
from hypothesis import strategies as st

from serve_app.scaling.rule import State, decide
from serve_app.scaling.scaling_settings import ScalingSettings
from serve_app.scaling.schedule import Hours
from serve_app.scaling.signals import ReplicaLoad, Signals

SLOTS = 16
IDLE = ReplicaLoad(slots=SLOTS)
HALF = ReplicaLoad(slots=SLOTS, running=8, tokens_per_s=500)
FULL = ReplicaLoad(slots=SLOTS, running=16, waiting=4, queue_age_s=3, kv_used=0.7, tokens_per_s=1000)
MONDAY = datetime(2026, 11, 23, tzinfo=UTC).timestamp()


class Backend:
    """Replicas that start at once when the rule wants them, and whose load is the same."""

    def __init__(self, settings: ScalingSettings | None = None, *, least: int = 1, most: int = 8, at: float = MONDAY):
        self.settings = settings or ScalingSettings()
        self.least, self.most = least, most
        self.now = at
        self.state: State | None = None
        self.replicas = self.target = least
        self.reason = ""

    def look(self, load: ReplicaLoad | None, held: float = 0.0) -> int:
        self.now += 2.0
        loads = (load,) * self.replicas
        signals = Signals(self.now, loads, self.target, held, self.least, self.most)
        decision = decide(self.settings, self.state, signals)
        self.state, self.target, self.reason = decision.state, decision.wanted, decision.reason
        return self.target

    def last(self, seconds: float, load: ReplicaLoad | Callable[[int], ReplicaLoad]) -> list[int]:
        """The numbers of replicas over a time in which they are ready at once."""
        seen = []
        for _ in range(int(seconds / 2.0)):
            seen.append(self.look(load(self.replicas) if callable(load) else load))
            self.replicas = self.target
        return seen


def shared(running: float) -> Callable[[int], ReplicaLoad]:
    """So many sequences, divided among the replicas."""

    def load(replicas: int) -> ReplicaLoad:
        each = min(float(SLOTS), running / max(1, replicas))
        return replace(IDLE, running=each, tokens_per_s=60.0 * each)

    return load


def test_a_queue_starts_replicas_at_the_first_look() -> None:
    backend = Backend()
    assert backend.look(FULL) == 2
    assert backend.reason


def test_refused_demand_alone_starts_as_many_replicas_as_it_needs_in_one_step() -> None:
    backend = Backend()
    refused = ReplicaLoad(slots=SLOTS, running=12, tokens_per_s=750, refused_tokens_per_s=3000)
    # 0.75 of a replica does 750 tokens per second, so what was refused is the work of three more.
    assert backend.look(refused) == 4
    assert backend.reason == "refused demand"


def test_replicas_that_start_are_not_asked_for_again() -> None:
    backend = Backend()
    wanted = [backend.look(replace(FULL, refused_tokens_per_s=2000)) for _ in range(40)]  # none becomes ready
    assert wanted == [wanted[0]] * 40
    assert wanted[0] == 4


def test_a_moment_with_many_sequences_and_no_queue_starts_nothing() -> None:
    backend = Backend()
    full = ReplicaLoad(slots=SLOTS, running=16, tokens_per_s=1000)
    backend.last(60, HALF)
    assert backend.last(4, full) == [1, 1]
    assert backend.last(20, HALF) == [1] * 10
    assert 2 in backend.last(90, full)


def test_kv_use_and_prompts_count_as_sequences_do() -> None:
    for load in (
        ReplicaLoad(slots=SLOTS, running=4, kv_used=0.99, tokens_per_s=100),
        ReplicaLoad(slots=SLOTS, running=4, queued_prefill_tokens=100_000, tokens_per_s=100),
    ):
        backend = Backend()
        assert 2 in backend.last(40, load), load


def test_what_full_replicas_were_seen_to_do_counts_more_than_how_many_sequences_there_are() -> None:
    def busy(replicas: int) -> ReplicaLoad:
        # A third of the sequences of three, but four fifths of their work: two would be full.
        return ReplicaLoad(SLOTS, 15.0 / replicas, tokens_per_s=3 * 720.0 / replicas)

    for seen, left in ((4.0, 3), (0.0, 2)):
        backend = Backend()
        backend.last(seen, ReplicaLoad(slots=SLOTS, running=SLOTS, tokens_per_s=900))
        backend.replicas = backend.target = 3
        assert backend.last(600, busy)[-1] == left


def test_an_old_queue_gets_one_replica_more_even_where_numbers_see_room() -> None:
    backend = Backend()
    slow = ReplicaLoad(slots=SLOTS, running=2, waiting=1, queue_age_s=5, tokens_per_s=10)
    assert backend.look(slow) == 2
    assert backend.look(slow) == 2  # it has not started yet
    assert backend.reason == ""


def test_replicas_stay_for_the_highest_need_of_the_last_minutes() -> None:
    backend = Backend()
    backend.last(300, shared(60))
    most = backend.target
    assert most >= 4
    down_after_s = backend.settings.down_after_s
    seen = backend.last(down_after_s + 120, shared(10))
    assert seen[: int(down_after_s / 2) - 1] == [most] * (int(down_after_s / 2) - 1)
    assert seen[-1] == 1


def test_a_load_that_comes_and_goes_faster_than_replicas_leave_changes_nothing() -> None:
    backend = Backend()
    backend.last(200, shared(60))
    seen = [number for _ in range(10) for number in backend.last(60, shared(10)) + backend.last(60, shared(60))]
    settled = seen[120:]  # from the third time on
    assert set(settled) == {settled[0]}


def test_a_new_controller_takes_nothing_away_until_it_has_seen_enough() -> None:
    backend = Backend()
    backend.replicas = backend.target = 5
    assert backend.last(140, shared(4)) == [5] * 70
    assert backend.last(20, shared(4))[-1] == 1


def test_a_replica_that_has_not_reported_keeps_all() -> None:
    backend = Backend()
    backend.last(300, shared(60))
    most = backend.target
    for _ in range(300):
        assert backend.look(None) == most


def test_the_last_replica_goes_only_after_a_long_time_without_any_request() -> None:
    backend = Backend(ScalingSettings(zero_after_s=600), least=0)
    backend.replicas = backend.target = 1
    assert set(backend.last(590, IDLE)) == {1}
    assert backend.last(20, IDLE)[-1] == 0
    busy = Backend(ScalingSettings(zero_after_s=600), least=0)
    busy.replicas = busy.target = 1
    seen = [number for _ in range(6) for number in busy.last(500, IDLE) + busy.last(10, HALF)]
    assert set(seen) == {1}


def test_a_rate_that_fades_away_keeps_no_replica() -> None:
    backend = Backend(ScalingSettings(zero_after_s=60), least=0)
    backend.replicas = backend.target = 1
    backend.last(20, ReplicaLoad(slots=SLOTS, running=SLOTS, tokens_per_s=900))
    backend.replicas = backend.target = 1
    assert backend.last(400, ReplicaLoad(slots=SLOTS, kv_used=0.01, tokens_per_s=1e-9))[-1] == 0


def test_a_request_that_waits_for_any_replica_starts_one() -> None:
    backend = Backend(least=0)
    assert backend.replicas == 0
    assert backend.look(None, held=1) == 1
    assert backend.look(None, held=1) == 1


def test_the_schedule_bounds_both_ways() -> None:
    schedule = (
        Hours(days=("mon",), since=time(8), until=time(18), min_replicas=3, max_replicas=6),
        Hours(since=time(22), until=time(6), max_replicas=2),
    )
    settings = ScalingSettings(schedule=schedule)
    assert Backend(settings, at=MONDAY + 9 * 3600).look(IDLE) == 3
    assert Backend(settings, at=MONDAY + 12 * 3600).last(60, replace(FULL, refused_tokens_per_s=90_000))[-1] == 6
    assert Backend(settings, at=MONDAY + 23 * 3600).last(60, replace(FULL, refused_tokens_per_s=90_000))[-1] == 2
    assert Backend(settings, at=MONDAY + 29 * 3600).last(60, replace(FULL, refused_tokens_per_s=90_000))[-1] == 2
    assert Backend(settings, at=MONDAY + 33 * 3600).look(IDLE) == 1


loads = st.builds(
    ReplicaLoad,
    slots=st.just(SLOTS),
    running=st.integers(0, SLOTS),
    waiting=st.integers(0, 50),
    queue_age_s=st.floats(0, 100),
    kv_used=st.floats(0, 1),
    queued_prefill_tokens=st.integers(0, 100_000),
    tokens_per_s=st.floats(0, 10_000),
    refused_tokens_per_s=st.floats(0, 100_000),
)


@given(st.lists(st.tuples(st.lists(st.none() | loads, max_size=5), st.integers(0, 20)), max_size=40))
def test_whatever_is_reported_the_bounds_hold_and_a_higher_load_never_means_fewer(
    looks: Sequence[tuple[list[ReplicaLoad | None], int]],
) -> None:
    settings = ScalingSettings()
    states: list[State | None] = [None, None]
    now, targets = MONDAY, [2, 2]
    for replicas, held in looks:
        now += 5.0
        more = [load and replace(load, waiting=load.waiting + 10) for load in replicas]
        for index, seen in enumerate((replicas, more)):
            signals = Signals(now, tuple(seen), targets[0], held, 1, 6)
            decision = decide(settings, states[index], signals)
            states[index], targets[index] = decision.state, decision.wanted
            assert 1 <= decision.wanted <= 6
        assert targets[1] >= targets[0]
