"""How one model is told about tools, and how its replies are held to them and read: all by its chat template."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from serve_app.backend.messages import GenerateCall
from serve_app.engine.chat import ChatRenderer
from serve_app.engine.request import Grammar, SamplingParams
from serve_app.tools import (
    FAMILIES,
    Family,
    Markers,
    ReasoningSplitter,
    ReplyReader,
    arguments_schema,
    conversation,
    detect,
    detect_reasoning,
    forced,
    optional,
)

AUTO = "auto"
NONE = "none"


class BadTool(ValueError):
    """A function's definition that nothing can be held to. `name` is the function's."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


@dataclass(frozen=True, slots=True)
class Prompt:
    """A call as the engine takes it. `sampling` is that of the call, with what tools and reasoning add to it."""

    token_ids: list[int]
    sampling: SamplingParams
    left_open: bool  # whether the reply begins within reasoning


class Dialect:
    """What the chat template of one model says about its tools and its reasoning.

    `tool_format` is a name of `serve_app.tools.FAMILIES`, or "auto": the template tells. `reasoning` of "none" leaves
    reasoning in the text; "auto" asks the template, too.
    """

    def __init__(self, chat: ChatRenderer, tool_format: str = AUTO, reasoning: str = AUTO) -> None:
        template = chat.template
        self._chat = chat
        self.family: Family = detect(template) if tool_format == AUTO else FAMILIES[tool_format]
        self.markers: Markers | None = detect_reasoning(template) if reasoning == AUTO else None

    def prompt(self, call: GenerateCall) -> Prompt:
        """The call's prompt and what its reply is held to. Takes milliseconds for a long one; safe from any thread.

        Raises:
            ContextLengthExceeded: the messages can't fit the context.
            BadTool: a function that must be called can't be.
            ValueError: the template refuses the messages.
        """
        tools = self._callable(call)
        messages: Sequence[Mapping[str, Any]] = call.messages
        definitions = None
        if tools or any("tool_calls" in message or message["role"] == "tool" for message in messages):
            told = conversation(self.family, messages, tools)
            messages, definitions = told.messages, told.tools
        text = self._chat.text(messages, call.continue_final, definitions)
        left_open = self.markers is not None and not call.continue_final and self.markers.left_open(text)
        return Prompt(self._chat.tokenize(text), self._sampling(call, tools, left_open), left_open)

    def reader(self, call: GenerateCall, prompt: Prompt, choice: int) -> ReplyReader | None:
        """What reads one choice of the reply; None where text is all that it can be."""
        tools = self._callable(call)
        if not tools and self.markers is None:
            return None
        parser = None
        if tools:
            offered = [tool["function"]["name"] for tool in tools]
            # By the request, so that what is repeated under its id is the same.
            rng = random.Random(f"{call.request_id}-{choice}")
            # What the grammar lets through as text or in JSON must not be read as a call that nothing has checked.
            only_first = self._is_held(call, tools) and (not self.family.begins or call.sampling.grammar is not None)
            parser = self.family.parser(offered, rng, only_first)
        splitter = ReasoningSplitter(self.markers, prompt.left_open) if self.markers is not None else None
        return ReplyReader(splitter, parser)

    @staticmethod
    def _callable(call: GenerateCall) -> tuple[dict[str, Any], ...]:
        """The functions that the reply may call."""
        if call.tool_choice == NONE:
            return ()
        if call.function is None:
            return call.tools
        return tuple(tool for tool in call.tools if tool["function"]["name"] == call.function)

    @staticmethod
    def _is_held(call: GenerateCall, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a grammar decides what may be a call although none is compulsory."""
        if call.tool_choice != "auto":
            return False
        return call.sampling.grammar is not None or any(tool["function"].get("strict") for tool in tools)

    def _sampling(self, call: GenerateCall, tools: tuple[dict[str, Any], ...], left_open: bool) -> SamplingParams:
        sampling = call.sampling
        shown: tuple[str, ...] = ()
        mark = ""
        if tools:
            shown += self.family.markers
        if self.markers is not None:
            shown += (self.markers.begin, self.markers.end)
            mark = self.markers.end
        grammar = self._grammar(call, tools)
        if grammar is not None and left_open and self.markers is not None:
            grammar = replace(grammar, lead=self.markers.end)
        if not shown and grammar is sampling.grammar:
            return sampling
        return replace(sampling, shown=shown, mark=mark, grammar=grammar)

    def _grammar(self, call: GenerateCall, tools: tuple[dict[str, Any], ...]) -> Grammar | None:
        own = call.sampling.grammar
        if call.tool_choice == "required":
            for tool in tools:
                self._check(tool)
            must = forced(self.family, tools, parallel=call.parallel_calls and call.function is None)
            # Arguments fit their schema unless the function says that they need not in all points.
            strict = any(tool["function"].get("strict") is not False for tool in tools)
            return Grammar.tool_calls(**asdict(must), strict=strict)
        if tools and self._is_held(call, tools):
            for tool in tools:
                if tool["function"].get("strict"):
                    self._check(tool)
            may = optional(self.family, tools, parallel=call.parallel_calls)
            thinks = () if self.markers is None else (self.markers.begin, self.markers.end)
            return Grammar.tool_calls(**asdict(may), shown=thinks, otherwise=own)
        return own

    @staticmethod
    def _check(tool: Mapping[str, Any]) -> None:
        try:
            arguments_schema(tool["function"])
        except ValueError as error:
            raise BadTool(tool["function"]["name"], str(error)) from None
