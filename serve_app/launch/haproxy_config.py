"""Amends the configuration that Ray writes for HAProxy, before HAProxy reads it.

`haproxy_config.py FILE HOST SOCKET PATHS LANES [CERTIFICATE]`

Ray's template has no settings for these changes:

- The metrics exporter binds to HOST instead of all addresses. The statistics page is removed.
- With CERTIFICATE, a PEM file that also has the key, clients must use https.
- Senders whose requests are mostly refused take a lane with the rest of their requests. The gateways see only a few
  requests of a lane at one time; the others wait in HAProxy. LANES are the numbers, as in `lanes_of`. A lane leads back
  to the same frontend through a local socket, so Ray still chooses the gateways.

A sender is a key that got a chat reply lately, from any address; for all other requests, it is the address. A key is
the digest of the first authorization header, which is the header that the gateway reads. It is never captured, because
HAProxy's log would show it.

Refused requests are those that a gateway answers with 4xx or 503, and those that HAProxy refuses because many wait. A
client that hangs up, a reply that is cut and any other failure count as neither refused nor served.

The script uses only the standard library and is fast: HAProxy waits for it on each reload.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path

COUNT = 64  # lanes of each kind: two senders rarely share one


@dataclass(frozen=True, slots=True)
class Lanes:
    """When a sender's requests take a lane, and the limits of a lane.

    In 10 s, `refused` requests may be refused without a lane, and `per_reply` more for each chat reply. Beyond that,
    `refused` requests and 1 + `per_reply` for each chat reply still go directly. The lane takes the rest.
    """

    refused: int = 50
    per_reply: int = 4
    at_once: int = 32  # requests of a lane that the gateways see at one time: a few long replies must not close it
    delay_ms: int = 800  # of each request, so that a lane passes 40 requests a second
    waiting: int = 400  # maximum requests of one sender in its lane: ten seconds' worth
    large_bytes: int = 8192  # a body of this size fills HAProxy's buffer, which ends the delay: it has another lane
    large_bytes_per_s: int = 2_000_000  # of one address
    large_at_once: int = 4


def lanes_of(text: str) -> Lanes:
    """Returns the lanes for a text such as `refused=50 delay_ms=800`. Raises ValueError, with what is right."""
    names = [field.name for field in fields(Lanes)]
    given = {}
    for part in text.split():
        name, _, value = part.partition("=")
        if name not in names or not re.fullmatch("[1-9][0-9]{0,8}", value):
            raise ValueError(f"{part!r} is not NAME=NUMBER, with a number from 1 and a name of {', '.join(names)}")
        given[name] = int(value)
    return Lanes(**given)


_BUSY = (
    '{"error":{"message":"Most requests of this address or API key were refused lately, and many wait. '
    'Try again in 5 s.","type":"overloaded_error","param":null,"code":"overloaded"}}'
)


def _tables(lanes: Lanes, socket: str) -> str:
    ordinary, large = (
        "\n".join(f"    server self{n} {socket} maxconn {most} send-proxy-v2" for n in range(COUNT))
        for most in (lanes.at_once, lanes.large_at_once)
    )
    return f"""\
backend good_keys
    stick-table type binary len 20 size 200k expire 10m
# Refused requests and chat replies of each sender.
backend senders
    stick-table type binary len 20 size 200k expire 60s store gpc(2),gpc_rate(2,10s)
backend senders_in_lanes
    stick-table type binary len 20 size 200k expire 60s store conn_cur
backend upload_rates
    stick-table type ipv6 size 200k expire 60s store bytes_in_rate(1s)
