"""Encodes the events of a model replica as a response: one JSON body, or typed server-sent events.

Both come from `OutputItems`, so a stream ends with the response that the same request returns without a stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from serve_app.api.chat_reply import logprob_entry
from serve_app.api.codec import encode_json, encode_line, encode_text
from serve_app.api.door import ReplyEvent, ReplyHead
from serve_app.api.errors import ApiError
from serve_app.api.responses_chat import Json, NamedTool, ResponsesChat, digits_of
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
    Reasoning,
    ReplyParts,
    Text,
    TokenLogprob,
)

_ERROR_CODES: Final = {429: "rate_limit_exceeded"}
"""Codes of `response.error` by status. All other statuses have `server_error`."""

Emit = Callable[[str, Json], None]


def response_object(
    head: ReplyHead,
    chat: ResponsesChat,
    *,
    stored: bool,
    status: str,
    output: Sequence[Json] = (),
    usage: Json | None = None,
    error: Json | None = None,
) -> Json:
    """Returns the object `response`."""
    sent, tools = chat.sent, chat.tool_names
    reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
    response = {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "status": status,
        "background": sent.background,
        "error": error,
        "incomplete_details": reason,
        "instructions": sent.instructions,
        "max_output_tokens": sent.max_output_tokens,
        "max_tool_calls": sent.max_tool_calls,
        "metadata": sent.metadata,
        "model": head.model,
        "output": list(output),
        "parallel_tool_calls": sent.parallel_tool_calls,
        "previous_response_id": sent.previous_response_id,
        "prompt_cache_key": sent.prompt_cache_key,
        "reasoning": {
            "effort": sent.reasoning.effort if sent.reasoning else None,
            "summary": sent.reasoning.summary if sent.reasoning else None,
        },
        "safety_identifier": sent.safety_identifier,
        "service_tier": "default",
        "store": stored,
        "system_fingerprint": head.fingerprint,
        "temperature": sent.temperature,
        "text": _text_options(chat),
        "tool_choice": _tool_choice(chat),
        "tools": tools.echoed,
        "top_logprobs": sent.top_logprobs,
        "top_p": sent.top_p,
        "truncation": sent.truncation,
        "usage": usage,
        "user": sent.user,
    }
    return response | ({"omitted_tools": tools.omitted} if tools.omitted else {})


def _text_options(chat: ResponsesChat) -> Json:
    text = chat.sent.text
    form: Json = {"type": "text"}
    if text is not None and text.format is not None:
        form = text.format.model_dump(by_alias=True, exclude_none=True)
    return {"format": form, "verbosity": (text.verbosity if text is not None else None) or "medium"}


def _tool_choice(chat: ResponsesChat) -> Any:
    choice = chat.sent.tool_choice
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)


def fault_object(error: ApiError) -> Json:
    """Returns the object `error` of a response."""
    return {"code": _ERROR_CODES.get(error.status, "server_error"), "message": error.message}


def usage_object(finished: Finished) -> Json:
    """Returns the object `usage`."""
    return {
        "input_tokens": finished.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finished.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": finished.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": finished.marked_tokens or 0},
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
    }


class OutputItems:
    """Collects the items of a reply, and emits an event for each step.

    `emit` gets the event's type and its fields.
    """

    def __init__(self, chat: ResponsesChat, emit: Emit) -> None:
        self.items: list[Json] = []
        self._digits = ""
        self._chat = chat
        self._emit = emit
        self._open: str = ""  # kind of the last item while it is open: message, reasoning or call
        self._pieces: list[str] = []  # text or arguments of the open item
        self._logprobs: list[Json] = []  # log-probabilities of the open message
        self._waiting: list[TokenLogprob] = []  # tokens whose text has not arrived
        self._tool: NamedTool | None = None  # the tool of the open call
        self._last_call: Ending | None = None

    def begin(self, digits: str) -> None:
        """Sets the digits in the ids of items."""
        self._digits = digits

    def add(self, event: ReplyEvent) -> None:
        if isinstance(event, ChoiceEnded):
            return
        if isinstance(event, Delta):
            if event.text:
                self._text(event.text, event.tokens)
            else:
                self._waiting += event.tokens
            return
        self._take_parts(event)

    def end(self, reason: FinishReason) -> str:
        """Closes the open item. Returns the status of the response: completed or incomplete."""
        is_cut = reason is FinishReason.LENGTH or self._last_call is Ending.CUT
        if not self.items:
            self._open_message()
        if self._open == "message":
            self._add_logprobs(self._waiting)
        self._close("incomplete" if is_cut else "completed")
        return "incomplete" if is_cut else "completed"

    def _take_parts(self, event: ReplyParts) -> None:
        tokens: Sequence[TokenLogprob] = event.tokens
        texts = [part.text for part in event.parts if isinstance(part, Text)]
        if not texts:
            self._waiting += tokens
        elif len(texts) < len(event.parts):  # only the tokens of the text are sent
            tokens = _of_text(tokens, "".join(texts), from_end=not isinstance(event.parts[0], Text))
        for part in event.parts:
            self._take_part(part, tokens)
            if isinstance(part, Text):
                tokens = ()

    def _take_part(self, part: Part, tokens: Sequence[TokenLogprob]) -> None:
        if isinstance(part, Text):
            self._text(part.text, tokens)
            return
        self._waiting.clear()
        if isinstance(part, Reasoning):
            self._reasoning(part.text)
        elif isinstance(part, CallStarted):
            self._open_call(part)
        elif isinstance(part, CallArguments):
            self._pieces.append(part.text)
            if self._tool is None or not self._tool.is_custom:
                self._emit("response.function_call_arguments.delta", self._at() | {"delta": part.text})
        elif isinstance(part, CallEnded):
            self._last_call = part.ending
            self._close("completed" if part.ending is Ending.COMPLETE else "incomplete")

    def _text(self, text: str, tokens: Sequence[TokenLogprob]) -> None:
        if self._open != "message":
            self._open_message()
        logprobs = self._add_logprobs([*self._waiting, *tokens]) if self._waiting or tokens else []
        self._waiting.clear()
        self._pieces.append(text)
        where = self._at() | {"content_index": 0, "delta": text, "logprobs": logprobs}
        self._emit("response.output_text.delta", where)

    def _add_logprobs(self, tokens: Sequence[TokenLogprob]) -> list[Json]:
        added = [
            {**logprob_entry(token), "top_logprobs": [logprob_entry(other) for other in token.top]} for token in tokens
        ]
        self._logprobs += added
        return added

    def _reasoning(self, text: str) -> None:
        if self._open != "reasoning":
            item = {"id": self._id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
            self._open_item("reasoning", item)
            part = {"type": "reasoning_text", "text": ""}
            self._emit("response.content_part.added", self._at() | {"content_index": 0, "part": part})
        self._pieces.append(text)
        self._emit("response.reasoning_text.delta", self._at() | {"content_index": 0, "delta": text})

    def _open_message(self) -> None:
        item = {"id": self._id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        self._open_item("message", item)
        part = self._text_part("", [])
        self._emit("response.content_part.added", self._at() | {"content_index": 0, "part": part})

    def _open_call(self, part: CallStarted) -> None:
        tool = self._tool = self._chat.tool_names.names.get(part.name, NamedTool(part.name))
        kind = "custom_tool_call" if tool.is_custom else "function_call"
        item: Json = {
            "id": self._id("ctc" if tool.is_custom else "fc"),
            "type": kind,
            "status": "in_progress",
            "call_id": part.id,
            "name": tool.name,
            "input" if tool.is_custom else "arguments": "",
        }
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        self._open_item("call", item)

    def _open_item(self, kind: str, item: Json) -> None:
        self._close("completed")
        self._open, self._pieces, self._logprobs = kind, [], []
        self.items.append(item)
        self._emit("response.output_item.added", {"output_index": len(self.items) - 1, "item": item})

    def _close(self, status: str) -> None:
        """Ends the open item, if there is one."""
        if not self._open:
            return
        kind, self._open = self._open, ""
        text, at = "".join(self._pieces), self._at()
        item: Json = {**self.items[-1], "status": status}
        if kind == "call":
            if item["type"] == "custom_tool_call":
                item["input"] = custom_input(text)
                self._emit("response.custom_tool_call_input.delta", at | {"delta": item["input"]})
                self._emit("response.custom_tool_call_input.done", at | {"input": item["input"]})
            else:
                item["arguments"] = text
                self._emit("response.function_call_arguments.done", at | {"name": item["name"], "arguments": text})
        elif kind == "reasoning":
            part: Json = {"type": "reasoning_text", "text": text}
            item["content"] = [part]
            self._emit("response.reasoning_text.done", at | {"content_index": 0, "text": text})
            self._emit("response.content_part.done", at | {"content_index": 0, "part": part})
        else:
            part = self._text_part(text, self._logprobs)
            item["content"] = [part]
            done = {"content_index": 0, "text": text, "logprobs": self._logprobs}
            self._emit("response.output_text.done", at | done)
            self._emit("response.content_part.done", at | {"content_index": 0, "part": part})
        self.items[-1] = item
        self._emit("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})

    def _text_part(self, text: str, logprobs: list[Json]) -> Json:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _at(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._digits}_{len(self.items)}"


def custom_input(arguments: str) -> str:
    """Returns the input of a custom tool from the arguments that the model wrote."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    value = found.get("input") if isinstance(found, dict) else None
    return value if isinstance(value, str) else arguments


