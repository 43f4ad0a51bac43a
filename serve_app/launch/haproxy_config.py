"""Amends the configuration that Ray writes for HAProxy, before HAProxy reads it.

`haproxy_config.py FILE HOST SOCKET PATHS LANES [CERTIFICATE]`

Ray's template has no settings for these changes:

- Only HAProxy's own user may use its control socket, which has full control over HAProxy.
- The metrics exporter binds to HOST instead of all addresses. The statistics page is removed.
- With CERTIFICATE, a PEM file that also has the key, clients must use https.
- If most requests from an address are refused, its requests go through a lane, which is a queue. Only a few requests
  of a lane are at the gateways at one time; the others wait in HAProxy. A lane leads back to the same frontend through
  a local socket, so Ray still chooses the gateways. LANES has the limits; `lanes_of` parses it.
- Requests whose path has the token of a one-time link are not logged.
- If most requests of a key are refused, HAProxy itself refuses the key's requests beyond a multiple of the
  key's chat replies.

Requests with a key that got a chat reply in the last ten minutes count for the key, from any address. All others count
for their address. A key is the digest of the header that the gateway reads: the first authorization header, or the
first x-api-key header if there is none. The header is never captured, because HAProxy's log would show it.

Refused requests are those that a gateway answers with 4xx, 503 or 529. Requests that fail in another way, for example
because the client hangs up or the reply is cut, count as neither refused nor served.

The script uses only the standard library and is fast: HAProxy waits for it on each reload.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path

COUNT = 64  # lanes of each kind: two addresses rarely share one
TOKEN_PATHS = "/first/ /invitations/ /reset/ /sign-up/"  # parts of the console's paths before a token
MIN_PIECE = 8192  # bytes; without a minimum, HAProxy forwards a slowed body in pieces of a few bytes


@dataclass(frozen=True, slots=True)
class Lanes:
    """Limits that decide when HAProxy slows down an address or a key, and how much.

    A sender is slow if, within 10 s, more of its requests were refused than `refused` plus `per_reply` for each chat
    reply. Requests of a slow address take its lane. In 10 s, a slow key may send `refused` requests to the gateways,
    and 1 + `per_reply` more for each chat reply; its other requests get 429.
    """

    refused: int = 50
    per_reply: int = 4
    delay_ms: int = 800  # delay of each request of a lane, and of each 429
    at_once: int = 32  # maximum requests of a lane at the gateways; the delay allows 40 a second
    waiting: int = 400  # maximum open requests of a slow address or key, about ten seconds' worth
    # Larger requests take separate lanes, because HAProxy ends the delay when a body fills its buffer.
    large_bytes: int = 8192
    large_bytes_per_s: int = 2_000_000  # maximum upload rate of one address
    large_at_once: int = 4


def lanes_of(text: str) -> Lanes:
    """Returns the lanes for a text such as `refused=50 delay_ms=800`. Raises ValueError, which names the valid form."""
    names = [field.name for field in fields(Lanes)]
    given = {}
    for part in text.split():
        name, _, value = part.partition("=")
        if name not in names or not re.fullmatch("[1-9][0-9]{0,8}", value):
            raise ValueError(f"{part!r} is not NAME=NUMBER, with a number from 1 and a name of {', '.join(names)}")
        given[name] = int(value)
    return Lanes(**given)


_BUSY = (
    '{"error":{"message":"Most requests of this address were refused lately, and many wait. Try again in 5 s.",'
    '"type":"overloaded_error","param":null,"code":"overloaded_error"}}'
)
_REFUSED = (
    '{"error":{"message":"Most requests of this API key were refused lately, and it sends too many. Try again in 1 s.",'
    '"type":"rate_limit_error","param":null,"code":"requests"}}'
)


def _tables(lanes: Lanes, socket: str) -> str:
    ordinary, large = (
        "\n".join(f"    server self{n} {socket} maxconn {max_conn} send-proxy-v2" for n in range(COUNT))
        for max_conn in (lanes.at_once, lanes.large_at_once)
    )
    return f"""\
# Keys that got a chat reply lately.
backend good_keys
    stick-table type binary len 20 size 200k expire 10m
# Refused requests, chat replies and open requests of each sender, which is such a key or an address.
backend senders
    stick-table type binary len 20 size 200k expire 60s store gpc(2),gpc_rate(2,10s),conn_cur
# Requests of slow senders that go to the gateways without a delay.
backend slow_senders
    stick-table type binary len 20 size 200k expire 60s store gpc(1),gpc_rate(1,1s)
backend upload_rates
    stick-table type ipv6 size 200k expire 60s store bytes_in_rate(1s)
