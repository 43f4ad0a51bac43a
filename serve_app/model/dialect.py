"""Derives from a chat template how a model reads tools, and how it writes calls and reasoning."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from serve_app.contracts.generation import (
    GenerateCall,
    Grammar,
    PromptEcho,
    RawPrompts,
    SamplingParams,
    TokenizeCall,
    Tokenized,
)
from serve_app.engine.chat import ChatRenderer
from serve_app.engine.errors import RequestRefused
from serve_app.model.fill_in_middle import fill_in_prompt
from serve_app.model.tools.call_grammars import optional_calls, required_calls
from serve_app.model.tools.format_table import TOOL_FORMATS, format_of
from serve_app.model.tools.messages import conversation, with_parsed_arguments
from serve_app.model.tools.parser import ReplyParser
from serve_app.model.tools.reasoning import markers_of

Tools = tuple[dict[str, Any], ...]

_SWITCHES = ("enable_thinking", "thinking")  # variables of templates that turn reasoning on and off


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for the engine. `sampling` has the call's parameters, with additions for tools and reasoning."""

    token_ids: list[int]
    sampling: SamplingParams
    left_open: bool  # whether the prompt ends within reasoning, which the reply then continues
    echo: PromptEcho | None = None  # the prompt, if the reply must repeat it


class UnknownVariable(ValueError):
    """A request sets a variable that the model's chat template does not have."""

    def __init__(self, name: str, known: Collection[str]) -> None:
        there_are = f"It has {', '.join(sorted(known))}" if known else "It has none"
        super().__init__(
            f"chat_template_kwargs: the model's chat template has no variable {json.dumps(name[:60])}. {there_are}."
        )


