"""`serve-app size`: the planner's memory, whole replicas, a cost, and a refusal that says what would fit."""

from __future__ import annotations

import contextlib
import json
from math import ceil
from pathlib import Path

import pytest

from serve_app.engine.errors import ModelError
from serve_app.engine.loading import placement, sizing
from serve_app.engine.loading.memory_plan import GIB
from serve_app.engine.loading.sizing import CARDS, MODELS, Wanted

from .conftest import Run

#: Billions of parameters, as their makers publish them.
PUBLISHED = {
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.544,
    "qwen2.5-3b": 3.086,
    "llama-3.2-1b": 1.236,
    "qwen2.5-7b": 7.616,
    "llama-3.1-8b": 8.030,
    "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76,
    "mixtral-8x7b": 46.70,
    "llama-3.3-70b": 70.55,
    "gpt-oss-120b": 116.8,
}
WANTED = Wanted(context=8192, users=64, tokens_s=1000.0)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_as_many_parameters_as_published(name: str) -> None:
    assert sum(sizing.tensor_sizes(MODELS[name]).values()) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.005)


@pytest.mark.parametrize("engine", ["vllm", "native"])
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_replica_fits_and_there_are_enough_of_them_or_it_is_refused(name: str, card: str, engine: str) -> None:
    weights = placement.weight_bytes(sizing.tensor_sizes(MODELS[name]), "bfloat16")
    if weights > 0.9 * 8 * CARDS[card].memory:  # more than eight of them hold
        with pytest.raises(ModelError, match="Too little memory"):
            sizing.size(name, WANTED, CARDS[card], engine=engine)
        return
    found = sizing.size(name, WANTED, CARDS[card], engine=engine)
    for part in found.plan.parts:
        usable = part.device.free if engine == "vllm" else part.device.usable
        assert part.weights + part.kv + part.step <= usable * 1.001
    assert len(found.plan.parts) == found.gpus
    assert 1 <= found.sequences <= 64
    assert found.sequences * 8192 * found.plan.demand.kv_token <= found.plan.kv
    assert found.replicas * found.sequences >= 64
    assert found.replicas * found.replica_tokens_s >= 1000.0
    assert found.replicas == max(ceil(64 / found.sequences), ceil(1000.0 / found.replica_tokens_s))
    for gpus in sizing.GPUS:  # and no other number of GPUs needs fewer in all
        with contextlib.suppress(ModelError):
            other = sizing.size(name, WANTED, CARDS[card], engine=engine, gpus=gpus)
            assert other.replicas * gpus >= found.replicas * found.gpus


def test_more_memory_users_and_speed_change_what_they_should() -> None:
    small, large = (sizing.size("llama-3.1-8b", WANTED, CARDS[card], gpus=1) for card in ("l40s", "h200"))
    assert small.sequences < large.sequences
    assert small.for_users > large.for_users
    twice = sizing.size("llama-3.1-8b", Wanted(8192, 128, 1000.0), CARDS["l40s"], gpus=1)
    assert twice.for_users == pytest.approx(2 * small.for_users, abs=1)
    measured = sizing.size("llama-3.1-8b", WANTED, CARDS["l40s"], gpus=1, replica_tokens_s=90.0)
    assert measured.for_tokens == 12  # 1000 / 90, rounded up


def test_experts_that_no_sequence_chooses_are_not_read() -> None:
    one = sizing.size("gpt-oss-120b", Wanted(8192, 1, 0.0), CARDS["b200"])
    dense = CARDS["b200"].bandwidth * sizing.SHARE_OF_BANDWIDTH["vllm"] / one.plan.demand.weights
    assert one.replica_tokens_s > 10 * dense


def test_what_is_printed_is_what_was_computed(run: Run) -> None:
    given = ("size", "llama-3.1-8b", "--gpu", "l40s", "--users", 64, "--tokens-per-second", 1000, "--price", "1.90")
    shown = run(*given, "--json").json
    found = sizing.size("llama-3.1-8b", WANTED, CARDS["l40s"])
    assert (shown["gpus_per_replica"], shown["sequences_per_replica"]) == (found.gpus, found.sequences)
    assert (shown["replicas"], shown["gpus"]) == (found.replicas, found.replicas * found.gpus)
    assert shown["cost_per_hour"] == round(1.90 * shown["gpus"], 2)
    text = run(*given).out
    assert f"{shown['cost_per_hour']:,.2f}" in text
    assert all(note in text for note in shown["assumptions"])
    assert any("estimate" in note for note in shown["assumptions"])


def test_what_does_not_fit_is_refused_with_the_smallest_change(run: Run) -> None:
    result = run("size", "llama-3.3-70b", "--gpu", "l40s", "--gpus", 2, "--users", 1)
    assert result.code == 1
    assert "use 4 such GPUs" in result.error_line
    fits = run("size", "llama-3.3-70b", "--gpu", "l40s", "--gpus", 4, "--users", 1, "--json")
    assert fits.json["gpus_per_replica"] == 4


def test_more_gpus_of_the_native_engine_add_memory_and_no_speed(run: Run) -> None:
    one, two = (
        sizing.size("llama-3.1-8b", Wanted(8192, 8, 0.0), CARDS["h100"], engine="native", gpus=gpus) for gpus in (1, 2)
    )
    assert two.replica_tokens_s == pytest.approx(one.replica_tokens_s, rel=0.01)
    shown = run("size", "llama-3.1-8b", "--gpu", "h100", "--engine", "native", "--gpus", 2, "--json").json
    assert any("adds memory but no speed" in note for note in shown["assumptions"])
    of_vllm = run("size", "llama-3.1-8b", "--gpu", "h100", "--gpus", 2, "--json").json
    assert of_vllm["tokens_per_second_per_replica"] > shown["tokens_per_second_per_replica"]
    assert not any("no speed" in note for note in of_vllm["assumptions"])


def test_a_config_file_and_another_card(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2.5-7b"]))
    options = ("--memory", "96GiB", "--bandwidth", 1800, "--users", 8, "--json")
    of_folder = run("size", tmp_path, *options).json
    assert of_folder["weights_bytes"] == run("size", "qwen2.5-7b", *options).json["weights_bytes"]
    assert of_folder["weights_bytes"] / GIB == pytest.approx(14.2, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing-here",), "nothing-here is not a file or folder, and not one of qwen2.5-0.5b"),
        (("llama-3.1-8b", "--gpu", "abacus"), "--gpu abacus: must be one of l4"),
        (("llama-3.1-8b", "--memory", "lots"), "--memory: 'lots' is not a size"),
        (("llama-3.1-8b", "--memory", "96GiB"), "add --bandwidth or --replica-tokens"),
        (("llama-3.1-8b", "--dtype", "int8"), "--dtype int8"),
        (("llama-3.1-8b", "--dtype", "float32"), "--dtype is for --engine native"),
        (("llama-3.1-8b", "--engine", "own"), "--engine own: must be one of vllm, native"),
        (("qwen2.5-7b", "--gpus", "3"), "can't be divided among 3 GPUs"),
        (("qwen2.5-7b", "--context", "65536"), "qwen2.5-7b has a maximum context of 32768 tokens"),
    ],
)
def test_a_wrong_option_is_one_line(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run("size", *arguments)
    assert result.code != 0
    assert message in result.error_line


def test_a_family_of_unknown_form_asks_for_its_weights(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert "use a folder that also contains the weights" in run("size", tmp_path).error_line
