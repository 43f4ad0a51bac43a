"""Adapters are loaded before requests may use them, and stay until the last request that uses them has ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.engine.errors import ModelError, UnknownAdapter
from serve_app.engine.vllm_adapter.adapters import WEIGHTS, Adapter, AdapterLoading, Adapters, read_adapter

CAPACITY = 2


class Store:
    """Keeps at most CAPACITY adapters, as vLLM does, and fails where vLLM would drop one. `gate` holds loads back."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}
        self.log: list[str] = []
        self.broken: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()

    async def load(self, adapter: Adapter, folder: Path) -> str:
        await self.gate.wait()
        self.held[adapter.number] = adapter.name
        assert len(self.held) <= CAPACITY, self.held
        if str(folder) in self.broken:
            raise ValueError("the shapes do not fit\nand more")
        self.log.append(f"+{adapter.name} {folder}")
        return f"handle of {folder}"

    async def unload(self, adapter: Adapter) -> None:
        if self.held.pop(adapter.number, None) is not None:
            self.log.append(f"-{adapter.name}")


def read(path: str) -> tuple[Path, str]:
    if path == "missing":
        raise ModelError("there is no folder missing")
    return Path(path), f"fp of {path}"


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def adapters(store: Store) -> Adapters:
    return Adapters(store, CAPACITY, read)


async def settled(adapters: Adapters, *names: str) -> None:
    async with asyncio.timeout(60):
        for name in names:
            await adapters.until_settled(name)


def assert_loading(adapters: Adapters, name: str) -> None:
    with pytest.raises(AdapterLoading):
        adapters.take(name)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def test_requests_get_the_adapter_of_the_settings(adapters: Adapters, store: Store) -> None:
    adapters.change({"law": "a", "tax": "b"})
    assert_loading(adapters, "law")
    await settled(adapters, "law", "tax")
    assert [adapters.take(name).handle for name in ("law", "tax")] == ["handle of a", "handle of b"]
    assert adapters.fingerprint("tax") == "fp of b"
    with pytest.raises(UnknownAdapter, match=r"^there is no adapter 'art'$"):
        adapters.take("art")
    adapters.change({"law": "a", "tax": "b"})
    assert store.log == ["+law a", "+tax b"], "what stays is not loaded again"


async def test_a_removed_adapter_goes_when_its_last_request_has_ended(adapters: Adapters, store: Store) -> None:
    adapters.change({"law": "a"})
    await settled(adapters, "law")
    one, other = adapters.take("law"), adapters.take("law")
    adapters.change({})
    with pytest.raises(UnknownAdapter):
        adapters.take("law")
    adapters.release(one)
    third = adapters.take_again(other)
    adapters.release(other)
    await asyncio.sleep(0)
    assert list(store.held.values()) == ["law"]
    adapters.release(third)
    await until(lambda: not store.held)
    assert store.log == ["+law a", "-law"]


async def test_a_name_with_another_folder_is_another_adapter(adapters: Adapters, store: Store) -> None:
    adapters.change({"law": "a"})
    await settled(adapters, "law")
    old = adapters.take("law")
    adapters.change({"law": "b"})
    assert_loading(adapters, "law")
    await settled(adapters, "law")
    new = adapters.take("law")
    assert (old.handle, new.handle) == ("handle of a", "handle of b")
    assert old.number != new.number, "vLLM would find the old one's cached prompts"


async def test_no_more_are_loaded_than_vllm_keeps(adapters: Adapters, store: Store) -> None:
    adapters.change({"law": "a", "tax": "b", "art": "c"})
    await settled(adapters, "law", "tax", "art")
    with pytest.raises(UnknownAdapter, match=r"'art' is not loaded: 2 adapters are loaded already: raise vllm\.max_"):
        adapters.take("art")
    adapters.change({"tax": "b", "art": "c"})  # tried again
    await settled(adapters, "art")
    assert adapters.take("art").handle == "handle of c"


async def test_an_adapter_waits_for_the_place_of_one_that_requests_still_use(adapters: Adapters, store: Store) -> None:
    adapters.change({"law": "a", "tax": "b"})
    await settled(adapters, "law", "tax")
    used = adapters.take("law")
    adapters.change({"tax": "b", "art": "c"})
    for _ in range(20):
        await asyncio.sleep(0)
    assert_loading(adapters, "art")
    adapters.release(used)
    await settled(adapters, "art")
    assert store.log[2:] == ["-law", "+art c"]


async def test_an_adapter_that_is_removed_while_it_waits_or_loads_is_not_kept(adapters: Adapters, store: Store) -> None:
    store.gate.clear()
    adapters.change({"law": "a", "tax": "b"})
    await asyncio.sleep(0)
    adapters.change({})
    store.gate.set()
    await until(lambda: not adapters._tasks)
    assert store.held == {}


@pytest.mark.parametrize(
    ("path", "reason"), [("missing", "there is no folder missing"), ("odd", "the shapes do not fit")]
)
async def test_a_broken_adapter_fails_its_own_requests_alone(
    adapters: Adapters, store: Store, path: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.broken.add("odd")
    adapters.change({"bad": path, "law": "a"})
    await settled(adapters, "bad", "law")
    with pytest.raises(UnknownAdapter, match=f"^the adapter 'bad' is not loaded: {reason}$"):
        adapters.take("bad")
    assert f"The adapter bad ({path}) can't be used: {reason}." in caplog.messages
    assert adapters.take("law").handle == "handle of a"
    assert list(store.held.values()) == ["law"], "parts of it are not kept"


def write(folder: Path, config: Any = None, weights: bytes | None = b"weights") -> Path:
    folder.mkdir()
    if config is not None:
        (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights is not None:
        (folder / WEIGHTS).write_bytes(weights)
    return folder


def test_an_adapters_fingerprint_follows_its_files_and_the_models(tmp_path: Path) -> None:
    folder = write(tmp_path / "law", {"r": 8})

    def fingerprint(base: str = "0123456789ab") -> str:
        found, fingerprint = read_adapter(str(folder), base, print)
        assert found == folder
        return fingerprint

    first = fingerprint()
    assert (len(first), fingerprint()) == (12, first)
    assert fingerprint("another model") != first
    (folder / WEIGHTS).write_bytes(b"others")
    assert fingerprint() != first


@pytest.mark.parametrize(
    ("config", "weights", "problem"),
    [
        (None, b"", "is not a LoRA adapter"),
        ("not JSON", b"", "is not a LoRA adapter"),
        ([], b"", "is not a LoRA adapter"),
        ({"r": "8"}, b"", "is not a LoRA adapter"),
        ({"r": 8}, None, f"{WEIGHTS} can't be read: No such file"),
    ],
)
def test_a_folder_without_an_adapter_is_refused(
    tmp_path: Path, config: Any, weights: bytes | None, problem: str
) -> None:
    folder = write(tmp_path / "law", config, weights)
    with pytest.raises(ModelError, match=problem):
        read_adapter(str(folder), "", print)
