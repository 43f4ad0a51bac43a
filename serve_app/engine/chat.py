"""Renders chat messages with the model's own template into prompt tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.engine.errors import ContextLengthExceeded

_LONG = 8  # characters per token of context: twice as many as ordinary text has
_PIECE = 16_384  # characters


class ChatRenderer:
    """Renders messages into token ids. Safe to call from several threads, which tokenize in parallel.

    With `max_context` (tokens), a text that cannot fit is rejected without being tokenized.
    """

    def __init__(self, tokenizer: Any, max_context: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._max_context = max_context
        # A token stands for at most the UTF-8 bytes of its text, so this gives a lower bound on the number of tokens.
        self._longest_token = max(len(str(token).encode()) for token in tokenizer.get_vocab())
        self._core = getattr(tokenizer, "backend_tokenizer", None)
        self._lock = threading.Lock()

    @property
    def template(self) -> str | None:
        """The Jinja template that `text` uses with tools; without tools it may use a different one."""
        templates = getattr(self._tokenizer, "chat_template", None)
        if not isinstance(templates, dict):
            return templates
        return templates.get("tool_use") or templates.get("default")

    @property
    def special_names(self) -> frozenset[str]:
        """Names of the special tokens; a reply's text omits them unless `SamplingParams.shown` lists them."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        return frozenset(self._tokenizer.all_special_tokens) | {str(token) for token in added if token.special}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of the conversation, ready for the assistant's turn: `tokenize` of `text`."""
        return self.tokenize(self.text(messages, continue_final, tools))

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation as rendered by the template, ready for the assistant's turn.

        The role `developer` counts as `system`, and a content of None counts as empty. With `continue_final` the last
        message stays open and the reply continues it. `tools` is the template variable of that name.

        Raises:
            ContextLengthExceeded: the text is too long to fit, however it is tokenized.
            ValueError: there are no messages, or the template rejects them.
        """
        if not messages:
            raise ValueError("there are no messages")
        try:
            plain = [self._plain(message) for message in messages]
            more = {} if tools is None else {"tools": _clean(list(tools))}
            of_tools = len(json.dumps(more, ensure_ascii=False).encode()) if more else 0
        except RecursionError:
            raise ValueError("the messages or tools are nested too deeply") from None
        self._refuse_oversized(sum(len(m["content"].encode()) for m in plain) + of_tools)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    plain,
                    tokenize=False,
                    add_generation_prompt=not continue_final,
                    continue_final_message=continue_final,
                    **more,
                )
            )
        except Exception as error:  # jinja's errors and any that a template raises
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text that already holds its special tokens.

        Raises:
            ContextLengthExceeded: the text is too long to fit.
        """
        self._refuse_oversized(len(text.encode()))
        self._refuse_overlong(text)
        if self._core is not None:  # thread-safe and releases the GIL, unlike the tokenizer's call
            return list(self._core.encode(text, add_special_tokens=False).ids)
        with self._lock:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @staticmethod
    def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        role = "system" if message.get("role") == "developer" else message.get("role")
        text = "" if content is None else str(content)
        return dict(_clean({**message, "role": role, "content": text}))

    def _refuse_oversized(self, num_bytes: int) -> None:
        if self._max_context is None:
            return
        at_least = -(-num_bytes // self._longest_token)
        if at_least > self._max_context:
            raise ContextLengthExceeded(0, self._max_context)

    def _refuse_overlong(self, text: str) -> None:
        """Tokenize a very long text in pieces and stop once it is certainly too long: 4 MB of words take 10 s.

        A cut between two pieces changes only the word at the cut, a few tokens out of many thousands.
        """
        if self._max_context is None or self._core is None or len(text) <= _LONG * self._max_context:
            return
        counted = 0
        for start in range(0, len(text), _PIECE):
            counted += len(self._core.encode(text[start : start + _PIECE], add_special_tokens=False).ids)
            if counted > self._max_context * 5 // 4:
                raise ContextLengthExceeded(0, self._max_context)


def _clean(value: Any) -> Any:
    """The value without unpaired surrogates, which JSON can carry but no tokenizer accepts."""
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case Mapping():
            return {_clean(key): _clean(part) for key, part in value.items()}
        case list() | tuple():
            return [_clean(part) for part in value]
    return value
