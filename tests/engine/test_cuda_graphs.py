"""Padded decode steps over fixed buffers against eager ones; on the CPU a step is repeated instead of captured."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serve_app.engine.models import rope
from serve_app.engine.models.cuda_graphs import (
    GATHER_BYTES,
    MAX_GRAPHS,
    Bucket,
    DecodeReplay,
    Replay,
    StaticInputs,
    capture_cuda,
    choose_bucket,
    plan_buckets,
    repeat,
    row_buckets,
)
from serve_app.engine.models.fused import FusedRunner, LlamaDecoder
from serve_app.engine.models.kv_cache import KVCache
from serve_app.engine.models.llama import take_weights
from serve_app.engine.models.pointwise import PLAIN, compiled
from serve_app.engine.scheduling.sequence import Chunk, Sequence
from tests.engine.families import FAMILIES, Blocks, make_model, prefill, settings, tokens_of

BUCKETS = [Bucket(rows, context) for context in (16, 64) for rows in (8, 4, 2, 1)]


def make_pair(family: str, buckets: list[Bucket], capture: Any = repeat) -> tuple[FusedRunner, DecodeReplay]:
    """An eager runner with a spare block in its cache, and a replay over the same cache."""
    chosen = settings(max_context=128)
    model = make_model(family, max_position_embeddings=512 if family in ("llama, scaled rope", "qwen2, yarn") else 32)
    table = rope.RopeTable(model, 128, torch.float)
    runner = FusedRunner(take_weights(model), table, chosen)
    runner.cache = KVCache.within(chosen, runner.decoder.layer_shapes, 128, spare=1)
    replay = DecodeReplay(runner.decoder, runner.cache, table, buckets, capture)
    replay.prepare()
    return runner, replay


def decoding(runner: FusedRunner, lengths: list[int]) -> list[Sequence]:
    """Sequences of these lengths whose last token is still to be computed."""
    blocks = Blocks(runner.num_blocks, 4)
    sequences = []
    for length in lengths:
        of_class = next(i for i, bound in enumerate(runner.class_bounds) if length <= bound)
        sequence = blocks.sequence(tokens_of(length, length), length_class=of_class)
        if length > 1:
            runner.execute([prefill(sequence, length - 1)])
            sequence.num_computed = length - 1
        sequences.append(sequence)
    return sequences


def stored(runner: FusedRunner) -> list[torch.Tensor]:
    """What the cache holds for the allocator's own blocks."""
    return [t[: runner.num_blocks].clone() for pair in runner.cache.layers.values() for t in pair]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [[9], [1, 16, 5], [60, 3, 33, 17, 2], [40, 41, 42, 43, 1, 2, 3, 4]], ids=str)
def test_a_padded_step_computes_what_an_eager_one_does(family: str, lengths: list[int]) -> None:
    runner, replay = make_pair(family, BUCKETS)
    chunks = [prefill(s) for s in decoding(runner, lengths)]
    got = replay.run(chunks)
    assert got is not None
    by_replay = stored(runner)
    torch.testing.assert_close(got, runner.execute(chunks), atol=2e-5, rtol=1e-4)
    for left, right in zip(by_replay, stored(runner), strict=True):
        torch.testing.assert_close(left, right, atol=2e-5, rtol=1e-4)


def test_draft_tokens_are_rows_that_see_those_before_them() -> None:
    runner, replay = make_pair("llama", BUCKETS)
    one, two = decoding(runner, [14, 30])
    chunks = [Chunk(one, 13, 4, (7, 8, 9)), prefill(two)]
    got = replay.run(chunks)
    assert got is not None
    assert got.shape[0] == 5
    torch.testing.assert_close(got, runner.execute(chunks), atol=2e-5, rtol=1e-4)


