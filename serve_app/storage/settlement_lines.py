"""Encodes settlements as lines of a spool: a checksum and JSON."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import fields

from serve_app.contracts.books import Outcome, Settlement, StoredReply, StoredResponse
from serve_app.contracts.money import Price

_NAMES = tuple(field.name for field in fields(Settlement))
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def to_line(settlement: Settlement) -> bytes:
    body = encode(settlement)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def from_line(line: bytes) -> Settlement | None:
    """Returns the settlement of a line, or None if the line is torn or this release cannot read it."""
    checksum, _, body = line.rstrip(b"\n").partition(b" ")
    return decode(body) if checksum == b"%08x" % zlib.crc32(body) else None


def encode(settlement: Settlement) -> bytes:
    """Returns ASCII JSON. Raises TypeError or ValueError if it is not a valid settlement."""
    # `dataclasses.asdict` takes five times as long, and every request runs this.
    values = {name: getattr(settlement, name) for name in _NAMES}
    # Unset optional fields are omitted, so that a release that does not know them can read the line.
    values = {name: value for name, value in values.items() if value is not None}
    price = settlement.price
    values["price"] = {"input": price.input, "cached_input": price.cached_input, "output": price.output}
    if (reply := settlement.reply) is not None:
        body = base64.b64encode(reply.body).decode()
        values["reply"] = {"idempotency_key": reply.idempotency_key, "fingerprint": reply.fingerprint, "body": body}
    if (response := settlement.response) is not None:
        body = base64.b64encode(response.body).decode()
        values["response"] = {"response_id": response.response_id, "expires_at": response.expires_at, "body": body}
    return _to_json(values).encode()


def decode(body: bytes) -> Settlement | None:
    """Returns the settlement that `encode` of this or another release encoded, or None if it cannot be read."""
    try:
        found = json.loads(body)
        # Ignore fields that a later release has added: this release still bills the fields that it knows.
        values = {name: value for name, value in found.items() if name in _NAMES}
        price = Price(*(found["price"][name] for name in ("input", "cached_input", "output")))
        values |= {"price": price, "outcome": Outcome(found["outcome"])}
        if (reply := found.get("reply")) is not None:
            known = {name: reply[name] for name in ("idempotency_key", "fingerprint")}
            values["reply"] = StoredReply(**known, body=base64.b64decode(reply["body"], validate=True))
        if (response := found.get("response")) is not None:
            known = {name: response[name] for name in ("response_id", "expires_at")}
            values["response"] = StoredResponse(**known, body=base64.b64decode(response["body"], validate=True))
        return Settlement(**values)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def reply_size(settlement: Settlement) -> int:
    """Returns how many bytes the settlement's reply and stored response take in its line, approximately."""
    return sum(len(kept.body) * 4 // 3 for kept in (settlement.reply, settlement.response) if kept is not None)
