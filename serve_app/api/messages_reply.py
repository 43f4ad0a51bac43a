"""Encodes the events of a model replica as a reply in the Messages format: one JSON body, or server-sent events."""

from __future__ import annotations

from typing import Any, Final

from pydantic_core import from_json

from serve_app.api.codec import encode_json, encode_line, encode_text
from serve_app.api.door import ReplyEvent, ReplyHead
from serve_app.contracts.generation import (
    CallArguments,
    CallEnded,
    CallStarted,
    ChoiceEnded,
    Delta,
    Ending,
    Finished,
    FinishReason,
    Part,
    PromptEcho,
    Reasoning,
    Text,
)

PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
HIDDEN_PER_PING: Final = 64  # number of hidden pieces of reasoning after which a ping is sent
_STOP: Final = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_DELTA: Final = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b}}\n\n'


class WholeMessage:
    """Collects the events of a reply. See `WholeReplyEncoder`."""

    def __init__(self, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._blocks: list[tuple[dict[str, Any], list[str]]] = []  # each with the pieces of its text, thinking or input
        self._last_call: Ending | None = None

    def add_event(self, event: ReplyEvent) -> None:
        for part in _parts(event):
            match part:
                case Text():
                    self._add("text", part.text)
                case Reasoning():
                    if self._shows_thinking:
                        self._add("thinking", part.text)
                case CallStarted():
                    self._blocks.append(({"type": "tool_use", "id": part.id, "name": part.name}, []))
                case CallArguments():
                    self._blocks[-1][1].append(part.text)
                case CallEnded():
                    self._last_call = part.ending

    def _add(self, kind: str, text: str) -> None:
        if not self._blocks or self._blocks[-1][0]["type"] != kind:
            self._blocks.append(({"type": kind}, []))
        self._blocks[-1][1].append(text)

    def body(self, head: ReplyHead, finished: Finished) -> bytes:
        content = [_whole_block(block, "".join(pieces)) for block, pieces in self._blocks]
        message = _message(head, content, _usage(finished))
        return encode_json({**message, **_end(self._last_call, finished)})


class MessageStream:
    """Encodes the events of a streamed reply. See `StreamEncoder`.

    `message_start` precedes the first piece. Its usage has the prompt tokens and no output tokens.
    """

    def __init__(self, head: ReplyHead, shows_thinking: bool) -> None:
        self._head = head
        self._shows_thinking = shows_thinking
        self._is_begun = False
        self._hidden = 0
        self._open = ""  # type of the block that has not ended
        self._index = -1  # index of the last block
        self._last_call: Ending | None = None

    def event(self, event: ReplyEvent) -> bytes:
        return b"".join((self._beginning(), *map(self._part, _parts(event))))

    def end(self, finished: Finished) -> bytes:
        delta = {"type": "message_delta", "delta": _end(self._last_call, finished), "usage": _usage(finished)}
        return b"".join((self._beginning(), self._close(), _event("message_delta", delta), _STOP))

    def _beginning(self) -> bytes:
        if self._is_begun:
            return b""
        self._is_begun = True
        head = self._head
        prompt = Finished(FinishReason.STOP, head.prompt_tokens, head.cached_tokens, 0)
        empty = {**_message(head, [], _usage(prompt)), "stop_reason": None, "stop_sequence": None}
        return _event("message_start", {"type": "message_start", "message": empty})

    def _part(self, part: Part) -> bytes:
        match part:
            case Text():
                return self._ensure("text", {"type": "text", "text": ""}) + self._delta("text", "text_delta", part.text)
            case Reasoning():
                if not self._shows_thinking:
                    self._hidden += 1
                    return PING if self._hidden % HIDDEN_PER_PING == 0 else b""
                block = {"type": "thinking", "thinking": "", "signature": ""}
                return self._ensure("thinking", block) + self._delta("thinking", "thinking_delta", part.text)
            case CallStarted():
                call: dict[str, Any] = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
                return self._close() + self._begin("tool_use", call)
            case CallArguments():
                return self._delta("partial_json", "input_json_delta", part.text)
            case CallEnded():
                self._last_call = part.ending
                return self._close()
            case PromptEcho():
                return b""  # only raw prompts are echoed, and this format has none

    def _ensure(self, kind: str, block: dict[str, Any]) -> bytes:
        return b"" if self._open == kind else self._close() + self._begin(kind, block)

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        self._open = kind
        self._index += 1
        started = {"type": "content_block_start", "index": self._index, "content_block": block}
        return _event("content_block_start", started)

    def _delta(self, field: str, kind: str, text: str) -> bytes:
        return _DELTA % (self._index, b'"%b","%b":%b' % (kind.encode(), field.encode(), encode_text(text)))

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signature = self._delta("signature", "signature_delta", "") if self._open == "thinking" else b""
        self._open = ""
        return signature + _event("content_block_stop", {"type": "content_block_stop", "index": self._index})


def error_event(body: dict[str, Any]) -> bytes:
    """Returns the last event of a stream that fails after its headers were sent."""
    return _event("error", body)


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_line(data))


def _parts(event: ReplyEvent) -> tuple[Part, ...]:
    if isinstance(event, ChoiceEnded):
        return ()
    if isinstance(event, Delta):
        return (Text(event.text),) if event.text else ()
    return event.parts


def _whole_block(block: dict[str, Any], content: str) -> dict[str, Any]:
    match block["type"]:
        case "tool_use":
            return {**block, "input": _input(content)}
        case "thinking":
            return {**block, "thinking": content, "signature": ""}
    return {**block, "text": content}


def _input(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call. If they are cut off, returns only complete values, as streaming SDKs do."""
    try:
        parsed = from_json(arguments, allow_partial=True) if arguments.strip() else {}
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {}


def _message(head: ReplyHead, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "usage": usage,
    }


def _usage(finished: Finished) -> dict[str, Any]:
    """Returns the billed tokens. The first three fields add up to the prompt tokens."""
    return {
        "input_tokens": finished.prompt_tokens - finished.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": finished.cached_tokens,
        "output_tokens": finished.completion_tokens,
        "output_tokens_details": {"thinking_tokens": finished.marked_tokens or 0},
    }


def _end(last_call: Ending | None, finished: Finished) -> dict[str, Any]:
    """Returns stop reason and sequence. A cut or malformed last call gives `max_tokens`: clients must not run it."""
    if last_call in (Ending.CUT, Ending.MALFORMED) or finished.reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if last_call is Ending.COMPLETE:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if finished.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}
