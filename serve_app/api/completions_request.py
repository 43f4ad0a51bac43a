"""Declares the fields of a completion request that the chat format does not have, and checks a body.

The other fields are those of `ChatRequest`, with the same types, ranges and defaults: `SHARED` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

from serve_app.api import errors
from serve_app.api.chat_request import RawRequest, ServedModels, check_chat_request
from serve_app.api.codec import MAX_ITEMS, Shape, describe_value, keywords, parse_object, typed, wrong_item
from serve_app.api.refused_fields import REFUSED
from serve_app.api.served_names import identifier_of
from serve_app.api.tools_and_formats import invalid
from serve_app.contracts.generation import RawPrompts

MAX_CHOICES: Final = 64  # maximum for all prompts of a request together
MAX_LOGPROBS: Final = 5
MAX_SCORED: Final = 262_144  # prompt tokens with log-probabilities in one reply, summed over all choices
DEFAULT_MAX_TOKENS: Final = 16
_MAX_ID: Final = 2**31 - 1

SHARED: Final = (
    *("n", "stream", "stream_options", "temperature", "top_p", "stop", "seed", "frequency_penalty"),
    *("presence_penalty", "logit_bias", "response_format", "guided_json", "guided_regex", "guided_choice"),
    *("structured_outputs", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"),
    *("stop_token_ids", "include_stop_str_in_output"),
)
"""Fields that a completion request has in common with a chat request."""

Prompts = tuple[str | tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Unsupported:
    """A field of other servers that would change the reply. It is refused, unless its value is in `harmless`."""

    advice: str
    harmless: tuple[Any, ...] = (None, False, "", [], {})


UNSUPPORTED: Final[Mapping[str, _Unsupported]] = {
    "messages": _Unsupported("is not a field here. Send conversations to /chat/completions"),
    "prompt_embeds": _Unsupported("is not supported. Send prompt"),
    "prompt_logprobs": _Unsupported("is not a field here. Send echo: true and logprobs"),
    "truncate_prompt_tokens": _Unsupported("is not supported. Send a shorter prompt", (None,)),
}
"""Fields refused with a message for this format. The other fields in `REFUSED` are refused as in the chat format."""


def _as_prompts(value: Any) -> Prompts:
    """Converts the four forms of `prompt` to a tuple. Each of its items is a text, or a tuple of token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        wrong_item("prompts", [], value)
    if value and isinstance(value[0], int | float) and not isinstance(value[0], bool):
        return (_as_ids(value),)
    for index, prompt in enumerate(value):
        if isinstance(prompt, list):
            _as_ids(prompt, index)
        elif not isinstance(prompt, str):
            wrong_item("string_or_ids", [index], prompt)
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in value)


def _as_ids(ids: list[Any], *steps: int) -> tuple[int, ...]:
    for at, token in enumerate(ids):
        if type(token) is not int:
            wrong_item("int_type", [*steps, at], token)
    return tuple(ids)