def _of_text(tokens: Sequence[TokenLogprob], text: str, *, from_end: bool) -> Sequence[TokenLogprob]:
    """Returns the first tokens, or with `from_end` the last tokens, whose bytes make up the text."""
    left, count = len(text.encode(errors="replace")), 0
    for token in reversed(tokens) if from_end else tokens:
        if left <= 0:
            break
        left -= len(token.raw)
        count += 1
    return tokens[len(tokens) - count :] if from_end else tokens[:count]


class WholeResponse:
    """See `WholeReplyEncoder`."""

    def __init__(self, chat: ResponsesChat, stored: bool = False) -> None:
        self._chat = chat
        self._stored = stored
        self._events: list[ReplyEvent] = []
        self.add_event = self._events.append
        self.final: Json = {}  # the complete response, set by `body`

    def body(self, head: ReplyHead, finished: Finished) -> bytes:
        items = OutputItems(self._chat, lambda kind, fields: None)
        items.begin(digits_of(head.id))
        for event in self._events:
            items.add(event)
        status = items.end(finished.reason)
        self.final = response_object(
            head, self._chat, stored=self._stored, status=status, output=items.items, usage=usage_object(finished)
        )
        return encode_json(self.final)

    def partial(self, head: ReplyHead, status: str, error: ApiError | None = None) -> Json:
        """Returns the response with the output so far."""
        items = OutputItems(self._chat, lambda kind, fields: None)
        items.begin(digits_of(head.id))
        for event in self._events:
            items.add(event)
        if items.items:
            items.end(FinishReason.LENGTH)
        return response_object(
            head,
            self._chat,
            stored=self._stored,
            status=status,
            output=items.items,
            error=None if error is None else fault_object(error),
        )


