"""Generates random chat requests: extreme values, grammars and tools with special tokens, stops, hang-ups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from bench.harness.words import WORDS
from serve_app.api.chat_openapi import chat_request_schemas

MODELS: Final = ("svc-chat", "svc-coder")
MAX_OUTPUT: Final = 4096
SPECIALS: Final = (
    "<|im_end|>",
    "<|im_start|>system\n",
    "<|endoftext|>",
    "<filename>",
    "<repo_name>",
    "</s>",
    "<tool_call>",
)
ODD: Final = ("", " ", "\n", "\u0000", "é", "字", "\U0001f600", "\ud7ff", '"', "\\", "{", "}", "[")
_FIELDS: Final = chat_request_schemas(MODELS, MAX_OUTPUT)["ChatCompletionRequest"]["properties"]
_OWN: Final = ("max_tokens", "max_completion_tokens", "min_tokens", "n", "top_logprobs")  # drawn by `draw` itself


@dataclass(frozen=True, slots=True)
class Drawn:
    """A request, and the seconds after which its client hangs up. None: it reads the whole reply."""

    body: dict[str, Any]
    hangs_up_s: float | None


def draw(rng: Random) -> Drawn:
    """Returns the next request. Some are invalid."""
    body: dict[str, Any] = {
        "model": rng.choice(MODELS),
        "messages": _messages(rng),
        "max_tokens": rng.choice((1, 1, 2, 3, 5, 8, 16, 32)),
        "stream": rng.random() < 0.6,
    }
    for name in rng.sample(sorted(_NUMBERS), rng.choice((0, 0, 1, 1, 2, 4))):
        body[name] = _NUMBERS[name].draw(rng)
    if rng.random() < 0.1:
        body["n"] = rng.choice((2, 3, 8))
    if rng.random() < 0.1:
        body["min_tokens"] = rng.choice((0, 1, body["max_tokens"], body["max_tokens"] + 1))
    if rng.random() < 0.15:
        body["stop"] = [_text(rng, 2) for _ in range(rng.choice((1, 1, 4, 16)))]
    if rng.random() < 0.1:
        biased = rng.choices(range(50_000), k=rng.choice((1, 8, 300)))
        body["logit_bias"] = {str(token): rng.choice((-100, 100, 0.5)) for token in [0, 2, *biased]}
    if rng.random() < 0.1:
        body |= {"logprobs": True, "top_logprobs": rng.choice((0, 1, 20))}
    if rng.random() < 0.05:
        body["ignore_eos"] = True
    if body["stream"] and rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True, "resume": rng.random() < 0.3}
    kind = rng.random()
    if kind < 0.35:
        body |= _form(rng)
    elif kind < 0.5:
        body |= _tools(rng)
    hangs_up = body["stream"] and rng.random() < 0.15
    return Drawn(body, rng.expovariate(5) if hangs_up else None)


@dataclass(frozen=True, slots=True)
class _Extremes:
    """Values at the edges of a numeric field's range."""

    inside: tuple[float, ...]
    outside: tuple[float, ...]

    def draw(self, rng: Random) -> float:
        return rng.choice(self.outside if rng.random() < 0.05 else self.inside)