_IDS: Final = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": _MAX_ID}}
_PROMPT_FORMS: Final = (
    {"type": "string"},
    _IDS,
    {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": {"anyOf": [{"type": "string"}, _IDS]}},
)


class CompletionFields(Shape):
    """The body of POST /completions.

    The string below a field is its description in the OpenAPI document. If the gateway reads a field in a form other
    than the JSON form, the field is named `sent_…` and its wire name is the alias.
    """

    model: str
    """A model identifier from `/models`."""
    sent_prompt: Annotated[Any, BeforeValidator(_as_prompts), keywords(anyOf=list(_PROMPT_FORMS))] = Field(
        alias="prompt"
    )
    """Text to continue, without a chat template: a string, token ids, or an array of one of these for several
    prompts. The name of a special token in a text, such as `<|im_end|>`, is encoded as that token."""
    suffix: str | None = None
    """Text that follows the reply. Returns 422 if the model has no tokens for filling in the middle. Names of special
    tokens in prompt and suffix are then plain text. Not possible with token ids as prompts or with `echo`."""
    max_tokens: Annotated[int, keywords(minimum=0)] = DEFAULT_MAX_TOKENS
    """Maximum number of tokens per choice. Values above the model's limit count as the limit. 0 generates nothing and
    is only possible with `echo`."""
    echo: bool = False
    """Begin the text with the prompt, and the log probabilities with those of the prompt."""
    logprobs: Annotated[int | None, keywords(minimum=0, maximum=MAX_LOGPROBS)] = None
    """Return the log probabilities of the tokens, and of this number of most likely tokens at each position."""
    best_of: Annotated[int | None, keywords(minimum=1, maximum=8)] = None
    """Must be equal to `n`."""
    return_token_ids: bool = False
    """Extension: return the token ids of the prompt and of the reply."""
    add_special_tokens: bool = True
    """Extension: add the tokens that the model's tokenizer adds to a text, such as a token for its beginning. Nothing
    is added to token ids."""

    @property
    def prompts(self) -> Prompts:
        prompts: Prompts = self.sent_prompt
        return prompts

    def chat_fields(self, most_output: int) -> dict[str, Any]:
        """Converts these fields to fields of `RawRequest`. Values out of range are clamped; `check` rejects them."""
        raw = RawPrompts(
            self.prompts,
            self.suffix or None,
            self.add_special_tokens,
            echo=self.echo or self.return_token_ids,
            scored=self.echo and self.logprobs is not None,
        )
        fields: dict[str, Any] = {
            "model": self.model,
            "raw_prompts": raw,
            "max_tokens": max(1, min(self.max_tokens, most_output)),
            "generates": self.max_tokens != 0,
            "is_echoed": self.echo,
            "with_ids": self.return_token_ids,
        }
        if self.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": max(0, min(self.logprobs, MAX_LOGPROBS))}
        return fields

    def check(self, n: int) -> None:
        """Checks values. Raises ApiError (422) for the first wrong value."""
        _check_prompts(self.prompts, n)
        if self.max_tokens < 0:
            raise invalid("max_tokens", f"must be at least 0, but it is {describe_value(self.max_tokens)}")
        if not self.max_tokens and not self.echo:
            raise invalid("max_tokens", "must be at least 1 without echo: true")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise invalid("logprobs", f"must be from 0 to {MAX_LOGPROBS}, but it is {describe_value(self.logprobs)}")
        if self.best_of not in (None, n):
            raise invalid("best_of", f"must be equal to n, which is {n}, but it is {describe_value(self.best_of)}")
        if self.suffix and self.echo:
            raise invalid("suffix", "is not possible with echo: leave one of the two out")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise invalid("suffix", "is only possible with texts as prompts, but there are token ids")


def _check_prompts(prompts: Prompts, n: int) -> None:
    if not prompts:
        raise invalid("prompt", "must not be an empty array")
    if len(prompts) * n > MAX_CHOICES:
        rule = f"and n ask for {len(prompts) * n} choices, but a request may have {MAX_CHOICES}: send fewer prompts"
        raise invalid("prompt", rule)
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            continue
        name = f"prompt[{index}]" if len(prompts) > 1 else "prompt"
        if not prompt:
            raise invalid(name, "must not be an empty array")
        if min(prompt) < 0 or max(prompt) > _MAX_ID:
            wrong = min(prompt) if min(prompt) < 0 else max(prompt)
            raise invalid(name, f"must have token ids from 0 to {_MAX_ID}, but one is {describe_value(wrong)}")


_REFUSED: Final = REFUSED.keys() - CompletionFields.model_fields.keys() - UNSUPPORTED.keys()


def parse_completion_request(
    raw: bytes, served: ServedModels, max_body_bytes: int, max_items: int = MAX_ITEMS
) -> RawRequest:
    """Parses and checks the body of POST /completions. Raises ApiError as `parse_chat_request` does."""
    parsed = parse_object(raw, max_body_bytes, max_items)
    if parsed.get("prompt") is None:
        _refuse_unsupported(parsed, "messages")
    fields = typed(CompletionFields, {name: value for name, value in parsed.items() if value is not None})
    _, most_output = served.get(identifier_of(fields.model, served), (0, 1))
    shared = {name: parsed[name] for name in (*SHARED, *_REFUSED) if name in parsed}
    request = check_chat_request({**shared, **fields.chat_fields(most_output)}, served, RawRequest)
    fields.check(request.n)
    _refuse_unsupported(parsed, *UNSUPPORTED)
    if request.raw_prompts.scored and request.n * request.estimated_prompt_tokens > MAX_SCORED:
        found = request.n * request.estimated_prompt_tokens
        rule = f"may have about {MAX_SCORED} tokens in all choices with echo and logprobs, but it has about {found}"
        raise invalid("prompt", f"{rule}: send fewer prompts")
    return request


def _refuse_unsupported(parsed: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if name in parsed and parsed[name] not in UNSUPPORTED[name].harmless:
            raise errors.invalid_parameters(f"{name} {UNSUPPORTED[name].advice}.", name)
