"""How each family of models writes its tool calls, and which family a chat template belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from serve_app.tools.families import deepseek, hermes, llama, mistral, plain
from serve_app.tools.parser import Parser


@dataclass(frozen=True, slots=True)
class Family:
    """One way to write tool calls.

    A reply's calls are `opening`, the calls with `separator` between them, `closing`. `around(name)` are the texts
    before and after the arguments of one call; without a separator, there can be one only. `markers` must reach the
    parser as text, even those that are special tokens of the model's tokenizer.

    `begins` is the marker that calls begin with, none where they have none. What else the parser takes for a call:
    what follows one of `also_begins`, and where a reply begins with a character of `bare`, maybe that.

    What its chat templates do by themselves: `reads_tools`, that definitions come as the variable `tools`;
    `reads_calls`, that messages have `tool_calls`; `reads_results`, that there is a role `tool`.
    """

    name: str
    parser: type[Parser]
    around: Callable[[str], tuple[str, str]]
    separator: str | None
    opening: str = ""
    closing: str = ""
    markers: tuple[str, ...] = ()
    begins: str = ""
    also_begins: tuple[str, ...] = ()
    bare: str = ""
    reads_tools: bool = True
    reads_calls: bool = True
    reads_results: bool = True
    nine_letter_ids: bool = False  # the template refuses other ids than nine letters and digits


HERMES: Final = Family(
    "hermes",
    hermes.HermesParser,
    hermes.around,
    "\n",
    markers=(hermes.BEGIN, hermes.END),
    begins=hermes.BEGIN,
)
LLAMA: Final = Family(
    "llama3",
    llama.LlamaParser,
    llama.around,
    None,
    markers=(llama.PYTHON_TAG,),
    also_begins=(llama.PYTHON_TAG,),
    bare="{",
)
DEEPSEEK_V3: Final = Family(
    "deepseek_v3",
    deepseek.DeepSeekParser,
    deepseek.around,
    "\n",
    opening=deepseek.CALLS_BEGIN,
    closing=deepseek.CALLS_END,
    markers=deepseek.MARKERS,
    begins=deepseek.CALLS_BEGIN,
    also_begins=(deepseek.CALL_BEGIN,),
    reads_tools=False,
    # They join the arguments to other text, and R1's prints calls only where the content is null. Calls of earlier
    # turns are written out instead, which looks the same to the model.
    reads_calls=False,
)
DEEPSEEK_V31: Final = replace(DEEPSEEK_V3, name="deepseek_v31", around=deepseek.around_v31, separator="")
MISTRAL: Final = Family(
    "mistral",
    mistral.MistralParser,
    mistral.around,
    ", ",
    opening=mistral.TOOL_CALLS + "[",
    closing="]",
    markers=mistral.MARKERS,
    begins=mistral.TOOL_CALLS,
    bare="[",
    nine_letter_ids=True,
)
MISTRAL_NAMED: Final = replace(
    MISTRAL, name="mistral_named", around=mistral.around_named, separator="", opening="", closing=""
)
PLAIN: Final = Family(
    "plain",
    plain.PlainParser,
    plain.around,
    "\n",
    bare="{[`",
    reads_tools=False,
    reads_calls=False,
    reads_results=False,
)

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