class Dialect:
    """The form of one model's tool calls and reasoning.

    `tool_format` is a name in TOOL_FORMATS, or "auto" to follow the chat template. With `reasoning` "none", reasoning
    stays in the text; "auto" follows the chat template.
    """

    def __init__(self, chat: ChatRenderer, tool_format: str = "auto", reasoning: str = "auto") -> None:
        template = chat.template
        self._chat = chat
        self._format = format_of(template) if tool_format == "auto" else TOOL_FORMATS[tool_format]
        self._reasons = markers_of(template) is not None
        self._markers = markers_of(template) if reasoning == "auto" else None

    def prompt(self, call: GenerateCall) -> Prompt:
        """Returns the call's prompt and the constraints on its reply. Thread-safe.

        Takes tens of milliseconds for long texts.

        Raises:
            ContextLengthExceeded: the messages cannot fit the context.
            BadTool: the parameters of a function do not describe an object.
            UnknownVariable: the template has no variable of this name.
            ValueError: the template rejects the messages.
        """
        text = self._text(call, self._chat.text)
        left_open = self._markers is not None and not call.continue_final and self._markers.left_open(text)
        return Prompt(self._chat.tokenize(text), self._sampling(call, call.callable_tools, left_open), left_open)

    def tokenize(self, call: TokenizeCall) -> Tokenized:
        """Returns the tokens of a text or conversation, or the text of tokens. Thread-safe.

        Takes a second for the longest texts.

        Raises:
            ContextLengthExceeded: the text cannot fit the context, so it is not counted.
            UnknownVariable: the template has no variable of this name.
            ValueError: the template rejects the messages, or an id is not a token.
        """
        if call.token_ids is not None:
            return Tokenized(len(call.token_ids), text=self._chat.decode(call.token_ids))
        if call.text is not None:
            ids = self._chat.encode(call.text, call.add_special_tokens)
        else:
            render = self._chat.text
            if not call.add_generation_prompt:
                render = partial(render, add_generation_prompt=False)
            ids = self._chat.tokenize(self._text(call, render))
        if call.only_count:
            return Tokenized(len(ids))
        return Tokenized(len(ids), tuple(ids), tuple(self._chat.names(ids)) if call.with_names else ())

    def _text(self, call: GenerateCall | TokenizeCall, render: Callable[..., str]) -> str:
        """Returns the conversation as text, rendered with the chat template."""
        tools = call.callable_tools
        messages: Sequence[Mapping[str, Any]] = [self._literal(with_parsed_arguments(m)) for m in call.messages]
        definitions = None
        if tools or any("tool_calls" in message or message["role"] == "tool" for message in messages):
            messages, definitions = conversation(self._format, messages, self._chat.literal(tools))
        return render(messages, call.continue_final, definitions, self._variables(call))

    def _variables(self, call: GenerateCall | TokenizeCall) -> dict[str, Any]:
        """Returns the template's variables for this call.

        The reasoning effort is ignored if the template has no variable for it.
        """
        if not call.template_variables and call.reasoning_effort is None:
            return {}
        known = self._chat.variables
        given = {name: value for name, value in call.template_variables.items() if name in known}
        for name, value in call.template_variables.items():
            # Turning reasoning off is also accepted for a model that does not reason.
            if name not in known and not (name in _SWITCHES and value is False and not self._reasons):
                raise UnknownVariable(name, known)
        variables: dict[str, Any] = {}
        if (effort := call.reasoning_effort) is not None:
            if "reasoning_effort" in known:
                variables["reasoning_effort"] = effort
            variables |= {name: effort != "none" for name in _SWITCHES if name in known}
        return variables | dict(self._chat.literal(given))

    def prompts(self, call: GenerateCall) -> list[Prompt]:
        """Returns the prompts of a call: one for messages, or its raw prompts.

        Raises the errors of `prompt`, and RequestRefused (a ValueError) for a raw prompt that cannot be encoded.
        """
        raw = call.raw
        if raw is None:
            return [self.prompt(call)]
        prompts = []
        for index, prompt in enumerate(raw.prompts):
            name = f"prompt[{index}]" if len(raw.prompts) > 1 else "prompt"
            ids = self._encode(prompt, raw, name)
            echo = None
            if raw.echo:
                echo = PromptEcho(prompt if isinstance(prompt, str) else self._chat.decode(ids), tuple(ids))
            prompts.append(Prompt(ids, call.sampling, False, echo))
        return prompts

    def _encode(self, prompt: str | tuple[int, ...], raw: RawPrompts, name: str) -> list[int]:
        if not isinstance(prompt, str):
            if max(prompt) >= self._chat.num_ids:
                rule = f"outside this model's vocabulary: ids are from 0 to {self._chat.num_ids - 1}"
                raise RequestRefused(f"{name} has the token id {max(prompt)}, which is {rule}", "prompt")
            return list(prompt)
        if raw.suffix is None:
            ids = self._chat.encode(prompt, raw.special_tokens)
            if not ids:
                raise RequestRefused(
                    f"{name} is empty, and this model has no token for the beginning of a text", "prompt"
                )
            return ids
        filled = fill_in_prompt(self._chat, prompt, raw.suffix)
        if filled is None:
            raise RequestRefused(
                "suffix is not possible with this model, which has no tokens for filling in the middle. Leave it out",
                "suffix",
            )
        return filled

    def _literal(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns the message with the names of control tokens made ordinary text.

        Reasoning markers stay control tokens in the model's own messages, because templates use them to drop earlier
        reasoning.
        """
        literal: dict[str, Any] = self._chat.literal(message)
        if self._markers is not None and message["role"] == "assistant":
            markers = self._markers.begin, self._markers.end
            literal["content"] = self._chat.literal(message.get("content"), markers)
        return literal

    def parser(self, call: GenerateCall, prompt: Prompt, choice: int) -> ReplyParser | None:
        """Returns the parser for one choice of the reply; None if the reply can only be text."""
        tools = call.callable_tools
        if call.raw is not None or (not tools and self._markers is None):
            return None
        parser = self._format.parser if tools else ReplyParser
        constrained, other = _constrains_calls(call, tools), call.sampling.grammar is not None
        begins = bool(self._format.begins)
        return parser(
            [tool["function"]["name"] for tool in tools],
            f"{call.reply_id or call.request_id}-{choice}",  # seed: a rerun of the request has the same call ids
            # `checked`: text or JSON that the grammar allows must not be parsed as an unchecked call.
            constrained and (not begins or other),
            self._markers,
            prompt.left_open,
            constrained and (begins or not other),
            call.tool_choice == "required",
        )

    def _sampling(self, call: GenerateCall, tools: Tools, left_open: bool) -> SamplingParams:
        sampling = call.sampling
        grammar = self._grammar(call, tools)
        shown = self._format.markers if tools else ()
        mark = ""
        if self._markers is not None:
            shown += (self._markers.begin, self._markers.end)
            mark = self._markers.end
            if grammar is not None and left_open:
                grammar = replace(grammar, lead=mark)
        if not shown and grammar is sampling.grammar:
            return sampling
        return replace(sampling, shown=shown, mark=mark, grammar=grammar)

    def _grammar(self, call: GenerateCall, tools: Tools) -> Grammar | None:
        if call.tool_choice == "required":
            return required_calls(self._format, tools, call.parallel_calls and call.function is None)
        if _constrains_calls(call, tools):
            markers = () if self._markers is None else (self._markers.begin, self._markers.end)
            return optional_calls(
                self._format, tools, call.parallel_calls, shown=markers, otherwise=call.sampling.grammar
            )
        return call.sampling.grammar


def _constrains_calls(call: GenerateCall, tools: Tools) -> bool:
    """Returns whether calls are optional and a grammar constrains the reply."""
    if call.tool_choice != "auto" or not tools:
        return False
    return call.sampling.grammar is not None or any(tool["function"].get("strict") for tool in tools)
