"""Every sampling field reaches every engine: a new one that an engine ignores fails here."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.contracts.generation import Grammar, GrammarKind, SamplingParams
from serve_app.engine.vllm_adapter.request_params import keywords

ENGINE = Path(__file__).parents[2] / "serve_app" / "engine"
PLAIN = SamplingParams(max_tokens=10)
OTHER: dict[str, Any] = {
    "max_tokens": 20,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "stop": ("end",),
    "stop_token_ids": (5,),
    "include_stop_str_in_output": True,
    "shown": ("<tool_call>",),
    "mark": "</think>",
    "seed": 7,
    "min_tokens": 5,
    "ignore_eos": True,
    "logit_bias": ((3, 1.0),),
    "logprobs": 2,
    "grammar": Grammar(GrammarKind.REGEX, "a"),
    "token_ids": True,
    "prompt_logprobs": 1,
    "end_logprob": True,
}
# Handled by code that both engines share: text, its stop strings and marks, and grammars.
SHARED = {"stop", "include_stop_str_in_output", "shown", "mark", "grammar", "token_ids", "end_logprob"}


def sent_to_vllm(params: SamplingParams) -> dict[str, Any]:
    return keywords(params, params.max_tokens, frozenset({2}), None)


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_each_sampling_field_reaches_vllm(name: str) -> None:
    changed = replace(PLAIN, **{name: OTHER[name]})
    assert name in SHARED or sent_to_vllm(changed) != sent_to_vllm(PLAIN)


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_each_sampling_field_is_read_by_the_native_engine(name: str) -> None:
    paths = [path for path in ENGINE.rglob("*.py") if "vllm_adapter" not in path.parts]
    read = {
        node.attr for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
    }
    assert name in read
