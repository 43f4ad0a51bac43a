"""How each family of models writes its tool calls, and which family a chat template belongs to."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from serve_app.tools.families import deepseek, hermes, llama, mistral, plain
from serve_app.tools.parser import Parser


@dataclass(frozen=True, slots=True)
class Family:
    """One way to write tool calls.

    `markers` must reach the parser as text, even those that are special tokens of the model's tokenizer.
    `around(name)` are the texts before and after the arguments of a call, `separator` stands between two such, None
    where this form of a call can't be repeated. What the chat template does by itself is in `reads_tools` (definitions
    come as the variable `tools`) and `reads_calls` (`tool_calls` and messages of role `tool`), as far as the
    template at hand shows.
    """

    name: str
    parser: Callable[[Collection[str], random.Random], Parser]
    around: Callable[[str], tuple[str, str]]
    separator: str | None
    markers: tuple[str, ...] = ()
    reads_tools: bool = True
    reads_calls: bool = True
    nine_letter_ids: bool = False  # the template refuses other ids than nine letters and digits


_DEEPSEEK: Final = (
    deepseek.CALLS_BEGIN,
    deepseek.CALLS_END,
    deepseek.CALL_BEGIN,
    deepseek.CALL_END,
    deepseek.SEPARATOR,
)
_MISTRAL: Final = (mistral.TOOL_CALLS, mistral.CALL_ID, mistral.ARGS)
# DeepSeek's templates join arguments to texts, and R1's prints calls only where the content is null: the calls of
# earlier turns are written out instead, in the same form.
HERMES: Final = Family("hermes", hermes.HermesParser, hermes.around, "\n", (hermes.BEGIN, hermes.END))
LLAMA: Final = Family("llama3", llama.LlamaParser, llama.around, None, (llama.PYTHON_TAG,))
DEEPSEEK_V3: Final = Family(
    "deepseek_v3", deepseek.DeepSeekParser, deepseek.around, None, _DEEPSEEK, reads_tools=False, reads_calls=False
)
DEEPSEEK_V31: Final = Family(
    "deepseek_v31", deepseek.DeepSeekParser, deepseek.around_v31, None, _DEEPSEEK, reads_tools=False, reads_calls=False
)
MISTRAL: Final = Family("mistral", mistral.MistralParser, mistral.around, None, _MISTRAL, nine_letter_ids=True)
MISTRAL_NAMED: Final = Family(
    "mistral_named", mistral.MistralParser, mistral.around_named, "", _MISTRAL, nine_letter_ids=True
)
PLAIN: Final = Family("plain", plain.PlainParser, plain.around, "\n", reads_tools=False, reads_calls=False)

FAMILIES: Final = MappingProxyType(
    {f.name: f for f in (HERMES, LLAMA, DEEPSEEK_V3, DEEPSEEK_V31, MISTRAL, MISTRAL_NAMED, PLAIN)}
)


def detect(chat_template: str | None) -> Family:
    """The family whose calls the Jinja text of a chat template writes; the plain one where none is known.

    A template with tools in a form that is not known here counts as plain too: what the model is told and what is
    looked for in its replies must be the same.
    """
    template = chat_template or ""
    if deepseek.CALL_BEGIN in template:
        return DEEPSEEK_V3 if deepseek.FENCE in template else DEEPSEEK_V31
    if mistral.TOOL_CALLS in template:
        return MISTRAL_NAMED if mistral.ARGS in template else MISTRAL
    if hermes.BEGIN in template:
        # Qwen3-Coder and GLM write something like XML into the same tags.
        return PLAIN if re.search(r"<function=|<arg_key>|<parameter=", template) else HERMES
    if "<|start_header_id|>" in template and re.search(r'"parameters\\?":', template):
        return LLAMA
    return PLAIN
