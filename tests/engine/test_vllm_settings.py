"""Tests of settings that are rejected before vLLM starts, and of a request's sampling as vLLM takes it.

None of them needs vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve_app.contracts.generation import Grammar, GrammarKind, SamplingParams
from serve_app.engine.engines import ENGINES
from serve_app.engine.errors import RequestRefused, UnsupportedGrammar
from serve_app.engine.vllm_adapter.request_params import keywords, refusal
from serve_app.settings import ModelArgs, SettingsError, parse

EOS = frozenset({2, 7})


def of(max_output: int = 50, lark: str | None = None, **params: Any) -> dict[str, Any]:
    return keywords(SamplingParams(**{"max_tokens": 100, **params}), max_output, EOS, lark)


def args(**given: Any) -> ModelArgs:
    return parse(ModelArgs, {"model": "m", "engine": "vllm", **given}, "args")


def test_fields_of_our_own_and_arguments_of_vllm_are_told_apart() -> None:
    vllm = args(vllm={"tensor_parallel_size": 2, "pipeline_parallel_size": 4, "swap_space": 0}).vllm
    assert (vllm.gpus, vllm.further) == (8, {"swap_space": 0})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vllm": {"max_num_seqs": 9}}, "write the setting max_running instead"),
        ({"vllm": {"tokenizer": "x"}}, "vllm.tokenizer: the service sets it itself"),
        ({"vllm": {"scheduling_policy": "fcfs"}}, "vllm.scheduling_policy: the service sets it itself"),
        ({"vllm": {"tensor_parallel_size": 0}}, "args.vllm.tensor_parallel_size"),
        ({"vllm": {"adapters": {"a": "x"}}}, "write the setting adapters in the user_config of Model instead"),
        ({"vllm": {"max_cpu_loras": 4}}, "also set max_loras"),
        ({"vllm": {"max_loras": 4, "max_cpu_loras": 2}}, "set it to 4 or more"),
        ({"dtype": "int8"}, "set vllm.quantization"),
        ({"speculation_rows": 4}, "speculation_rows is a setting of the native engine"),
        ({"engine": "native", "vllm": {"swap_space": 0}}, "write engine: vllm"),
        ({"engine": "other"}, "args.engine"),
    ],
)
def test_what_can_not_be_right_is_refused_with_the_remedy(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        args(**given)


def test_as_many_adapters_are_loaded_as_fit_into_memory_and_none_without_a_place_on_the_gpu() -> None:
    assert args().max_adapters == 0
    assert args(vllm={"max_loras": 2}).max_adapters == 2
    assert args(vllm={"max_loras": 2, "max_cpu_loras": 9}).max_adapters == 9
    assert parse(ModelArgs, {"model": "m"}, "args").max_adapters == 0


def test_replicas_run_on_vllms_interpreter_and_others_on_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERVE_APP_VLLM_PYTHON", raising=False)
    assert args().python() == str(Path(".vllm/bin/python").absolute())
    monkeypatch.setenv("SERVE_APP_VLLM_PYTHON", "/opt/vllm/bin/python")
    assert args().python() == "/opt/vllm/bin/python"
    assert args(interpreter="/own/python").python() == "/own/python"
    assert parse(ModelArgs, {"model": "m"}, "args").python() is None


def test_an_end_of_sequence_token_ends_a_reply_unless_it_is_ignored() -> None:
    assert (of()["stop_token_ids"], of()["ignore_eos"]) == ([2, 7], False)
    ignored = of(ignore_eos=True, logit_bias=((2, 5.0), (9, 1.0)))
    assert (ignored["stop_token_ids"], ignored["ignore_eos"]) == ([], True)
    assert ignored["logit_bias"] == {2: -1e7, 7: -1e7, 9: 1.0}


def test_no_more_biases_reach_vllm_than_its_process_survives() -> None:
    most = tuple((token, 1.0) for token in range(2, 1026))
    assert len(of(logit_bias=most, ignore_eos=True)["logit_bias"]) == 1024  # the end tokens are among them
    more = tuple((token, 1.0) for token in range(10, 1034))
    assert len(of(logit_bias=more)["logit_bias"]) == 1024
    with pytest.raises(ValueError, match=r"^logit_bias has more than 1024"):
        of(logit_bias=more, ignore_eos=True)


@pytest.mark.parametrize(
    ("given", "param"),
    [({"min_p": 0.1}, "min_p"), ({"logit_bias": ((3, 1.0),)}, "logit_bias"), ({"ignore_eos": True}, "logit_bias")],
    ids=str,
)
def test_what_vllm_can_not_combine_with_a_draft_model_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    with pytest.raises(ValueError, match=f"^{param} .*speculative decoding"):
        keywords(SamplingParams(max_tokens=9, **given), 9, EOS, None, speculates=True)
    assert keywords(SamplingParams(max_tokens=9), 9, EOS, None, speculates=True)["logit_bias"] is None


def test_a_bias_of_minus_a_hundred_bans_a_token_also_with_the_least_repetition_penalty() -> None:
    bias = of(logit_bias=((3, -100.0), (4, -99.0)), repetition_penalty=0.01)["logit_bias"]
    assert bias[4] == -99.0
    assert (30.0 + bias[3]) * 0.01 < -30.0 - 2.0 * 32_768  # the latter: a token said at every place, with penalties


@pytest.mark.parametrize(
    ("given", "field", "sent"),
    [
        ({"temperature": 5e-324}, "temperature", 0.01),
        ({"temperature": -0.0}, "temperature", 0.0),
        ({"temperature": 2.0}, "temperature", 2.0),
        ({"top_p": 5e-324}, "top_p", 1e-6),
        ({"top_p": 1.0}, "top_p", 1.0),
    ],
    ids=str,
)
def test_a_number_that_vllms_float32_can_not_hold_becomes_the_nearest_that_it_can(
    given: dict[str, float], field: str, sent: float
) -> None:
    assert of(**given)[field] == sent


def test_a_complete_grammar_can_end_a_reply_whatever_else_is_asked_for() -> None:
    held = of(lark="start: /a/", min_tokens=30, ignore_eos=True)
    assert (held["min_tokens"], held["ignore_eos"], held["stop_token_ids"]) == (0, False, [2, 7])


def test_the_least_number_of_tokens_is_never_above_the_most() -> None:
    assert of(max_output=8, min_tokens=30)["min_tokens"] == 8


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 0])
def test_each_seed_is_one_that_vllm_takes(seed: int) -> None:
    assert 0 <= of(seed=seed)["seed"] < 2**63
    assert of()["seed"] is None


@pytest.mark.parametrize(
    ("message", "parameter", "given", "param"),
    [
        ("The min_p and logit_bias parameters are not yet supported.", None, {"min_p": 0.1}, "min_p"),
        ("The min_p and logit_bias parameters are not yet supported.", None, {"logit_bias": ((3, 1.0),)}, "logit_bias"),
        ("Requested logprobs of 9, which is greater than max allowed: 5", "logprobs", {"logprobs": 9}, "logprobs"),
        ("sampling distribution replay requires temperature > 0", None, {"temperature": 0.0}, "temperature"),
        ("token_ids hold something", "stop_token_ids", {"min_p": 0.1}, ""),
        ("The model is tired", None, {}, ""),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_what_vllm_refuses_names_the_field_that_the_request_has_set(
    message: str, parameter: str | None, given: dict[str, Any], param: str
) -> None:
    error = refusal(message, parameter, SamplingParams(max_tokens=9, **given))
    assert isinstance(error, RequestRefused)
    assert error.param == param
    assert message in str(error)
    assert str(error).startswith(param)


@pytest.mark.parametrize(
    ("message", "parameter"),
    [
        ("Structured outputs are not yet supported for diffusion language models.", None),
        ("Grammar error: too many states", None),
        ("out of range", "structured_outputs"),
    ],
)
def test_what_vllm_refuses_about_a_grammar_is_an_error_of_the_grammar(message: str, parameter: str | None) -> None:
    grammar = Grammar(GrammarKind.JSON_OBJECT)
    assert isinstance(refusal(message, parameter, SamplingParams(9, grammar=grammar)), UnsupportedGrammar)
    assert not isinstance(refusal(message, parameter, SamplingParams(9)), UnsupportedGrammar)


def test_the_number_of_running_requests_is_vllms_unless_it_is_set() -> None:
    assert ENGINES["vllm"].max_running(args()) == 1024
    assert ENGINES["vllm"].max_running(args(max_running=32)) == 36  # four are for accounts that have none running
    assert ENGINES["vllm"].max_running(args(max_running=1)) == 2
    assert ENGINES["native"].max_running(parse(ModelArgs, {"model": "m"}, "args")) == 32
