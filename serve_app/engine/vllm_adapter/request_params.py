"""Converts a request's sampling parameters to vLLM's, and vLLM's refusals to the service's errors."""

from __future__ import annotations

import re
from typing import Any

from serve_app.contracts.generation import SamplingParams
from serve_app.engine.errors import RequestRefused, UnsupportedGrammar

_BAN = -1e7  # bias of a banned token; still enough if the repetition penalty multiplies it by 0.01
_MIN_BIAS = -100.0  # this bias is a ban
_MAX_BIASES = 1024  # a request with more biases crashes vLLM's process on a GPU
_MIN_TEMPERATURE = 0.01  # vLLM raises lower temperatures to this, and logs a warning for each request
_MIN_TOP_P = 1e-6  # keeps only the most likely token; smaller values would become 0 in vLLM's float32
_SEEDS = 2**63 - 1  # mask that keeps seeds from being negative: -1 would mean "no seed" to vLLM
_GRAMMAR_WORDS = re.compile(r"structured|grammar|guidance|schema|regex", re.IGNORECASE)


def keywords(
    params: SamplingParams,
    max_output: int,
    eos: frozenset[int],
    lark: str | None,
    said: int = 0,
    *,
    speculates: bool = False,
) -> dict[str, Any]:
    """Keyword arguments for vLLM's SamplingParams, except for the grammar and the kind of output.

    For vLLM, the first `said` tokens of the output are part of the prompt. With `speculates`, vLLM has a draft model.

    Stop strings are not included, because the service finds them in its own text. vLLM ends a reply at a stop token or
    a token of `eos`, which is then the last token of its output.

    Raises ValueError for more biases than vLLM takes, and for parameters that it can't combine with a draft model.
    """
    ignored = params.ignore_eos and lark is None
    bias = dict(params.logit_bias)
    if params.ignore_eos:
        bias |= dict.fromkeys(eos, _MIN_BIAS)
    if speculates and params.min_p:
        raise ValueError("min_p is not possible with this model, because it uses speculative decoding")
    if speculates and bias:
        raise ValueError("logit_bias and ignore_eos are not possible with this model: it uses speculative decoding")
    if len(bias) > _MAX_BIASES:
        raise ValueError(f"logit_bias has more than {_MAX_BIASES} token ids, including end tokens that ignore_eos bans")
    return {
        "max_tokens": max(1, max_output - said),  # vLLM generates at least one, which the caller drops
        # A reply must be able to end as soon as its grammar is complete.
        "min_tokens": 0 if lark is not None else max(0, min(params.min_tokens, max_output) - said),
        "ignore_eos": ignored,
        "stop_token_ids": sorted({*params.stop_token_ids, *(() if ignored else eos)}),
        "temperature": max(_MIN_TEMPERATURE, params.temperature) if params.temperature else 0.0,
        "top_p": max(_MIN_TOP_P, params.top_p),
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "seed": None if params.seed is None else params.seed & _SEEDS,
        "logit_bias": {token: value if value > _MIN_BIAS else _BAN for token, value in bias.items()} or None,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "detokenize": False,
    }


def grammar_text(lark: str) -> str:
    """The Lark text for vLLM. An option in it permits any tokens that spell a text that the grammar forces.

    By default, vLLM allows only the tokens to which the model's tokenizer encodes the text. If the text contains a
    special token's name, those tokens do not spell it, and the reply fails.
    """
    return f'%llguidance {{"no_forcing": true}}\n{lark}'


def refusal(message: str, parameter: str | None, params: SamplingParams) -> ValueError:
    """The error for a request that vLLM refuses with this message; `parameter` is vLLM's name of the field at fault."""
    if params.grammar is not None and _GRAMMAR_WORDS.search(f"{parameter} {message}"):
        return UnsupportedGrammar(f"this model's engine refuses it: {message}")
    plain = SamplingParams(max_tokens=params.max_tokens)
    for name in [parameter] if parameter else re.findall(r"\w+", message):
        if getattr(params, name, None) != getattr(plain, name, None):  # the request has set the field
            return RequestRefused(f"{name}: this model's engine refuses it: {message}", name)
    return RequestRefused(f"this model's engine refuses the request: {message}")
