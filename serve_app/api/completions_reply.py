"""Encodes the events of a model replica as a text completion: one JSON body, or server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from serve_app.api.chat_reply import LOWEST_LOGPROB, Usage
from serve_app.api.chat_request import RawRequest
from serve_app.api.codec import encode_json, encode_line
from serve_app.api.door import ReplyEvent, ReplyHead
from serve_app.contracts.generation import ChoiceEnded, Delta, FinishReason, PromptEcho, Text, TokenLogprob

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_MAX_SKIPPED_BYTES = 64  # maximum bytes of text to skip in the search for the next token


class TokenOffsets:
    """Finds the characters at which tokens begin, in a text that arrives in pieces.

    A token may arrive before all of its text. Some tokens do not appear in the text: special tokens, and parts of a
    character. Such a token gets the offset of the next one.
    """

    def __init__(self) -> None:
        self._text = b""
        self._at = 0  # position in `_text`, in bytes
        self._characters = 0  # number of characters before `_at`, plus those of `_owed`
        self._owed = b""  # bytes of tokens whose text has not arrived

    def add_text(self, text: str) -> None:
        if not text:
            return
        data = text.encode(errors="replace")
        if self._owed:
            known = min(len(self._owed), len(data))
            if data[:known] == self._owed[:known]:
                data, self._owed = data[known:], self._owed[known:]
            else:  # the owed bytes never arrive: the token is not part of the text
                self._characters -= _count_characters(self._owed)
                self._owed = b""
        self._text = self._text[self._at :] + data
        self._at = 0

    def next_offset(self, raw: bytes) -> int:
        """Returns the offset of the next token, which has these bytes."""
        at, text = self._at, self._text
        if not text.startswith(raw, at):
            if raw[:1] == b" " and not self._characters and text.startswith(raw[1:], at):
                raw = raw[1:]  # the text has no space before its first word
            elif len(text) - at < len(raw) and raw.startswith(text[at:]):
                offset = self._offset(raw)
                self._owed += raw[len(text) - at :]
                self._at = len(text)
                self._characters += _count_characters(raw)
                return offset
            else:
                found = text.find(raw, at, at + _MAX_SKIPPED_BYTES)
                if found < 0:
                    return self._characters
                self._characters += _count_characters(text[at:found])
                self._at = found
        offset = self._offset(raw)
        self._at += len(raw)
        self._characters += _count_characters(raw)
        return offset

    def _offset(self, raw: bytes) -> int:
        return self._characters - (1 if self._characters and raw and raw[0] & 0xC0 == 0x80 else 0)


def _count_characters(data: bytes) -> int:
    return sum(byte & 0xC0 != 0x80 for byte in data)


class Logprobs:
    """Builds the `logprobs` objects of one choice, for the whole reply or for its pieces."""

    def __init__(self) -> None:
        self._offsets = TokenOffsets()
        self._is_first_of_prompt = True

    def copy(self) -> Logprobs:
        copied = copy(self)
        copied._offsets = copy(self._offsets)
        return copied

    def add(self, text: str, tokens: Sequence[TokenLogprob], *, of_prompt: bool = False) -> dict[str, Any]:
        """Returns the object for the next piece of text and its tokens. The first token of a prompt has null values."""
        self._offsets.add_text(text)
        values: dict[str, Any] = {name: [] for name in LOGPROBS}
        for token in tokens:
            values["tokens"].append(_name(token))
            values["text_offset"].append(self._offsets.next_offset(token.raw))
            if of_prompt and self._is_first_of_prompt:
                self._is_first_of_prompt = False
                values["token_logprobs"].append(None)
                values["top_logprobs"].append(None)
            else:
                values["token_logprobs"].append(_finite(token.logprob))
                values["top_logprobs"].append(_top(token))
        return values


def _top(token: TokenLogprob) -> dict[str, float]:
    top = {_name(other): _finite(other.logprob) for other in reversed(token.top)}
    top.setdefault(_name(token), _finite(token.logprob))
    return dict(sorted(top.items(), key=lambda pair: -pair[1]))


def _finite(logprob: float) -> float:
    return logprob if isfinite(logprob) else LOWEST_LOGPROB


def _name(token: TokenLogprob) -> str:
    """Returns the token's text. If it is not whole characters, returns its bytes as text, so that names are unique."""
    try:
        return token.raw.decode() or token.text
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)


@dataclass(frozen=True, slots=True)
class Piece:
    """The next output of one choice. `prompt_ids` is only in the first piece of a prompt, if requested."""

    choice: int
    text: str
    tokens: Sequence[TokenLogprob]
    ids: tuple[int, ...]
    of_prompt: bool = False
    prompt_ids: tuple[int, ...] | None = None


