"""Derives from a chat template how a model reads about tools and how it writes its replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from serve_app.contracts.generation import GenerateCall, Grammar, SamplingParams, TokenizeCall, Tokenized
from serve_app.engine.chat import ChatRenderer
from serve_app.model.tools.call_grammars import optional_calls, required_calls
from serve_app.model.tools.format_table import TOOL_FORMATS, format_of
from serve_app.model.tools.messages import conversation, with_parsed_arguments
from serve_app.model.tools.parser import ReplyParser
from serve_app.model.tools.reasoning import markers_of

Tools = tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A call in the engine's form. `sampling` is the call's, with the additions for tools and reasoning."""

    token_ids: list[int]
    sampling: SamplingParams
    left_open: bool  # whether the reply begins within reasoning


class Dialect:
    """The form of one model's tool calls and reasoning.

    `tool_format` is a name in TOOL_FORMATS, or "auto" to follow the chat template. `reasoning` of "none" leaves
    reasoning in the text; "auto" follows the chat template.
    """

    def __init__(self, chat: ChatRenderer, tool_format: str = "auto", reasoning: str = "auto") -> None:
        template = chat.template
        self._chat = chat
        self._format = format_of(template) if tool_format == "auto" else TOOL_FORMATS[tool_format]
        self._markers = markers_of(template) if reasoning == "auto" else None

    def prompt(self, call: GenerateCall) -> Prompt:
        """Returns the call's prompt and the constraints on its reply. Takes milliseconds if long; thread-safe.

        Raises:
            ContextLengthExceeded: the messages cannot fit the context.
            BadTool: the parameters of a function cannot constrain the reply.
            ValueError: the template rejects the messages.
        """
        text = self._text(call, self._chat.text)
        left_open = self._markers is not None and not call.continue_final and self._markers.left_open(text)
        return Prompt(self._chat.tokenize(text), self._sampling(call, _callable(call), left_open), left_open)

    def tokenize(self, call: TokenizeCall) -> Tokenized:
        """Returns tokens or their text. Takes a second for the longest texts; thread-safe.

        Raises:
            ContextLengthExceeded: the text cannot fit the context, so it is not counted.
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
        """Returns the conversation in the model's form."""
        tools = _callable(call)
        messages: Sequence[Mapping[str, Any]] = [self._literal(with_parsed_arguments(m)) for m in call.messages]
        definitions = None
        if tools or any("tool_calls" in message or message["role"] == "tool" for message in messages):
            messages, definitions = conversation(self._format, messages, self._chat.literal(tools))
        return render(messages, call.continue_final, definitions)

    def _literal(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns the message without control tokens.

        Templates drop earlier reasoning by its markers, so these keep their meaning in the model's own messages.
        """
        literal: dict[str, Any] = self._chat.literal(message)
        if self._markers is not None and message["role"] == "assistant":
            markers = self._markers.begin, self._markers.end
            literal["content"] = self._chat.literal(message.get("content"), markers)
        return literal

    def parser(self, call: GenerateCall, prompt: Prompt, choice: int) -> ReplyParser | None:
        """Returns the parser for one choice of the reply; None if the reply can only be text."""
        tools = _callable(call)
        if not tools and self._markers is None:
            return None
        parser = self._format.parser if tools else ReplyParser
        is_held, begins, other = _is_held(call, tools), bool(self._format.begins), call.sampling.grammar is not None
        return parser(
            [tool["function"]["name"] for tool in tools],
            f"{call.reply_id or call.request_id}-{choice}",  # a repeated request has the same ids
            # Text or JSON that the grammar allows must not be parsed as an unchecked call.
            is_held and (not begins or other),
            self._markers,
            prompt.left_open,
            is_held and (begins or not other),
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
        if _is_held(call, tools):
            markers = () if self._markers is None else (self._markers.begin, self._markers.end)
            return optional_calls(
                self._format, tools, call.parallel_calls, shown=markers, otherwise=call.sampling.grammar
            )
        return call.sampling.grammar


def _callable(call: GenerateCall | TokenizeCall) -> Tools:
    """Returns the functions that the reply may call."""
    if call.tool_choice == "none":
        return ()
    if call.function is None:
        return call.tools
    return tuple(tool for tool in call.tools if tool["function"]["name"] == call.function)


def _is_held(call: GenerateCall, tools: Tools) -> bool:
    """Returns whether a grammar constrains the calls although no call is required."""
    if call.tool_choice != "auto" or not tools:
        return False
    return call.sampling.grammar is not None or any(tool["function"].get("strict") for tool in tools)