backend lanes_of_addresses
    timeout queue 60s
    balance hash var(txn.sender)
{ordinary}
backend lanes_of_keys
    timeout queue 60s
    balance hash var(txn.sender)
{ordinary}
backend lanes_of_large_bodies
    timeout queue 60s
    balance hash var(txn.sender)
    filter bwlim-in uploads limit {lanes.large_bytes_per_s} key src table upload_rates
    http-request set-bandwidth-limit uploads
{large}
"""


def _frontend(lanes: Lanes, socket: str, paths: str) -> str:
    return f"""\
    bind {socket} accept-proxy mode 600 id 99
    # The lanes come in here again. Nothing else waits for the delay.
    acl is_from_lane so_id 99
    tcp-request inspect-delay {lanes.delay_ms}ms
    tcp-request content accept if !{{ so_id 99 }}
    tcp-request content accept if WAIT_END
    http-request set-var(txn.key) req.fhdr(authorization,1),sha1 if !is_from_lane
    # Other paths answer 200 to any key.
    http-request set-var(txn.is_chat) bool(true) if !is_from_lane {{ path_end {paths} }}
    acl is_good_key var(txn.key),in_table(good_keys)
    http-request set-var(txn.sender) src,sha1 if !is_from_lane
    http-request set-var(txn.sender) var(txn.key) if !is_from_lane is_good_key
    http-request track-sc0 var(txn.sender) table senders if !is_from_lane
    http-response sc-inc-gpc(0,0) if {{ status 400:499 503 }}
    http-response sc-inc-gpc(1,0) if {{ status 200 }} {{ var(txn.is_chat) -m bool }}
    http-response track-sc2 var(txn.key) table good_keys if {{ status 200 }} {{ var(txn.is_chat) -m bool }}
    # One lot for each answered request: the request takes the lane if it draws none of those that go directly.
    http-request set-var(txn.served) sc_gpc_rate(1,0) if !is_from_lane
    http-request set-var(txn.answered) sc_gpc_rate(0,0),add(txn.served) if !is_from_lane
    http-request set-var(txn.direct) var(txn.served),mul({1 + lanes.per_reply}),add({lanes.refused}) if !is_from_lane
    http-request set-var(txn.lot) rand,mod(txn.answered),sub(txn.direct) if !is_from_lane
    acl takes_lane var(txn.lot) -m int ge 0
    http-request track-sc1 var(txn.sender) table senders_in_lanes if takes_lane
    acl many_wait sc_conn_cur(1) gt {lanes.waiting}
    http-request sc-inc-gpc(0,0) if takes_lane many_wait
    http-request return status 503 content-type application/json hdr retry-after 5 string '{_BUSY}' \
if takes_lane many_wait
"""


def _route(lanes: Lanes) -> str:
    return f"""\
    acl is_large req.hdr_val(content-length) ge {lanes.large_bytes}
    acl is_large req.hdr(transfer-encoding) -m found
    use_backend lanes_of_large_bodies if takes_lane is_large
    use_backend lanes_of_keys if takes_lane is_good_key
    use_backend lanes_of_addresses if takes_lane
"""


def amended(text: str, host: str, socket: Path, paths: str, lanes: str = "", certificate: str = "") -> str:
    """Returns Ray's configuration with the amendments. `paths` of doors are separated by spaces."""
    text = re.sub(r"^listen stats\b.*", "", text, flags=re.DOTALL | re.MULTILINE)
    exporter, frontend, rest = text.partition("frontend http_frontend\n")
    exporter = re.sub(r"(?m)^(frontend prometheus\n    bind ):", rf"\g<1>{host}:", exporter)
    if not frontend:
        return exporter
    numbers = lanes_of(lanes)
    rules = _frontend(numbers, f"unix@{socket}", paths)
    bind, line, others = rest.partition("\n")
    if certificate:
        bind += f" ssl crt {certificate} alpn http/1.1"
        rules += "    http-request set-header x-forwarded-proto https\n"  # the console then marks its cookies as secure
    before, first, backends = others.partition("    use_backend ")  # HAProxy warns of rules after it
    tables, route = _tables(numbers, f"unix@{socket}"), _route(numbers) if first else ""
    return "".join([exporter, tables, frontend, bind, line, rules, before, route, first, backends])


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(amended(file.read_text(), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:]))