backend lanes
    timeout queue 60s
    balance hash var(txn.sender)
{ordinary}
backend lanes_of_large_bodies
    timeout queue 60s
    balance hash var(txn.sender)
    filter bwlim-in uploads limit {lanes.large_bytes_per_s} key src table upload_rates min-size {MIN_PIECE}
    http-request set-bandwidth-limit uploads
{large}
"""


def _frontend(lanes: Lanes, socket: str, paths: str) -> str:
    refused = f"status 429 content-type application/json hdr retry-after 1 string '{_REFUSED}'"
    busy = f"status 503 content-type application/json hdr retry-after 5 string '{_BUSY}'"
    return f"""\
    bind {socket} accept-proxy mode 600 id 99
    http-request set-log-level silent if {{ path_sub {TOKEN_PATHS} }}
    # Requests return here from the lanes. Only these wait for the delay.
    acl is_from_lane so_id 99
    tcp-request inspect-delay {lanes.delay_ms}ms
    tcp-request content accept if !{{ so_id 99 }}
    tcp-request content accept if WAIT_END
    timeout tarpit {lanes.delay_ms}ms
    acl has_authorization req.fhdr(authorization) -m found
    http-request set-var(txn.given) req.fhdr(x-api-key,1) if !is_from_lane !has_authorization
    http-request set-var(txn.key) "str('Bearer '),concat(,txn.given),sha1" if {{ var(txn.given) -m found }}
    http-request set-var(txn.key) req.fhdr(authorization,1),sha1 if !is_from_lane has_authorization
    # Other paths answer 200 to any key.
    http-request set-var(txn.is_chat) bool(true) if !is_from_lane {{ path_end {paths} }}
    acl is_good_key var(txn.key),in_table(good_keys)
    http-request set-var(txn.sender) src,sha1 if !is_from_lane
    http-request set-var(txn.sender) var(txn.key) if !is_from_lane is_good_key
    http-request track-sc0 var(txn.sender) table senders if !is_from_lane
    http-response sc-inc-gpc(0,0) if {{ status 400:499 503 529 }}
    http-response sc-inc-gpc(1,0) if {{ status 200 }} {{ var(txn.is_chat) -m bool }}
    http-response track-sc2 var(txn.key) table good_keys if {{ status 200 }} {{ var(txn.is_chat) -m bool }}
    http-request set-var(txn.replies) sc_gpc_rate(1,0)
    http-request set-var(txn.free) var(txn.replies),mul({lanes.per_reply}),add({lanes.refused})
    http-request set-var(txn.direct) var(txn.replies),add(txn.free),div(10)
    http-request set-var(txn.is_slow) bool(true) if {{ sc_gpc_rate(0,0),sub(txn.free) gt 0 }}
    acl is_slow var(txn.is_slow) -m bool
    acl is_beyond sc_gpc_rate(0,1),sub(txn.direct) ge 0
    acl many_are_open sc_conn_cur(0) gt {lanes.waiting}
    http-request track-sc1 var(txn.sender) table slow_senders if is_slow
    http-request deny {refused} if is_slow is_good_key is_beyond many_are_open
    http-request tarpit {refused} if is_slow is_good_key is_beyond
    http-request deny {busy} if is_slow !is_good_key many_are_open
    http-request sc-inc-gpc(0,1) if is_slow
"""


def _route(lanes: Lanes) -> str:
    return f"""\
    acl is_large req.hdr_val(content-length) ge {lanes.large_bytes}
    acl is_large req.hdr(transfer-encoding) -m found
    use_backend lanes_of_large_bodies if is_slow !is_good_key is_large
    use_backend lanes if is_slow !is_good_key
"""


def amended(text: str, host: str, socket: Path, paths: str, lanes: str = "", certificate: str = "") -> str:
    """Returns Ray's configuration with the amendments. `paths`: paths that generate replies, separated by spaces."""
    text = re.sub(r"^listen stats\b.*", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(?m)^(    stats socket .* mode) 666\b", r"\g<1> 600", text)
    exporter, frontend, rest = text.partition("frontend http_frontend\n")
    exporter = re.sub(r"(?m)^(frontend prometheus\n    bind ):", rf"\g<1>{host}:", exporter)
    if not frontend:
        return exporter
    numbers = lanes_of(lanes)
    rules = _frontend(numbers, f"unix@{socket}", paths)
    bind, line, others = rest.partition("\n")
    if certificate:
        bind += f" ssl crt {certificate} alpn http/1.1"
        rules += "    http-request set-header x-forwarded-proto https\n"  # so the console marks its cookies as secure
    before, first, backends = others.partition("    use_backend ")  # HAProxy warns of rules that follow a `use_backend`
    tables, route = _tables(numbers, f"unix@{socket}"), _route(numbers) if first else ""
    return "".join([exporter, tables, frontend, bind, line, rules, before, route, first, backends])


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(amended(file.read_text(), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:]))