def test_padding_touches_no_block_but_the_spare_one() -> None:
    runner, replay = make_pair("llama", [Bucket(8, 64)])
    (sequence,) = decoding(runner, [10])
    before = stored(runner)
    replay.run([prefill(sequence)])
    written = sequence.block_table[9 // 4]
    for old, new in zip(before, stored(runner), strict=True):
        changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == [written]


def test_a_smaller_step_after_a_larger_one_sees_nothing_of_it() -> None:
    runner, replay = make_pair("llama", [Bucket(8, 64)])
    many = [prefill(s) for s in decoding(runner, [60, 61, 62, 63, 50, 40])]
    alone = many[3:4]
    first = replay.run(alone)
    replay.run(many)
    again = replay.run(alone)
    assert first is not None
    assert torch.equal(first, again)  # type: ignore[arg-type]


def test_logits_outlive_the_next_step() -> None:
    runner, replay = make_pair("llama", BUCKETS)
    one, two = ([prefill(s)] for s in decoding(runner, [10, 11]))
    first = replay.run(one)
    assert first is not None
    kept = first.clone()
    replay.run(two)
    assert torch.equal(first, kept)


def test_steps_that_no_bucket_holds_are_left_to_the_eager_path() -> None:
    runner, replay = make_pair("llama", [Bucket(2, 16)])
    short, long, third = decoding(runner, [5, 20, 3])
    assert replay.run([prefill(long)]) is None  # too long
    assert replay.run([prefill(short), prefill(third), prefill(decoding(runner, [4])[0])]) is None  # too many
    fresh = Blocks(runner.num_blocks, 4).sequence(tokens_of(6))
    assert replay.run([prefill(fresh)]) is None  # a prompt
    assert replay.run([prefill(fresh, 1)]) is None  # a piece of one
    assert replay.run([]) is None


def failing_at(numbers: set[int], error: type[Exception]) -> Callable[[Callable[[], None]], Replay]:
    count = 0

    def capture(step: Callable[[], None]) -> Replay:
        nonlocal count
        count += 1
        if count in numbers:
            raise error("operation not permitted when stream is capturing\nmore about it")
        return repeat(step)

    return capture


@pytest.mark.parametrize(
    ("error", "captured"),
    [(RuntimeError, [Bucket(1, 16)]), (torch.OutOfMemoryError, [Bucket(1, 16), Bucket(2, 16)])],
)
def test_a_failed_capture_costs_one_line_and_leaves_the_steps_to_the_eager_path(
    caplog: pytest.LogCaptureFixture, error: type[Exception], captured: list[Bucket]
) -> None:
    with caplog.at_level(logging.WARNING):
        runner, replay = make_pair("llama", [Bucket(1, 16), Bucket(4, 16), Bucket(2, 16)], failing_at({2}, error))
    (line,) = (record.message for record in caplog.records)
    assert line.endswith("those steps run eagerly: operation not permitted when stream is capturing")
    assert replay.buckets == captured
    sequences = decoding(runner, [5, 6, 7])
    assert replay.run([prefill(sequences[0])]) is not None
    assert replay.run([prefill(s) for s in sequences]) is None
    runner.replay = replay
    assert runner.execute([prefill(s) for s in sequences]).shape[0] == 3


class FakeCuda:
    """Notes in which order the capture's calls come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.current = self.stream_named("current")
        fake = {
            "Stream": lambda device: self.stream_named("side"),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.calls.append("replay")),
            "graph_pool_handle": lambda: "pool",
            "current_stream": lambda: self.current,
            "set_stream": lambda stream: self.calls.append(f"set {stream.name}"),
            "device": lambda device: contextlib.nullcontext(),
            "stream": lambda stream: self.within(f"on {stream.name}"),
            "graph": lambda graph, *, pool, stream, capture_error_mode: self.within(
                f"capture {pool} on {stream.name}, {capture_error_mode}"
            ),
        }
        for name, value in fake.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def stream_named(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.calls.append(f"{name} waits for {other.name}"))

    @contextlib.contextmanager
    def within(self, what: str) -> Iterator[None]:
        self.calls.append(f"{what} {{")
        try:
            yield
        finally:
            self.calls.append("}")


def test_a_capture_follows_torchs_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    replay = capture_cuda(torch.device("cuda", 0))(lambda: cuda.calls.append("step"))
    replay()
    assert cuda.calls == [
        "side waits for current",
        "on side {",
        "step",
        "step",
        "}",
        "current waits for side",
        "capture pool on side, thread_local {",
        "step",
        "}",
        "set current",
        "replay",
    ]


def test_a_capture_that_fails_leaves_the_threads_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)

    def step() -> None:
        if any(call.startswith("capture") for call in cuda.calls):
            raise RuntimeError("not permitted")

    with pytest.raises(RuntimeError, match="not permitted"):
        capture_cuda(torch.device("cuda", 0))(step)
    assert cuda.calls[-1] == "set current"


def test_compiled_operations_give_the_same_and_a_failing_compiler_costs_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # The tracing is torch.compile's own; only what generates code stays out, for which not every machine is set up.
    traced = compiled(torch.device("cpu"), torch.float, backend="aot_eager")
    assert traced is not PLAIN
    model = make_model()
    table = rope.RopeTable(model, 128, torch.float)
    decoder = LlamaDecoder(take_weights(model), table, torch.float)
    results = []
    for pointwise in (PLAIN, traced):
        cache = KVCache.within(settings(), decoder.layer_shapes, 128, spare=1)
        replay = DecodeReplay(decoder, cache, table, [Bucket(4, 16)], repeat, pointwise)
        replay.prepare()
        results.append(replay.run([prefill(Blocks(cache.num_blocks, 4).sequence([5]))]))
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-6)

    def broken(*_: object) -> None:
        raise RuntimeError("no compiler\nand much more")

    with caplog.at_level(logging.WARNING):
        assert compiled(torch.device("cpu"), torch.float, backend=broken) is PLAIN
    (line,) = (record.message for record in caplog.records if record.name.startswith("serve_app"))
    assert "no compiler" in line
    assert "\n" not in line


def test_row_buckets_pad_little_and_end_at_the_most() -> None:
    assert row_buckets(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert row_buckets(16) == [1, 2, 4, 8, 16]
    assert row_buckets(1) == [1]
    for most in range(1, 600):
        sizes = row_buckets(most)
        assert sizes[-1] == most
        assert sizes == sorted(set(sizes))
        assert len(sizes) < 20


@pytest.mark.parametrize("max_running", [1, 8, 64, 256])
@pytest.mark.parametrize("bytes_per_token", [512, 4096, 16384])
def test_graphs_are_bounded_in_number_and_memory(max_running: int, bytes_per_token: int) -> None:
    buckets = plan_buckets(max_running, 32768, bytes_per_token)
    assert 0 < len(buckets) <= MAX_GRAPHS
    assert all(b.rows * b.context * bytes_per_token <= GATHER_BYTES for b in buckets)
    assert Bucket(max(max_running, 16), 256) in buckets
    assert Bucket(1, 32768) in buckets
    assert max(b.context for b in plan_buckets(max_running, 100, bytes_per_token)) == 100
    assert choose_bucket(buckets, 1, 200) == Bucket(1, 256)


def test_the_cheapest_bucket_that_fits_is_chosen() -> None:
    assert choose_bucket(BUCKETS, 3, 16) == Bucket(4, 16)
    assert choose_bucket(BUCKETS, 1, 17) == Bucket(1, 64)
    assert choose_bucket(BUCKETS, 9, 1) is None
    assert choose_bucket(BUCKETS, 1, 65) is None
    # Where a smaller bucket is missing, a larger one does.
    assert choose_bucket([Bucket(8, 16), Bucket(4, 64)], 2, 10) == Bucket(8, 16)


def test_inputs_are_views_of_one_buffer() -> None:
    buffer = torch.zeros(100, dtype=torch.long)
    inputs = StaticInputs(buffer, Bucket(4, 16), 4, spare_block=9)
    inputs.reset()
    assert inputs.size == 4 * (4 + 4)
    assert buffer[: inputs.size].tolist() == [0] * 8 + [36] * 4 + [1] * 4 + [9] * 16
    assert buffer[inputs.size :].sum() == 0
    for view in (inputs.ids, inputs.rope_rows, inputs.slots, inputs.lengths, inputs.block_tables):
        assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
