"""Encodes stored responses, and lists the items of their inputs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

from pydantic_core import from_json

from serve_app.api.codec import encode_json
from serve_app.api.responses_chat import Json, StoredConversation, digits_of

MAX_BYTES: Final = 1024 * 1024  # compressed; a conversation that fills the context needs about a tenth of this
MAX_JSON: Final = 8 * 1024 * 1024  # before compression; without this limit, 1 MB could decompress to hundreds of MB
_KINDS: Final = {
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
"""Prefix of an item's id by its type. Messages have `msg`."""


class TooLarge(ValueError):
    """A response is too large to be stored, or to be read."""


def encode_stored(items: Sequence[Json], response: Json, room: float = 1.0) -> bytes:
    """Returns the bytes to store. Items of the input get ids, so that they can be listed and referred to.

    If several items have the same id, only the first keeps it. Raises TooLarge if the size exceeds the fraction `room`
    (0 to 1) of MAX_BYTES or MAX_JSON.
    """
    digits = digits_of(response["id"])
    kept: dict[str, Json] = {}
    for at, item in enumerate(items):
        given = item.get("id")
        new = f"{_KINDS.get(item.get('type', ''), 'msg')}_{digits}_i{at}"
        own = given if given and isinstance(given, str) and given not in kept else new
        kept[own] = {**item, "id": own}
    encoded = encode_json({"items": list(kept.values()), "response": response})
    if len(encoded) > room * MAX_JSON:
        raise TooLarge
    compressed = zlib.compress(encoded, 1)
    if len(compressed) > room * MAX_BYTES:
        raise TooLarge
    return compressed


def decode_stored(body: bytes, most: int = MAX_JSON) -> StoredConversation:
    """Decodes a stored response. Raises TooLarge above `most` bytes of JSON.

    Takes milliseconds for a long conversation, so call it on a thread.
    """
    encoded = zlib.decompressobj().decompress(body, most + 1)
    if len(encoded) > most:
        raise TooLarge
    try:
        found: Any = from_json(encoded)
    except ValueError:  # `from_json` allows 200 levels. A request may have 200, and the response nests its tools deeper
        found = json.loads(encoded)
    return StoredConversation(found["items"], found["response"], len(encoded))


def without_logprobs(response: Json) -> Json:
    """Returns a response without the log probabilities of its text."""
    output = []
    for item in response["output"]:
        parts = item["content"] if item["type"] == "message" else None
        output.append(item if parts is None else {**item, "content": [{**part, "logprobs": []} for part in parts]})
    return {**response, "output": output}


def list_items(
    items: Iterable[Json], *, order: Literal["asc", "desc"] = "desc", after: str | None = None, limit: int = 20
) -> Json | None:
    """Returns a page of input items, with all fields that the format requires; None if there is no item `after`."""
    listed = [_listed(item) for item in items]
    if order == "desc":
        listed.reverse()
    if after is not None:
        ids = [item["id"] for item in listed]
        if after not in ids:
            return None
        listed = listed[ids.index(after) + 1 :]
    page = listed[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(listed) > limit,
    }


def _listed(item: Json) -> Json:
    kind = item.get("type") or "message"
    listed = {**item, "type": kind}
    if kind != "reasoning":
        listed["status"] = item.get("status") or "completed"
    if kind == "message":
        content = item["content"]
        is_output = item["role"] == "assistant"
        if isinstance(content, str):
            content = [{"type": "output_text" if is_output else "input_text", "text": content}]
        listed["content"] = [
            {"annotations": [], **part} if is_output and part["type"] == "output_text" else part for part in content
        ]
    if kind == "reasoning":
        listed["summary"] = item.get("summary") or []
    return listed
