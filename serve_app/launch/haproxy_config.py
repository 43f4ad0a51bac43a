"""Amends the configuration that Ray writes for HAProxy: `haproxy_config.py FILE HOST SOCKET`, before HAProxy reads it.

Ray's template has no settings for these:

- Its exporter binds to all addresses; it gets HOST. Its page of statistics goes.
- An address that sends many requests that are refused gets a lane: a few of its requests are at the gateway at one
  time, the others wait in HAProxy. Requests with a key that was good lately are not touched, from whatever address,
  unless it is the key that is refused; and no request is refused here. A lane leads back to the same frontend through
  a local socket, so that Ray goes on to choose the gateways.

Standard library alone, and quick: HAProxy waits for it each time it is reloaded.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

REFUSED = 50  # 4xx in 10 s, to one address or to one key; from then on its requests take the lane
AT_ONCE = 4  # requests of a lane that the gateways see at one time
DELAY_MS = 50  # of each, so that a lane passes 80 requests a second
LARGE_BYTES = 65536  # a body from here on takes a lane of its own: small requests don't wait for it
LARGE_PER_S = "8m"  # bytes of such bodies from one address

TABLES = f"""\
# Addresses, with their refused requests, and keys that were good lately, as digests.
backend refused_addresses
    stick-table type ipv6 size 200k expire 60s store http_err_rate(10s)
backend good_keys
    stick-table type binary len 20 size 200k expire 10m store http_err_rate(10s)
backend upload_rates
    stick-table type ipv6 size 200k expire 60s store bytes_in_rate(1s)
backend lane
    timeout queue 60s
    server self SOCKET maxconn {AT_ONCE} send-proxy-v2
backend lane_of_large_bodies
    timeout queue 60s
    filter bwlim-in uploads limit {LARGE_PER_S} key src table upload_rates
    http-request set-bandwidth-limit uploads
    server self SOCKET maxconn {AT_ONCE} send-proxy-v2
"""

FRONTEND = f"""\
    bind SOCKET accept-proxy mode 600 id 99
    # The lanes come in here again. Nothing else waits for the delay.
    tcp-request inspect-delay {DELAY_MS}ms
    tcp-request content accept if !{{ so_id 99 }}
    tcp-request content accept if WAIT_END
    http-request track-sc0 src table refused_addresses if !{{ so_id 99 }}
    acl is_good_key req.hdr(authorization),sha1,in_table(good_keys)
    http-request track-sc1 req.hdr(authorization),sha1 table good_keys if is_good_key !{{ so_id 99 }}
    http-request capture req.hdr(authorization) len 200
    acl has_key capture.req.hdr(0) -m found
    http-response track-sc1 capture.req.hdr(0),sha1 table good_keys if {{ status 200 }} has_key
    acl is_refused_often sc_http_err_rate(0) gt {REFUSED}
    acl is_key_refused_often sc_http_err_rate(1) gt {REFUSED}
    acl is_large req.hdr_val(content-length) ge {LARGE_BYTES}
    acl is_large req.hdr(transfer-encoding) -m found
"""

ROUTE = """\
    use_backend lane_of_large_bodies if !{ so_id 99 } is_refused_often !is_good_key is_large
    use_backend lane if !{ so_id 99 } is_refused_often !is_good_key
    use_backend lane if !{ so_id 99 } is_key_refused_often
"""


def amended(text: str, host: str, socket: Path) -> str:
    """The configuration, which Ray has written."""
    text = re.sub(r"^listen stats\b.*", "", text, flags=re.DOTALL | re.MULTILINE)
    exporter, frontend, rest = text.partition("frontend http_frontend\n")
    exporter = re.sub(r"(?m)^(frontend prometheus\n    bind ):", rf"\g<1>{host}:", exporter)
    if not frontend:
        return exporter
    tables, rules = (part.replace("SOCKET", f"unix@{socket}") for part in (TABLES, FRONTEND))
    bind, line, others = rest.partition("\n")
    before, first, backends = others.partition("    use_backend ")  # HAProxy warns of rules behind it
    return "".join([exporter, tables, frontend, bind, line, rules, before, ROUTE if first else "", first, backends])


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(amended(file.read_text(), sys.argv[2], Path(sys.argv[3])))
