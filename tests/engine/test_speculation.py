"""Guessed tokens change how many steps a reply takes and nothing else."""

from __future__ import annotations

import random

import pytest

from serve_app.contracts.generation import Delta, Finished, FinishReason
from serve_app.engine.output_stream import OutputStream
from tests.engine.fakes import EOS, FakeRunner, MemoryRunner, SteppedEngine, request

SONG = b"row, row, row your boat, gently down the stream. row, row, row your boat, gently down the stream. "


def script_guesser(script: bytes, right: int, wrong: int) -> type[OutputStream]:
    """Guesses `right` tokens of the script, then `wrong` others."""

    class Guesser(OutputStream):
        def guess(self, limit: int) -> tuple[int, ...]:
            said = self.sequence.num_output
            truth = [*script[said : said + right], EOS, EOS]
            return tuple([*truth[:right], *[1] * wrong][:limit])

    return Guesser


def test_a_reply_that_repeats_itself_takes_few_steps_and_is_the_same() -> None:
    texts, steps = [], []
    for rows in (0, 8):
        engine = SteppedEngine(FakeRunner(SONG * 3, num_blocks=99), speculation_rows=rows)
        inbox = engine.submit(request(max_tokens=280))
        engine.run()
        texts.append((inbox.text, inbox.last))
        steps.append(engine.steps)
    assert texts[0] == texts[1]
    assert texts[0][0] == (SONG * 3)[:280].decode()
    assert steps[1] < steps[0] / 2.5
    stats = engine.core.stats(0.0)
    assert stats.accepted == steps[0] - steps[1]
    assert stats.drafted >= stats.accepted


def test_a_step_gives_one_delta_with_all_its_text() -> None:
    runner = FakeRunner(b"abcdefgh" * 4)
    engine = SteppedEngine(runner, script_guesser(runner.script, 3, 0))
    inbox = engine.submit(request())
    engine.run()
    deltas = [event for event in inbox.events if isinstance(event, Delta)]
    assert [delta.text for delta in deltas[:3]] == ["a", "bcde", "fgha"]
    assert [delta.completion_tokens for delta in deltas[:3]] == [1, 5, 9]


@pytest.mark.parametrize(("right", "wrong"), [(0, 5), (1, 3), (3, 1), (4, 0), (8, 0)])
@pytest.mark.parametrize(
    ("sampling", "reason", "tokens", "text"),
    [
        ({}, FinishReason.STOP, 26, "abcdefghijklmnopqrstuvwxyz"),
        ({"max_tokens": 10}, FinishReason.LENGTH, 10, "abcdefghij"),
        ({"stop": ("gh",)}, FinishReason.STOP, 8, "abcdef"),
        ({"stop": ("gh",), "min_tokens": 12}, FinishReason.STOP, 26, "abcdefghijklmnopqrstuvwxyz"),
    ],
    ids=["end", "length", "stop string", "stop string too early"],
)
def test_a_reply_ends_where_it_ends_without_guesses(
    right: int, wrong: int, sampling: dict[str, object], reason: FinishReason, tokens: int, text: str
) -> None:
    script = bytes(range(97, 123))
    engine = SteppedEngine(FakeRunner(script), script_guesser(script, right, wrong))
    inbox = engine.submit(request(**sampling))
    engine.run()
    stop = "gh" if text == "abcdef" else None
    assert (inbox.last, inbox.text) == (Finished(reason, 3, 0, tokens, stop=stop), text)
    assert engine.core.scheduler.allocator.num_used == 0


def test_an_unfinished_context_bounds_the_guess() -> None:
    engine = SteppedEngine(FakeRunner(b"a" * 99, num_blocks=3), script_guesser(b"a" * 99, 8, 0))
    inbox = engine.submit(request(prompt=[1] * 4, max_tokens=99))
    engine.run()
    assert inbox.last == Finished(FinishReason.LENGTH, 4, 0, 8)


def test_no_sequence_is_preempted_for_a_guess() -> None:
    """The blocks are exactly enough for both sequences; guesses use what is free until the end."""
    script = b"x" * 64
    engine = SteppedEngine(FakeRunner(script, num_blocks=16), script_guesser(script, 0, 8), prefix_reuse=False)
    inboxes = [engine.submit(request(str(n), prompt=[1] * 4, max_tokens=28)) for n in range(2)]
    most = 0
    while engine.core.streams:
        plan = engine.step()
        most = max(most, *(len(chunk.draft) for chunk in plan.chunks))
        for sequence in engine.core.scheduler.running:
            assert len(sequence.block_table) <= -(-len(sequence.tokens) // 4)  # the blocks of the guess are free again
    assert most >= 3
    assert engine.core.stats(0.0).preemptions == 0
    assert {inbox.last.completion_tokens for inbox in inboxes} == {28}


def test_a_guess_is_shortened_to_the_blocks_that_are_free() -> None:
    engine = SteppedEngine(FakeRunner(b"y" * 40, num_blocks=5), script_guesser(b"z" * 40, 8, 0), prefix_reuse=False)
    engine.submit(request(prompt=[1] * 5, max_tokens=15))
    lengths = []
    while engine.core.streams:
        lengths += [len(chunk.draft) for chunk in engine.step().chunks]
    for before, length in enumerate(lengths[1:], start=6):
        assert length <= min(8, 20 - before)


def test_many_sequences_share_the_rows_for_guesses_and_a_batch_takes_none() -> None:
    script = b"x" * 200
    for count, rows in ((1, 8), (2, 7), (5, 4), (8, 1), (9, 0), (16, 0)):
        engine = SteppedEngine(
            FakeRunner(script, num_blocks=999), script_guesser(script, 8, 0), max_running=16, speculation_rows=8
        )
        for number in range(count):
            engine.submit(request(str(number)))
        engine.step()
        drafts = [len(chunk.draft) for chunk in engine.step().chunks]
        assert sum(drafts) == rows
        assert max(drafts) - min(drafts) <= 1


def test_without_rows_nothing_is_guessed() -> None:
    engine = SteppedEngine(FakeRunner(SONG), speculation_rows=0)
    engine.submit(request())
    engine.run()
    assert engine.core.stats(0.0).drafted == 0


def test_a_block_with_a_rejected_guess_is_not_found_by_others() -> None:
    """The memory model gives another token if its context has one that was never generated."""
    texts = set()
    for wrong in (0, 3, 8):
        runner = MemoryRunner(32, 4, (128,))
        engine = SteppedEngine(runner, script_guesser(b"", 0, wrong))
        first = engine.submit(request("a", prompt=[5] * 7, max_tokens=30, ignore_eos=True))
        engine.run()
        again = engine.submit(request("b", prompt=[5] * 7 + list(first.text.encode()), max_tokens=20, ignore_eos=True))
        engine.run()
        assert again.last.cached_tokens == 36
        texts.add((first.text, again.text))
    assert len(texts) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_guesses_change_no_token(temperature: float) -> None:
    chance = random.Random(7)
    for case in range(6):
        texts = []
        for guessing in (False, True):

            class Guesser(OutputStream):
                def guess(self, limit: int) -> tuple[int, ...]:
                    return tuple(chance.choice((97, 98, 99, 100, EOS)) for _ in range(chance.randint(0, limit)))

            engine = SteppedEngine(
                MemoryRunner(16, 4, (20, 64)), Guesser if guessing else OutputStream, speculation_rows=8 * guessing
            )
            inboxes = [
                engine.submit(
                    request(str(n), prompt=[n + case] * (3 + n), max_tokens=30, temperature=temperature, seed=n)
                )
                for n in range(3)
            ]
            engine.run()
            texts.append([(inbox.text, inbox.last.reason, inbox.last.completion_tokens) for inbox in inboxes])
        assert texts[0] == texts[1]