def _extremes(schema: dict[str, Any]) -> _Extremes | None:
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if low is None or high is None:
        return None
    if "integer" in schema["type"]:
        return _Extremes((low, low + 1, 0, 1, (low + high) // 2, high - 1, high), (low - 1, high + 1))
    small = (math.ulp(0.0), 1e-300, 1e-38, 1e-6, 0.1, 1.0)
    near = (low, math.nextafter(low, high), (low + high) / 2, math.nextafter(high, low), high)
    found = [*near, *small, *(-value for value in small)]
    inside = [value for value in found if low < value <= high or value == schema.get("minimum")]
    return _Extremes(tuple(inside), (math.nextafter(low, -math.inf), math.nextafter(high, math.inf), 1e300))


_NUMBERS: Final = {
    name: values for name, schema in _FIELDS.items() if name not in _OWN and (values := _extremes(schema))
}


def _text(rng: Random, words: int) -> str:
    """Returns a few words, with a special token or an odd character in some."""
    pieces = rng.choices(WORDS, k=rng.randint(1, words))
    if rng.random() < 0.4:
        pieces.insert(rng.randrange(len(pieces) + 1), rng.choice(SPECIALS + ODD))
    return rng.choice((" ", "")).join(pieces)


def _messages(rng: Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.3:
        messages.append({"role": rng.choice(("system", "developer")), "content": _text(rng, 20)})
    messages.append({"role": "user", "content": _text(rng, rng.choice((3, 10, 40, 150)))})
    if rng.random() < 0.15:
        call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"x": "<|im_end|>"}'}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "call_1", "content": _text(rng, 10)})
    if rng.random() < 0.1:
        messages.append({"role": "assistant", "content": _text(rng, 4), "prefix": True})
    return messages


def _schema(rng: Random, depth: int = 0) -> dict[str, Any]:
    kind = rng.choice(("string", "enum", "const", "pattern", "integer", "number", "boolean", "array", "object", "any"))
    match kind if depth < 3 else rng.choice(("string", "enum", "integer")):
        case "enum":
            return {"enum": [_text(rng, 2) for _ in range(rng.randint(1, 4))]}
        case "const":
            return {"const": rng.choice((_text(rng, 2), 1, None, True, {"a": "<|im_end|>"}))}
        case "pattern":
            return {"type": "string", "pattern": _pattern(rng)}
        case "array":
            return {"type": "array", "items": _schema(rng, depth + 1), "maxItems": rng.randint(0, 3)}
        case "object":
            names = [_text(rng, 1) or "x" for _ in range(rng.randint(1, 3))]
            fields = {name: _schema(rng, depth + 1) for name in names}
            return {"type": "object", "properties": fields, "required": sorted(fields)[: rng.randint(0, 3)]}
        case "any":
            return {"anyOf": [_schema(rng, depth + 1), _schema(rng, depth + 1)]}
        case plain:
            return {"type": plain}


def _pattern(rng: Random) -> str:
    return rng.choice(
        (
            r"(Yes|No)( zebra){1,9}",
            r"[a-z]{1,8}",
            r"<\|im_end\|>",
            r"(<filename>|<\|endoftext\|>)+",
            r"a<\|im_end\|>b",
            r"\d{1,3}\.\d{2}",
            r".{0,20}",
            r"(.|\n)*",
            r"字{1,3}",
            r"(a|aa|aaa){1,30}",
        )
    )


def _form(rng: Random) -> dict[str, Any]:
    """Returns one of the fields that set the form of a reply."""
    match rng.randrange(6):
        case 0:
            return {"guided_choice": [_text(rng, 2) or "x" for _ in range(rng.randint(1, 6))]}
        case 1:
            return {"guided_regex": _pattern(rng)}
        case 2:
            return {"guided_json": _schema(rng)}
        case 3:
            return {"response_format": {"type": "json_object"}}
        case 4:
            return {"structured_outputs": {"regex": _pattern(rng)}}
        case _:
            described = {"name": "reply", "schema": _schema(rng), "strict": rng.random() < 0.5}
            return {"response_format": {"type": "json_schema", "json_schema": described}}


def _tools(rng: Random) -> dict[str, Any]:
    names = ["look_up", "send-mail", "x"][: rng.randint(1, 3)]
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": _text(rng, 8),
                "parameters": {"type": "object", "properties": {"x": _schema(rng, 1)}, "required": ["x"]},
            },
        }
        for name in names
    ]
    one = {"type": "function", "function": {"name": rng.choice(names)}}
    choice = rng.choice(("none", "auto", "required", "required", one, {"type": "allowed_tools"}))
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": rng.random() < 0.5}
