"""A step that lacks memory is divided; an engine whose device is lost ends, so that its replica is replaced."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from deployments.model import Model
from serve_app.contracts.generation import Finished, FinishReason
from serve_app.engine.device_faults import is_device_lost, is_out_of_memory
from serve_app.engine.engine import MAX_FAILURES, Engine
from serve_app.engine.errors import EngineClosed, EngineFailed
from serve_app.engine.scheduling.sequence import Chunk

from .fakes import FakeRunner, Inbox, fake_engine, request, submit

ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"


class SmallRunner(FakeRunner):
    """Runs out of memory in any step of more than `most` tokens, and in each step of a prompt that begins with 9."""

    most = 1000

    def execute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        if sum(chunk.length for chunk in chunks) > self.most or any(c.sequence.tokens[0] == 9 for c in chunks):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().execute(chunks)


def answers(engine: Engine, prompts: dict[str, list[int]]) -> dict[str, tuple[Finished, str]]:
    inboxes = {name: Inbox() for name in prompts}
    for name, prompt in prompts.items():
        submit(engine, request(name, prompt=prompt), inboxes[name])
    return {name: (inbox.wait(), inbox.text) for name, inbox in inboxes.items()}


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_a_step_that_lacks_memory_is_computed_in_parts(most: int) -> None:
    runner = SmallRunner()
    runner.most = most
    engine = fake_engine(runner, max_running=4, max_waiting=8, speculation_rows=0)
    prompts = {str(number): [number + 1] * (3 + number) for number in range(6)}
    for name, (finished, text) in answers(engine, prompts).items():
        assert (finished.reason, finished.prompt_tokens, text) == (FinishReason.STOP, 3 + int(name), "hello world")
    assert engine.stats().kv_blocks_used == 0
    engine.check_health()
    engine.close()


def test_only_the_sequence_that_no_memory_suffices_for_ends_with_an_error() -> None:
    engine = fake_engine(SmallRunner(), max_running=8)
    prompts = {"a": [1, 2, 3], "b": [4, 5], "large": [9, 9, 9, 9], "c": [6]}
    reasons = {name: finished.reason for name, (finished, _) in answers(engine, prompts).items()}
    assert reasons == {**dict.fromkeys(prompts, FinishReason.STOP), "large": FinishReason.ERROR}
    engine.check_health()
    assert engine.stats().kv_blocks_used == 0
    engine.close()


def test_a_lost_device_ends_every_request_and_the_engine() -> None:
    runner = FakeRunner()
    runner.failures[2] = RuntimeError(ASSERT)
    runner.gate = threading.Semaphore(0)
    engine, inboxes = fake_engine(runner, max_running=1, max_waiting=4), [Inbox() for _ in range(3)]
    for number, inbox in enumerate(inboxes):
        submit(engine, request(str(number)), inbox)
    runner.gate.release(2)
    assert {inbox.wait().reason for inbox in inboxes} == {FinishReason.ABORT}
    engine._thread.join(60)
    with pytest.raises(EngineFailed, match=r"^the device is lost: CUDA error: device-side assert triggered$"):
        engine.check_health()
    with pytest.raises(EngineClosed):
        submit(engine, request("late"), Inbox())
    engine.close()


def test_failures_of_any_kind_in_a_row_end_the_engine_and_a_success_between_them_does_not() -> None:
    runner = FakeRunner()
    engine = fake_engine(runner)
    execute = runner.execute

    def fails(chunks: Sequence[Chunk]) -> torch.Tensor:
        raise ValueError("no such kernel")

    def run(failing: bool) -> FinishReason:
        runner.execute = fails if failing else execute  # type: ignore[method-assign]
        ((finished, _),) = answers(engine, {"r": [1, 2]}).values()
        return finished.reason

    for _ in range(3):
        for _ in range(MAX_FAILURES - 1):
            assert run(failing=True) is FinishReason.ERROR
        assert run(failing=False) is FinishReason.STOP
    engine.check_health()
    for _ in range(MAX_FAILURES):
        assert run(failing=True) is FinishReason.ERROR
    engine._thread.join(60)
    with pytest.raises(EngineFailed, match=f"^{MAX_FAILURES} computations in a row have failed$"):
        engine.check_health()
    engine.close()


def test_the_health_check_of_the_replica_fails_with_the_reason() -> None:
    runner = FakeRunner()
    runner.failures[1] = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    engine = fake_engine(runner)
    replica = SimpleNamespace(_engine=engine)
    Model.func_or_class.check_health(replica)
    answers(engine, {"r": [1]})
    engine._thread.join(60)
    with pytest.raises(EngineFailed, match="the device is lost: CUDA error: an illegal memory access"):
        Model.func_or_class.check_health(replica)


def test_errors_are_told_apart() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_device_lost(torch.AcceleratorError("CUDA error: out of memory"))
    assert is_device_lost(RuntimeError(ASSERT))
    assert not is_device_lost(ValueError("CUDA error in a name"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
