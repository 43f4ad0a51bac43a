"""Fields of other services that would change a reply and that this service does not support.

A request that sets one of them returns 422, because a reply that ignored the field would surprise the client. Values
that change nothing are accepted. Unknown fields that are not in `REFUSED` are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from serve_app.api import errors


class Refused(NamedTuple):
    """The error of a field, and the values that are accepted."""

    remedy: str  # why the field is refused, and what to send instead
    harmless: tuple[Any, ...] = ()  # values accepted in addition to `_HARMLESS`


_FORM: Final = Refused("can't be enforced. Send response_format with json_schema, guided_regex or guided_choice")
_OLDER: Final = Refused(
    "is an older form that is not supported. Send tools and tool_choice; the reply then has tool_calls",
    ("none", "auto"),
)
_BEAMS: Final = Refused("is not supported: there is no beam search. Send n and choose among the choices")
_SAMPLER: Final = Refused("is not supported. Send temperature, top_p, top_k or min_p")
_ADAPTER: Final = Refused("is not supported. Send the identifier of the adapter as model; GET /models lists them")

REFUSED: Final[Mapping[str, Refused]] = {
    "grammar": _FORM,
    "guided_grammar": _FORM,
    "ebnf": _FORM,
    "structural_tag": _FORM,
    "guided_whitespace_pattern": Refused("can't be enforced. Leave it out"),
    "regex": Refused("is not a field here. Send its value in guided_regex"),
    "json_schema": Refused("is not a field here. Send response_format with json_schema"),
    "functions": _OLDER,
    "function_call": _OLDER,
    "bad_words": Refused("is not supported. Send logit_bias with -100 for the tokens of these words"),
    "allowed_token_ids": Refused("is not supported. Send guided_choice or guided_regex, or logit_bias"),
    "logits_processors": Refused("is not supported. Send logit_bias"),
    "custom_logit_processor": Refused("is not supported. Send logit_bias"),
    "stop_regex": Refused("is not supported. Send stop with strings, or guided_regex for the whole reply"),
    "no_stop_trim": Refused("is not a field here. Send include_stop_str_in_output"),
    "skip_special_tokens": Refused("can only be true: replies have no special tokens. Leave it out", (True,)),
    "best_of": Refused("can only be 1. Send n and choose among the choices", (1,)),
    "use_beam_search": _BEAMS,
    "length_penalty": Refused(_BEAMS.remedy, (1,)),
    "typical_p": Refused(_SAMPLER.remedy, (1,)),
    "top_a": _SAMPLER,
    "mirostat": _SAMPLER,
    "mirostat_mode": _SAMPLER,
    "truncate_prompt_tokens": Refused("is not supported: prompts are never cut. Send fewer messages"),
    "echo": Refused("is not supported in this format. Join the text of your last message and the reply"),
    "modalities": Refused("can only be text. Leave it out", (["text"],)),
    "audio": Refused("is not supported: replies are text. Leave it out"),
    "web_search_options": Refused(
        "is not supported. Send a function in tools that searches, and run its calls yourself"
    ),
    "chat_template": Refused("is not supported: the model's own template renders the messages. Leave it out"),
    "documents": Refused("is not supported. Write the documents into a message"),
    "lora_path": _ADAPTER,
    "lora_request": _ADAPTER,
}
"""Refused fields by name. docs/api.md lists all of them."""

_HARMLESS: Final[tuple[Any, ...]] = (None, "", [], False)
_EMPTY_IS_SET: Final = frozenset({"web_search_options"})  # `{}` turns this feature on


def refuse_fields(body: Mapping[str, Any]) -> None:
    """Raises ApiError (422) for the first field of REFUSED that is set to a value that would change the reply."""
    for name, refused in REFUSED.items():
        value = body.get(name)
        if value in _HARMLESS or value in refused.harmless or (value == {} and name not in _EMPTY_IS_SET):
            continue
        raise errors.invalid_parameters(f"{name} {refused.remedy}.", name)
