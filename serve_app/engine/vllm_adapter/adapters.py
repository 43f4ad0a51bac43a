"""Loads and unloads LoRA adapters while requests run.

vLLM reads an adapter's files when a step needs them. If that fails, vLLM's process ends, and so do all requests. An
adapter is therefore loaded before requests may use it, and stays loaded until the last of these requests has ended.
vLLM keeps all loaded adapters in the machine's memory, and the most recently used ones on the GPU.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from serve_app.engine.errors import ModelError, UnknownAdapter, first_line
from serve_app.engine.loading import hub

logger = logging.getLogger(__name__)

WEIGHTS = "adapter_model.safetensors"
_CHUNK = 2**20  # bytes


class AdapterLoading(UnknownAdapter):
    """The adapter is being loaded. Wait with `until_settled`, then try again."""


@dataclass(eq=False, slots=True)
class Adapter:
    """One adapter; compared by identity. A name whose path changes gets a new Adapter."""

    name: str
    path: str  # folder, or name on the hub
    number: int  # vLLM's id; never reused
    handle: Any = None  # the engine's own object, once it is loaded
    fingerprint: str = ""
    error: str = ""  # why it could not be loaded
    users: int = 0  # number of sequences (choices) that need it
    is_wanted: bool = True
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # set once it is loaded or has failed to load


class AdapterStore(Protocol):
    """Loads adapters into an engine."""

    def load(self, adapter: Adapter, folder: Path) -> Awaitable[Any]:
        """Loads an adapter and returns its handle. Raises any exception if it can't be loaded."""

    def unload(self, adapter: Adapter) -> Awaitable[Any]:
        """Unloads an adapter; no effect if it is not loaded."""


class Adapters:
    """The adapters of one engine. Call its methods, except `fingerprint`, only from the engine's event loop.

    `capacity` is the maximum number of loaded adapters. If more were loaded, the store could drop one that is in use.
    """

    def __init__(self, store: AdapterStore, capacity: int, read: Callable[[str], tuple[Path, str]]) -> None:
        self._store = store
        self._capacity = capacity
        self._read = read
        self._by_name: dict[str, Adapter] = {}
        self._loaded: set[Adapter] = set()  # including those that are being loaded or unloaded
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()  # adapters are loaded one at a time, in the order of the settings
        self._changed = asyncio.Event()  # set when there may be room, or an adapter is no longer wanted
        self._tasks: set[asyncio.Task[None]] = set()

    def change(self, wanted: Mapping[str, str]) -> None:
        """Sets the adapters: name → folder, or name on the hub. New adapters are loaded in the background.

        New requests can't use a removed adapter. It is unloaded when the requests that use it have ended. If an adapter
        could not be loaded, this tries again.
        """
        for name, adapter in list(self._by_name.items()):
            if wanted.get(name) != adapter.path or adapter.error:
                del self._by_name[name]
                adapter.is_wanted = False
                self._unload_unused(adapter)
        self._changed.set()
        for name, path in wanted.items():
            if name not in self._by_name:
                adapter = self._by_name[name] = Adapter(name, path, next(self._numbers))
                self._run(self._load(adapter))

    async def until_settled(self, name: str) -> None:
        """Waits while an adapter is being loaded."""
        while (adapter := self._by_name.get(name)) is not None and not adapter.settled.is_set():
            await adapter.settled.wait()

    def take(self, name: str) -> Adapter:
        """The adapter for a new request, which must `release` it. Raises UnknownAdapter, or AdapterLoading."""
        adapter = self._find(name)
        adapter.users += 1
        return adapter

    def take_again(self, adapter: Adapter) -> Adapter:
        """The adapter for another choice of a request that has taken it."""
        adapter.users += 1
        return adapter

    def release(self, adapter: Adapter) -> None:
        """Records that a sequence has ended. Call it only when the sequence has ended in vLLM too."""
        adapter.users -= 1
        self._unload_unused(adapter)

    def fingerprint(self, name: str) -> str:
        """Identifies everything that affects the adapter's replies. Raises UnknownAdapter, or AdapterLoading."""
        return self._find(name).fingerprint

    def _find(self, name: str) -> Adapter:
        adapter = self._by_name.get(name)
        if adapter is None:
            raise UnknownAdapter(f"there is no adapter {name!r}")
        if not adapter.settled.is_set():
            raise AdapterLoading(f"the adapter {name!r} is being loaded")
        if adapter.handle is None:
            raise UnknownAdapter(f"the adapter {name!r} is not loaded: {adapter.error}")
        return adapter

    async def _load(self, adapter: Adapter) -> None:
        try:
            async with self._turn:
                await self._load_now(adapter)
        except Exception as error:
            adapter.error = first_line(error)
            logger.error("The adapter %s (%s) can't be used: %s.", adapter.name, adapter.path, adapter.error)
        finally:
            adapter.settled.set()

    async def _load_now(self, adapter: Adapter) -> None:
        # Reads all files, so that they are in the system's cache and the engine does not wait for a slow disk.
        folder, fingerprint = await asyncio.to_thread(self._read, adapter.path)
        await self._until_there_is_room(adapter)
        if not adapter.is_wanted:
            return
        self._loaded.add(adapter)
        try:
            handle = await self._store.load(adapter, folder)
        except Exception:
            await self._unload(adapter)  # parts of it may be loaded
            raise
        adapter.handle, adapter.fingerprint = handle, fingerprint
        logger.info("The adapter %s (%s) is loaded.", adapter.name, adapter.path)
        self._unload_unused(adapter)

    async def _until_there_is_room(self, adapter: Adapter) -> None:
        while adapter.is_wanted and len(self._loaded) >= self._capacity:
            if all(other.is_wanted for other in self._loaded):
                raise ModelError(
                    f"{self._capacity} adapters are loaded already: raise vllm.max_cpu_loras (default: vllm.max_loras)"
                )
            self._changed.clear()
            await self._changed.wait()

    def _unload_unused(self, adapter: Adapter) -> None:
        if not adapter.is_wanted and not adapter.users and adapter.handle is not None:
            adapter.handle = None
            self._run(self._unload(adapter))

    async def _unload(self, adapter: Adapter) -> None:
        try:
            await self._store.unload(adapter)
        except Exception as error:  # the adapter still counts towards the capacity
            logger.error("The adapter %s could not be unloaded: %s.", adapter.name, first_line(error))
            return
        self._loaded.discard(adapter)
        self._changed.set()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def read_adapter(path: str, base: str, progress: Callable[[str], None]) -> tuple[Path, str]:
    """The folder of an adapter, which is fetched if it is on the hub, and the fingerprint of the adapter's replies.

    `base` is the fingerprint of the model. Raises ModelError for a folder without an adapter.
    """
    folder = Path(path).expanduser()
    if not folder.exists() and not path.startswith((".", "~", "/")):
        folder = hub.fetch(path, progress)
    try:
        config = (folder / "adapter_config.json").read_bytes()
        if not isinstance(json.loads(config)["r"], int):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(
            f"{folder} is not a LoRA adapter: it has no adapter_config.json with the rank `r`; check the path"
        ) from None
    digest = hashlib.sha256(base.encode() + config)
    try:
        with (folder / WEIGHTS).open("rb") as weights:
            while chunk := weights.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise ModelError(f"{folder / WEIGHTS} can't be read: {error.strerror}") from None
    return folder.absolute(), digest.hexdigest()[:12]
