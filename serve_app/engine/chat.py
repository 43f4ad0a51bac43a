"""Renders chat messages with the model's own template into prompt tokens.

Only the template's own text may contain control tokens. In messages and tools, `literal` replaces the first character
of each control token's name with a stand-in: half of a surrogate pair, which a client's text cannot contain. The
template copies stand-ins like other characters, and `tokenize` encodes a name with a stand-in as ordinary text.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, TemplateError, meta

from serve_app.engine.errors import ContextLengthExceeded
from serve_app.engine.text.plain_text import Names, PlainText, token_ids

logger = logging.getLogger(__name__)

_FIRST_STAND_IN = 0xDC00  # stand-ins are low surrogates
_HIGH_SURROGATES = re.compile("[\ud800-\udbff]")
_AFTER_STAND_IN = re.compile("(?<=[\udc00-\udfff])")
_MARKER = re.compile(r"<.*>|\[.*\]", re.DOTALL)
_LONG = 8  # a text of more than this times `max_context` characters is checked; ordinary text has about 4 a token
_PIECE = 16_384  # characters of such a text that are tokenized and counted at a time
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # a tag of transformers that produces no text
_SET_HERE = frozenset(  # template variables that requests can't set
    {
        *("messages", "conversation", "tools", "add_generation_prompt", "continue_final_message"),
        *("raise_exception", "strftime_now"),  # functions that transformers adds
        # Parameters of `apply_chat_template`.
        *("chat_template", "documents", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)


class ChatRenderer:
    """Renders messages into token ids. Safe to call from several threads, which tokenize in parallel.

    With `max_context` (tokens), a text that cannot fit is rejected without being tokenized.
    """

    def __init__(self, tokenizer: Any, max_context: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._max_context = max_context
        # Maximum number of bytes that a token stands for. It gives a lower bound on the number of tokens of a text.
        vocabulary = tokenizer.get_vocab()
        self._longest_token = max(len(str(token).encode()) for token in vocabulary)
        self._greatest_id = max(vocabulary.values())
        self._core = getattr(tokenizer, "backend_tokenizer", None)
        self._plain_text = None if self._core is None else PlainText(self._core, ())
        self._added = {str(token): token for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
        self._control_names = self._find_control_names()
        # The tokenizer finds `normalized` tokens after normalization, which may turn other characters into their names.
        is_normalized = any(self._added[name].normalized for name in self._control_names if name in self._added)
        self._normalizer = getattr(self._core, "normalizer", None) if is_normalized else None
        self._names = {frozenset[str](): Names(self._control_names)}  # key: names that stay control tokens
        first = self._names[frozenset()].first_characters
        self._stand_ins = {character: chr(_FIRST_STAND_IN + number) for number, character in enumerate(first)}
        self._restore = str.maketrans({stand_in: character for character, stand_in in self._stand_ins.items()})
        self._lock = threading.Lock()
        self.variables = _variables(tokenizer)  # names of the template variables that a request may set

    @property
    def template(self) -> str | None:
        """The Jinja template that `text` uses with tools. Without tools, `text` may use a different template."""
        templates = getattr(self._tokenizer, "chat_template", None)
        if not isinstance(templates, dict):
            return templates
        return templates.get("tool_use") or templates.get("default")

    @property
    def special_names(self) -> frozenset[str]:
        """Names of the special tokens; a reply's text omits them unless `SamplingParams.shown` lists them."""
        special = {name for name, token in self._added.items() if token.special}
        return frozenset(self._tokenizer.all_special_tokens) | special

    def _find_control_names(self) -> frozenset[str]:
        """Names of special tokens, and of added tokens in brackets that occur in the template or begin like `<|`."""
        templates = getattr(self._tokenizer, "chat_template", None) or ""
        text = "\n".join(templates.values()) if isinstance(templates, dict) else templates
        markers = {n for n in self._added if _MARKER.fullmatch(n) and (n in text or n[1:2] in ("|", "｜"))}
        return self.special_names | markers

    def literal(self, value: Any, spared: Sequence[str] = ()) -> Any:
        """A copy of messages or tools, with stand-ins in all texts and keys. Names in `spared` stay control tokens.

        Raises ValueError if `value` is nested too deeply.
        """
        kept = frozenset(spared)
        if kept not in self._names:
            self._names[kept] = Names(self._control_names - kept)
        try:
            return self._literal(value, self._names[kept])
        except RecursionError:
            raise ValueError("the messages or tools are nested too deeply") from None

    def _literal(self, value: Any, names: Names) -> Any:
        match value:
            case str():
                text = _encodable(value)
                begins = names.begins(text)
                if not begins and self._normalizer is not None:
                    normal = self._normalizer.normalize_str(text)
                    if begins := names.begins(normal):
                        text = normal
                if not begins:
                    return text
                characters = list(text)
                for begin in begins:
                    characters[begin] = self._stand_ins[characters[begin]]
                return "".join(characters)
            case Mapping():
                return {self._literal(key, names): self._literal(part, names) for key, part in value.items()}
            case list() | tuple():
                return [self._literal(part, names) for part in value]
        return value

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of the conversation, up to the assistant's turn. Messages and tools never yield control tokens."""
        return self.tokenize(self.text(self.literal(messages), continue_final, self.literal(tools)))

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as rendered by the template, up to the beginning of the assistant's turn.

        The role `developer` counts as `system`, and a content of None counts as empty. With `continue_final`, the last
        message stays open and the reply continues it. `tools` is the template variable of that name. `variables` sets
        further template variables, whose names must be in `self.variables`. Without `add_generation_prompt`, the
        beginning of the assistant's turn is left out.

        Raises:
            ContextLengthExceeded: the text is certainly too long for the context.
            ValueError: there are no messages, or the template rejects them.
        """
        if not messages:
            raise ValueError("there are no messages")
        try:
            plain = [self._plain(message) for message in messages]
            more: dict[str, Any] = {} if tools is None else {"tools": _clean(list(tools))}
            more |= _clean(variables)
            more_bytes = _num_bytes(json.dumps(more, ensure_ascii=False)) if more else 0
        except RecursionError:
            raise ValueError("the messages or tools are nested too deeply") from None
        self._refuse_oversized(sum(_num_bytes(m["content"]) for m in plain) + more_bytes)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    plain,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt and not continue_final,
                    continue_final_message=continue_final,
                    **more,
                )
            )
        except Exception as error:  # jinja's errors and any that a template raises
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a conversation that `text` has rendered, with its control tokens.

        Raises:
            ContextLengthExceeded: the text is too long to fit.
        """
        first, *others = (_encodable(piece.translate(self._restore)) for piece in _AFTER_STAND_IN.split(text))
        restored = "".join([first, *others])
        self._refuse_oversized(len(restored.encode()))
        self._refuse_overlong(restored)
        if self._core is None or self._plain_text is None:
            with self._lock:  # a space in each name with a stand-in keeps it from becoming a control token
                return list(self._tokenizer(" ".join([first, *others]), add_special_tokens=False)["input_ids"])
        # The core needs no lock: it is thread-safe, unlike the tokenizer's call.
        ids = token_ids(self._core, first)
        return ids + [token for piece in others for token in self._plain_text.encode_piece(piece)]

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Token ids of a text without a template. Names of special tokens in it are encoded as those tokens.

        With `special_tokens`, adds the tokens that the tokenizer puts around a text, such as a begin-of-sequence token.

        Raises:
            ContextLengthExceeded: the text is too long to fit.
        """
        text = _encodable(text)
        self._refuse_oversized(len(text.encode()))
        self._refuse_overlong(text)
        if self._core is None:
            with self._lock:
                return list(self._tokenizer(text, add_special_tokens=special_tokens)["input_ids"])
        return token_ids(self._core, text, special_tokens)

    def encode_following(self, text: str) -> list[int]:
        """Token ids of a text that follows other text. Names of control tokens in it stay ordinary text.

        Raises:
            ContextLengthExceeded: the text is too long to fit.
        """
        self._refuse_oversized(_num_bytes(text))
        self._refuse_overlong(_encodable(text))
        if self._plain_text is None:
            return self.tokenize(self.literal(text))
        pieces = _AFTER_STAND_IN.split(self.literal(text))
        return [
            token
            for piece in pieces
            for token in self._plain_text.encode_piece(_encodable(piece.translate(self._restore)))
            if piece
        ]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, with the names of special tokens.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        for token in token_ids:
            if not 0 <= token <= self._greatest_id:
                raise ValueError(f"{token} is not a token of the model: ids are from 0 to {self._greatest_id}")
        if self._core is not None:  # the core is thread-safe
            return str(self._core.decode(list(token_ids), skip_special_tokens=False))
        with self._lock:
            plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
            return str(self._tokenizer.decode(list(token_ids), **plain))

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """The names of tokens, as in the vocabulary; an empty string for an id without a token."""
        return [str(name or "") for name in self._tokenizer.convert_ids_to_tokens(list(token_ids))]

    def find_token(self, name: str) -> int | None:
        """The id of the token with this name."""
        return self._ids.get(name)

    @cached_property
    def num_ids(self) -> int:
        """One more than the highest token id."""
        return 1 + max(self._ids.values())

    @cached_property
    def _ids(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

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
        """Raise ContextLengthExceeded if a very long text is certainly too long.

        Tokenizes the text in pieces and stops early, because 4 MB of words would take 10 s. Each cut between two pieces
        changes the count by a few tokens at most.
        """
        if self._max_context is None or self._core is None or len(text) <= _LONG * self._max_context:
            return
        counted = 0
        for start in range(0, len(text), _PIECE):
            counted += len(token_ids(self._core, text[start : start + _PIECE]))
            if counted > self._max_context * 5 // 4:
                raise ContextLengthExceeded(0, self._max_context)


def _variables(tokenizer: Any) -> frozenset[str]:
    """Names of the variables that the templates read and that requests may set."""
    templates = getattr(tokenizer, "chat_template", None) or ""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    found: set[str] = set()
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        try:
            found |= meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template)))
        except TemplateError:
            logger.warning("The chat template can't be parsed, so requests can't set its variables.")
    return frozenset(found) - _SET_HERE - set(getattr(tokenizer, "special_tokens_map", {}))


def _encodable(text: str) -> str:
    """The text with unpaired surrogates replaced by question marks."""
    return text.encode(errors="replace").decode()


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def _clean(value: Any) -> Any:
    """The value with question marks for high surrogates, which JSON allows but tokenizers reject.

    Low surrogates stay, because they may be stand-ins.
    """
    match value:
        case str():
            return _HIGH_SURROGATES.sub("?", value)
        case Mapping():
            return {_clean(key): _clean(part) for key, part in value.items()}
        case list() | tuple():
            return [_clean(part) for part in value]
    return value
