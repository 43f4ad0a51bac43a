"""A fresh gateway for each test."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.accounting import accounting_service
from serve_app.admin import endpoint
from serve_app.gateway import authentication, lifecycle, limiter_client, reruns, settlements, web
from serve_app.limiter import limiter_service as limiter
from serve_app.storage import spool, spool_file
from tests.gateway.world import OPERATOR, PATIENT_S, World


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses between two tries; timeouts that a slow machine does not reach; no wait for the disk at a start."""
    monkeypatch.setattr(limiter_client, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(limiter_client, "RETRY_S", 0.01)
    monkeypatch.setattr(endpoint, "RETRY_S", 0.01)
    monkeypatch.setattr(settlements, "RETRY_S", 0.01)
    monkeypatch.setattr(reruns, "PAUSES_S", [0.0, 0.01])
    monkeypatch.setattr(settlements, "REPLAY_S", 0.02)
    monkeypatch.setattr(limiter, "POLL_S", 0.02)
    monkeypatch.setattr(limiter, "EXPIRE_S", 0.02)
    monkeypatch.setattr(limiter, "FEED_TIMEOUT_S", PATIENT_S)
    monkeypatch.setattr(limiter, "CALL_TIMEOUT_S", PATIENT_S)
    monkeypatch.setattr(limiter_client, "LOOK_UP_TIMEOUT_S", PATIENT_S)
    monkeypatch.setattr(limiter_client, "GRANT_TRUST_S", PATIENT_S)
    monkeypatch.setattr(authentication, "CONFIRMED_S", PATIENT_S)
    monkeypatch.setattr(lifecycle, "TIMEOUT_S", PATIENT_S)
    monkeypatch.setattr(lifecycle, "FIRST_READ_S", PATIENT_S)
    monkeypatch.setattr(settlements, "FIND_TIMEOUT_S", PATIENT_S)
    monkeypatch.setattr(accounting_service, "LANE_WAIT_S", PATIENT_S)
    monkeypatch.setattr(web, "GRACE_S", PATIENT_S)
    monkeypatch.setattr(web, "LATE_S", PATIENT_S)
    monkeypatch.setattr(spool, "flush_folder", lambda _: None)
    monkeypatch.setattr(spool_file, "flush_folder", lambda _: None)


@pytest.fixture
def let_pass(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advances the monotonic clock, by which event loops and the gateway measure.

    Only in this thread: a loop in another one, whose timers were set by the advanced clock, would sleep for that long.
    """
    passed, now, mine = 0.0, time.monotonic, threading.get_ident()

    def advance(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now() + (passed if threading.get_ident() == mine else 0.0))
    return advance


@pytest.fixture
async def make_world(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    made: list[World] = []

    async def make(**settings: Any) -> World:
        world = World(tmp_path, tmp_path / "ledger.db", **settings)
        made.append(world)
        await world.start()
        return world

    yield make
    for world in reversed(made):
        await world.stop()


@pytest.fixture
async def world(make_world: Callable[..., Any]) -> World:
    made: World = await make_world()
    return made


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    """Plain HTTP without a socket; what needs real connections uses `tests.gateway.connections`."""
    transport = httpx.ASGITransport(world.app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


@pytest.fixture
async def admin(http: httpx.AsyncClient) -> httpx.AsyncClient:
    """With the operator's key."""
    http.headers["authorization"] = f"Bearer {OPERATOR}"
    return http
