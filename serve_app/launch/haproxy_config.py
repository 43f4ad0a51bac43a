"""Amends the configuration that Ray writes for HAProxy, before HAProxy reads it.

`haproxy_config.py FILE HOST SOCKET PATHS [CERTIFICATE]`

Ray's template has no settings for these changes:

- The metrics exporter binds to HOST instead of all addresses. The statistics page is removed.
- With CERTIFICATE, a PEM file that also has the key, clients must use https.
- An address that sends many refused requests gets a lane. The gateways see only a few requests of a lane at one time;
  the others wait in HAProxy. Requests with a key that got a reply lately are not affected, from any address. If the key
  itself is refused, the key gets a lane, too. There are LANES of each kind, so two addresses or keys rarely share a
  lane. A lane leads back to the same frontend through a local socket, so Ray still chooses the gateways.

A key is the digest of the first authorization header, which is the header that the gateway reads. It is never captured,
because HAProxy's log would show it.

The script uses only the standard library and is fast: HAProxy waits for it on each reload.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

REFUSED = 50  # 4xx, or as many 5xx, in 10 s for one address or one key; further requests take the lane
AT_ONCE = 32  # requests of a lane that the gateways see at one time: a few long replies must not close it
DELAY_MS = 800  # per request, so that a lane passes 40 requests a second
MAX_WAITING = 400  # maximum waiting requests of a lane's address or key: ten seconds' worth
LANES = 64
LARGE_BYTES = 8192  # bodies from this size take a separate lane: they fill HAProxy's buffer, which ends the delay
LARGE_PER_S = "2m"  # bytes of such bodies from one address
LARGE_AT_ONCE = 4

_LANES, _LARGE_LANES = (
    "\n".join(f"    server self{n} SOCKET maxconn {most} send-proxy-v2" for n in range(LANES))
    for most in (AT_ONCE, LARGE_AT_ONCE)
)
_BUSY = (
    '{"error":{"message":"Many requests of this address or API key were refused lately, and many wait. '
    'Try again in 5 s.","type":"overloaded_error","param":null,"code":"overloaded"}}'
)

TABLES = f"""\
# Addresses, with their refused requests, and keys that got a reply lately, as digests.
backend refused_addresses
    stick-table type ipv6 size 200k expire 60s store http_err_rate(10s),http_fail_rate(10s),conn_cur
backend good_keys
    stick-table type binary len 20 size 200k expire 10m store http_err_rate(10s),http_fail_rate(10s),conn_cur
backend upload_rates
    stick-table type ipv6 size 200k expire 60s store bytes_in_rate(1s)
backend lanes_of_addresses
    timeout queue 60s
    balance source
{_LANES}
backend lanes_of_large_bodies
    timeout queue 60s
    balance source
    filter bwlim-in uploads limit {LARGE_PER_S} key src table upload_rates
    http-request set-bandwidth-limit uploads
{_LARGE_LANES}
backend lanes_of_keys
    timeout queue 60s
    balance hash var(txn.key)
{_LANES}
"""

FRONTEND = f"""\
    bind SOCKET accept-proxy mode 600 id 99
    # The lanes come in here again. Nothing else waits for the delay.
    tcp-request inspect-delay {DELAY_MS}ms
    tcp-request content accept if !{{ so_id 99 }}
    tcp-request content accept if WAIT_END
    http-request set-var(txn.key) req.fhdr(authorization,1),sha1 if !{{ so_id 99 }}
    # Other paths answer 200 to any key.
    http-request set-var(txn.is_chat) bool(true) if !{{ so_id 99 }} {{ path_end PATHS }}
    acl is_good_key var(txn.key),in_table(good_keys)
    http-request track-sc0 src table refused_addresses if !{{ so_id 99 }}
    http-request track-sc1 var(txn.key) table good_keys if is_good_key !{{ so_id 99 }}
    http-response track-sc1 var(txn.key) table good_keys if {{ status 200 }} {{ var(txn.is_chat) -m bool }}
    acl is_refused_often sc_http_err_rate(0) gt {REFUSED}
    acl is_refused_often sc_http_fail_rate(0) gt {REFUSED}
    acl is_key_refused_often sc_http_err_rate(1) gt {REFUSED}
    acl is_key_refused_often sc_http_fail_rate(1) gt {REFUSED}
    acl is_large req.hdr_val(content-length) ge {LARGE_BYTES}
    acl is_large req.hdr(transfer-encoding) -m found
    acl many_of_address sc_conn_cur(0) gt {MAX_WAITING}
    acl many_of_key sc_conn_cur(1) gt {MAX_WAITING}
    http-request set-var(txn.is_busy) bool(true) if !{{ so_id 99 }} is_refused_often !is_good_key many_of_address
    http-request set-var(txn.is_busy) bool(true) if !{{ so_id 99 }} is_key_refused_often many_of_key
    http-request return status 503 content-type application/json hdr retry-after 5 string '{_BUSY}' \
if {{ var(txn.is_busy) -m bool }}
"""

ROUTE = """\
    use_backend lanes_of_large_bodies if !{ so_id 99 } is_refused_often !is_good_key is_large
    use_backend lanes_of_large_bodies if !{ so_id 99 } is_key_refused_often is_large
    use_backend lanes_of_addresses if !{ so_id 99 } is_refused_often !is_good_key
    use_backend lanes_of_keys if !{ so_id 99 } is_key_refused_often
"""


def amended(text: str, host: str, socket: Path, paths: str, certificate: str = "") -> str:
    """Returns Ray's configuration with the amendments. `paths` of doors are separated by spaces."""
    text = re.sub(r"^listen stats\b.*", "", text, flags=re.DOTALL | re.MULTILINE)
    exporter, frontend, rest = text.partition("frontend http_frontend\n")
    exporter = re.sub(r"(?m)^(frontend prometheus\n    bind ):", rf"\g<1>{host}:", exporter)
    if not frontend:
        return exporter
    tables, rules = (part.replace("SOCKET", f"unix@{socket}").replace("PATHS", paths) for part in (TABLES, FRONTEND))
    bind, line, others = rest.partition("\n")
    if certificate:
        bind += f" ssl crt {certificate} alpn http/1.1"
        rules += "    http-request set-header x-forwarded-proto https\n"  # the console then marks its cookies as secure
    before, first, backends = others.partition("    use_backend ")  # HAProxy warns of rules after it
    return "".join([exporter, tables, frontend, bind, line, rules, before, ROUTE if first else "", first, backends])


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(amended(file.read_text(), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:]))