class ResponseStream:
    """See `StreamEncoder`."""

    def __init__(self, chat: ResponsesChat, head: ReplyHead, stored: bool = False) -> None:
        self._chat = chat
        self._head = head
        self._stored = stored
        self._number = 0
        self._chunks: list[bytes] = []
        self._items = OutputItems(chat, self._emit)
        self._items.begin(digits_of(head.id))
        self.final: Json = {}  # the complete response, set by `finish`

    def event(self, event: ReplyEvent) -> bytes:
        self._begin()
        self._items.add(event)
        return self._taken()

    def finish(self, finished: Finished) -> None:
        """Sets `final`. `end` sends it."""
        self._begin()
        status = self._items.end(finished.reason)
        self.final = self._response(status, self._items.items, usage=usage_object(finished))

    def end(self, finished: Finished) -> bytes:
        if not self.final:
            self.finish(finished)
        self._emit(f"response.{self.final['status']}", {"response": self.final})
        return self._taken()

    def error_event(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that fails. The response has the items that are complete."""
        self._begin()
        items = [item for item in self._items.items if item["status"] != "in_progress"]
        self._emit("response.failed", {"response": self._response("failed", items, error=fault_object(error))})
        return self._taken()

    def _begin(self) -> None:
        if not self._number:
            for kind in ("response.created", "response.in_progress"):
                self._emit(kind, {"response": self._response("in_progress", ())})

    def _response(
        self, status: str, output: Sequence[Json], usage: Json | None = None, error: Json | None = None
    ) -> Json:
        return response_object(
            self._head, self._chat, stored=self._stored, status=status, output=output, usage=usage, error=error
        )

    def _emit(self, kind: str, fields: Json) -> None:
        if kind == "response.output_text.delta" and not fields["logprobs"]:
            data = (
                b'{"type":"response.output_text.delta","sequence_number":%d,"item_id":"%b","output_index":%d,'
                b'"content_index":0,"delta":%b,"logprobs":[]}'
            ) % (self._number, fields["item_id"].encode(), fields["output_index"], encode_text(fields["delta"]))
        else:
            data = encode_line({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        self._chunks.append(b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n")

    def _taken(self) -> bytes:
        taken = b"".join(self._chunks)
        self._chunks.clear()
        return taken


def lone_error_event(error: ApiError) -> bytes:
    """Returns the event of a failure outside a response."""
    data = {"type": "error", "sequence_number": 0, "code": error.code, "message": error.message, "param": error.param}
    return b"event: error\ndata: " + encode_line(data) + b"\n\n"
