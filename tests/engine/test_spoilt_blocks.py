"""KV blocks that may hold NaN are cleared before another request gets them."""

from __future__ import annotations

from serve_app.contracts.generation import FinishReason
from tests.engine.fakes import POISON, MemoryRunner, SteppedEngine, request


def test_blocks_of_a_request_with_nan_are_cleared_before_another_gets_them() -> None:
    runner = MemoryRunner(6, 4, (24,))
    engine = SteppedEngine(runner)
    spoilt = engine.submit(request("spoilt", [1] * 11 + [POISON], max_tokens=8))
    engine.run()
    assert spoilt.last.reason is FinishReason.ERROR
    assert any(value != value for value in runner.slots)
    others = [engine.submit(request(str(n), [n] * 7, max_tokens=5, ignore_eos=True)) for n in range(2)]
    engine.run()
    assert [other.last.reason for other in others] == [FinishReason.LENGTH] * 2


def test_a_request_with_nan_loses_the_cached_prompts_of_its_own_account_and_no_others() -> None:
    engine = SteppedEngine(MemoryRunner(32, 4, (64,)))

    def cached(tenant: str, *rest: int) -> int:
        """The cached tokens of another request with this tenant's prompt."""
        inbox = engine.submit(request(tenant, [ord(tenant)] * 8 + list(rest), tenant=tenant, max_tokens=2))
        engine.run()
        return inbox.last.cached_tokens

    assert [cached(tenant, 1) for tenant in "aabb"] == [0, 8, 0, 8]
    cached("a", POISON)
    assert [cached(tenant, 1) for tenant in "ab"] == [0, 8]


def test_blocks_of_a_prompt_that_was_cancelled_half_read_are_cleared_too() -> None:
    """No logits have shown the NaN yet."""
    runner = MemoryRunner(6, 4, (24,))
    engine = SteppedEngine(runner, prefill_chunk=6)
    engine.submit(request("spoilt", [1, 2, 3, POISON] + [1] * 12))
    engine.step()
    engine.abort("spoilt")
    other = engine.submit(request("other", [5] * 14, max_tokens=8, ignore_eos=True))
    engine.run()
    assert other.last.reason is FinishReason.LENGTH
