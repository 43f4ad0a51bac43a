"""A fresh gateway for each test."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.accounting.ledger import Ledger
from serve_app.admin import endpoint
from serve_app.gateway import limiter_client, reruns, settlements
from serve_app.limiter import limiter_service as limiter
from tests.gateway.world import OPERATOR, World


@pytest.fixture(scope="session")
def empty_ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "ledger.db"
    Ledger(f"sqlite:///{path}").close()
    return path


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses between two tries, and a feed that waits for a slow disk."""
    monkeypatch.setattr(limiter_client, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(limiter_client, "RETRY_S", 0.01)
    monkeypatch.setattr(endpoint, "RETRY_S", 0.01)
    monkeypatch.setattr(settlements, "RETRY_S", 0.01)
    monkeypatch.setattr(reruns, "PAUSES_S", [0.0, 0.01])
    monkeypatch.setattr(settlements, "REPLAY_S", 0.02)
    monkeypatch.setattr(limiter, "POLL_S", 0.02)
    monkeypatch.setattr(limiter, "FEED_TIMEOUT_S", 30.0)
    monkeypatch.setattr(limiter, "EXPIRE_S", 0.02)


@pytest.fixture
async def make_world(tmp_path: Path, empty_ledger: Path) -> AsyncIterator[Callable[..., Any]]:
    made: list[World] = []

    async def make(**settings: Any) -> World:
        path = tmp_path / "ledger.db"
        if "beside" not in settings:
            shutil.copy(empty_ledger, path)
        world = World(tmp_path, path, **settings)
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