def pieces_of(event: ReplyEvent, request: RawRequest) -> list[Piece]:
    """Returns the pieces of output in an event. An echoed prompt gives one piece for each of its choices."""
    if isinstance(event, ChoiceEnded):
        return []
    if isinstance(event, Delta):
        return [Piece(0, event.text, event.tokens, event.token_ids)]
    echo = next((part for part in event.parts if isinstance(part, PromptEcho)), None)
    if echo is None:
        text = "".join(part.text for part in event.parts if isinstance(part, Text))
        return [Piece(event.choice, text, event.tokens, event.token_ids)]
    text, tokens = (echo.prompt, event.tokens) if request.is_echoed else ("", ())
    ids = echo.ids if request.with_ids and echo.ids else None
    choices = range(event.choice, event.choice + request.n)
    return [Piece(choice, text, tokens, (), True, ids) for choice in choices if text or tokens or ids is not None]


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    logprobs: Logprobs = field(default_factory=Logprobs)
    encoded: dict[str, list[bytes]] = field(default_factory=lambda: {name: [] for name in LOGPROBS})
    ids: list[int] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()
    reason: FinishReason | None = None


class WholeCompletion:
    """Collects the events of a completion that is not streamed.

    Log-probabilities are encoded as they arrive. Encoding those of a long prompt at once would delay other requests.
    """

    def __init__(self, request: RawRequest) -> None:
        self._request = request
        self._choices = [_Choice() for _ in range(request.choices)]

    def add_event(self, event: ReplyEvent) -> None:
        if isinstance(event, ChoiceEnded):
            self._choices[event.choice].reason = event.reason
        pieces = pieces_of(event, self._request)
        for piece in pieces:
            choice = self._choices[piece.choice]
            choice.text.append(piece.text)
            choice.ids += piece.ids
            choice.prompt_ids = piece.prompt_ids or choice.prompt_ids
            if not self._request.logprobs:
                continue
            if piece.of_prompt and piece is not pieces[0]:  # copied: the first choice has encoded the prompt
                first = self._choices[pieces[0].choice]
                choice.logprobs, choice.encoded = first.logprobs.copy(), {k: [*v] for k, v in first.encoded.items()}
                continue
            values = choice.logprobs.add(piece.text, piece.tokens, of_prompt=piece.of_prompt)
            for name in LOGPROBS if piece.tokens else ():
                choice.encoded[name].append(encode_json(values[name])[1:-1])

    def body(self, head: ReplyHead, reason: FinishReason, usage: Usage) -> bytes:
        """Returns the body. `reason` is why the reply ended, and applies to choices that have no separate reason."""
        choices = b",".join(self._choice(index, choice, reason) for index, choice in enumerate(self._choices))
        start = encode_json(_fixed(head))[:-1]
        return start + b',"choices":[' + choices + b'],"usage":' + encode_json(usage.as_dict()) + b"}"

    def _choice(self, index: int, choice: _Choice, reason: FinishReason) -> bytes:
        logprobs = b"null"
        if self._request.logprobs:
            arrays = (b'"%b":[%b]' % (name.encode(), b",".join(parts)) for name, parts in choice.encoded.items())
            logprobs = b"{" + b",".join(arrays) + b"}"
        made: dict[str, Any] = {"finish_reason": _REASONS[choice.reason or reason]}
        if self._request.with_ids:
            made |= {"prompt_token_ids": list(choice.prompt_ids), "token_ids": choice.ids}
        start = encode_json({"index": index, "text": "".join(choice.text)})[:-1]
        return start + b',"logprobs":' + logprobs + b"," + encode_json(made)[1:]


class CompletionStream:
    """Builds the chunks of a streamed completion."""

    def __init__(self, request: RawRequest, head: ReplyHead) -> None:
        self._request = request
        self._head = b"data: " + encode_json(_fixed(head))[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        self._logprobs = [Logprobs() for _ in range(request.choices)] if request.logprobs else None
        self._unended = set(range(request.choices))

    def chunks(self, event: ReplyEvent) -> bytes:
        """Returns the chunks to send for one event."""
        if isinstance(event, ChoiceEnded):
            return self._finish(event.choice, event.reason)
        return b"".join(map(self._chunk, pieces_of(event, self._request)))

    def closing_chunks(self, reason: FinishReason) -> bytes:
        """Returns the chunks that close the choices that have not ended yet. `reason` is why the reply ended."""
        return b"".join(self._finish(choice, reason) for choice in sorted(self._unended))

    def set_usage(self, usage: Usage) -> None:
        """Adds this usage to the chunks that follow."""
        self._after = b'],"usage":' + encode_json(usage.as_dict()) + b"}\n\n"

    def usage_chunk(self, usage: Usage) -> bytes:
        """Returns the chunk with the usage and without choices."""
        return self._head + b'],"usage":' + encode_json(usage.as_dict()) + b"}\n\n"

    def _chunk(self, piece: Piece) -> bytes:
        logprobs = None
        if self._logprobs is not None:
            added = self._logprobs[piece.choice].add(piece.text, piece.tokens, of_prompt=piece.of_prompt)
            logprobs = added if piece.tokens else None
        chunk = {"index": piece.choice, "text": piece.text, "logprobs": logprobs, "finish_reason": None}
        if self._request.with_ids:
            chunk["token_ids"] = list(piece.ids)
            if piece.prompt_ids is not None:
                chunk["prompt_token_ids"] = list(piece.prompt_ids)
        return self._head + encode_line(chunk) + self._after

    def _finish(self, choice: int, reason: FinishReason) -> bytes:
        self._unended.discard(choice)
        chunk = {"index": choice, "text": "", "logprobs": None, "finish_reason": _REASONS[reason]}
        return self._head + encode_line(chunk) + self._after


def _fixed(head: ReplyHead) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }
