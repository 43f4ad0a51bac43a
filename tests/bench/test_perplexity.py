"""Perplexity counts each token but the first once, however many are computed in a step."""

from __future__ import annotations

import math

import pytest
import torch

from bench.perplexity import TEXTS, perplexity, ratio, table
from serve_app.engine.scheduling.sequence import Chunk

VOCABULARY = 11


class Fake:
    """Gives the token after `t` the probability 1/2 when it is t + 1, and notes the positions of its calls."""

    num_blocks = 100

    def __init__(self) -> None:
        self.positions: list[int] = []

    def execute(self, chunks: list[Chunk]) -> torch.Tensor:
        [chunk] = chunks
        self.positions += range(chunk.start, chunk.start + chunk.length)
        assert chunk.num_logits == chunk.length
        logits = torch.full((chunk.length, VOCABULARY), math.log(0.5 / (VOCABULARY - 1)))
        for row, token in enumerate(chunk.token_ids):
            logits[row, (token + 1) % VOCABULARY] = math.log(0.5)
        return logits


@pytest.mark.parametrize("rows", [1, 2, 5, 19, 20, 64])
def test_each_token_is_predicted_once(rows: int) -> None:
    runner = Fake()
    tokens = [number % VOCABULARY for number in range(20)]
    assert perplexity(runner, 16, tokens, rows) == pytest.approx(2.0)
    assert sorted(set(runner.positions)) == list(range(19))
    assert len(runner.positions) == 19


def test_a_surprise_counts_by_its_probability() -> None:
    # Five of six tokens at 1/2, one at 1/20.
    tokens = [0, 1, 2, 3, 7, 8, 9]
    expected = math.exp(-(5 * math.log(0.5) + math.log(0.05)) / 6)
    assert perplexity(Fake(), 16, tokens, 3) == pytest.approx(expected)


def test_a_text_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="can't be measured"):
        perplexity(Fake(), 1, list(range(200)), 8)
    with pytest.raises(ValueError, match="can't be measured"):
        perplexity(Fake(), 1, [3], 8)


def test_the_table_shows_how_much_worse_int8_is() -> None:
    results = {
        "tokens": {"code": 1405},
        "runners": {"float32": "A", "int8": "B"},
        "perplexity": {"float32": {"code": 5.0}, "int8": {"code": 5.1}},
    }
    assert ratio(results, "int8", "code") == pytest.approx(1.02)
    assert ratio(results, "bfloat16", "code") is None
    assert "1.0200 times float32" in table(results)


def test_both_texts_are_there_and_long_enough() -> None:
    # Four letters make a token or so; the real counts are in the benchmark's own output.
    assert {path.stem for path in TEXTS.glob("*.txt")} == {"code", "prose"}
    assert all(len(path.read_text()) > 4 * 1024 for path in TEXTS.glob("*.txt"))
