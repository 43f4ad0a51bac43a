"""A scripted model that behaves like a capable one: it calls the right tool, and replies from its result.

For what clients ask of a model's understanding, which the bundled one is too small for. Everything else is real:
engine, grammars, the parser of its calls (it writes them as Qwen does), replica, gateway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from serve_app.engine.chat import ChatRenderer
from serve_app.engine.config import EngineSettings
from serve_app.engine.engine import Engine
from serve_app.engine.scheduling.sequence import Chunk
from serve_app.engine.text.detokenizer import Vocabulary
from tests.gateway.scripted_model import EOS, tokenizer_of

# The whole conversation as JSON, so that it can be read back. The tags in the comment show how calls and reasoning are
# written.
TEMPLATE = (
    "{# <tool_call></tool_call> <think></think> #}{{ {'messages': messages, 'tools': tools | default(none)} | tojson }}"
)

JOKE = {"setup": "Why did the cat sit on the laptop?", "punchline": "To keep an eye on the mouse."}


def answer(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """The reply to a conversation."""
    last = messages[-1]
    if last["role"] == "tool":
        return f"The answer is {last['content']}"
    asked = str(last["content"])
    if tools:
        functions = [tool["function"] for tool in tools]
        function = next((each for each in functions if each["name"] in asked), functions[0])
        call = {"name": function["name"], "arguments": arguments(function, asked)}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
    if "joke" in asked:
        return json.dumps(JOKE)
    if "Think" in asked:
        return "<think>\nTwice two is four.\n</think>\n\n4"
    return "The capital of France is Paris." if "France" in asked else "Hello! How can I help you?"


def arguments(function: Mapping[str, Any], asked: str) -> dict[str, Any]:
    """Returns a function's required arguments from the question, each by the parameter's name and type."""
    parameters = function["parameters"]
    required = parameters.get("required", parameters.get("properties", ()))
    properties = {name: parameters["properties"][name] for name in required}
    numbers = iter([int(number) for number in re.findall(r"\d+", asked)] + [1, 1])
    quoted = re.search(r"'([^']+)'", asked)
    named = re.search(r"\bin ((?:[A-Z]\w*[, ]*)+)", asked)
    texts = [found[1].strip() for found in (quoted, named) if found] or ["some"]
    return {
        name: JOKE.get(name) or (next(numbers) if schema.get("type") == "integer" else texts[0])
        for name, schema in properties.items()
    }


class CapableRunner:
    """A model runner whose next token is the next byte of `answer`; all other bytes are equally unlikely."""

    def __init__(self, vocab_size: int, max_context: int) -> None:
        self.vocab_size = vocab_size
        self.class_bounds: tuple[int, ...] = (max_context,)
        self.num_blocks = max_context // 8
        self._answers: dict[tuple[int, ...], bytes] = {}

    def execute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        said = []
        for chunk in chunks:
            text = self._answer(tuple(chunk.sequence.request.prompt_token_ids))
            at = chunk.sequence.num_output
            said += [text[at + row] if at + row < len(text) else EOS for row in range(chunk.num_logits)]
        logits = torch.full((len(said), self.vocab_size), -50.0)
        logits[torch.arange(len(said)), said] = 20.0
        return logits

    def clear_blocks(self, blocks: Sequence[int]) -> None: ...

    def _answer(self, prompt: tuple[int, ...]) -> bytes:
        if prompt not in self._answers:
            text = bytes(prompt).decode()
            is_chat = text.startswith("{")  # else a raw prompt of the Completions format
            told = json.loads(text) if is_chat else {"messages": [{"role": "user", "content": text}], "tools": None}
            self._answers[prompt] = answer(told["messages"], told["tools"] or []).encode()
        return self._answers[prompt]


def capable_engine(max_context: int = 32768) -> Engine:
    """An engine on it. Every token is a byte."""
    tokenizer = tokenizer_of([], TEMPLATE)
    runner = CapableRunner(len(tokenizer), max_context)
    settings = EngineSettings(model="scripted", speculation_rows=0, prefix_reuse=False)
    chat = ChatRenderer(tokenizer, runner.class_bounds[-1])
    return Engine(runner, Vocabulary(tokenizer), frozenset({EOS}), settings, chat=chat)
