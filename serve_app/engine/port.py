"""The interface through which a replica uses any engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from serve_app.contracts.generation import Event
from serve_app.engine.chat import ChatRenderer
from serve_app.engine.request import GenerationRequest


class Promise(StrEnum):
    """A guarantee that an engine may be unable to give; docs/models.md lists the consequences for users."""

    SAME_IN_ANY_BATCH = "a greedy or seeded reply has the same tokens alone and in a batch"
    STEPS_FAIL_ALONE = "a step that fails, or lacks memory, ends only the requests that were in it"
    CONTINUES = "a reply continues given tokens exactly as if it had made them, at any temperature and with penalties"
    EXACT_MINIMUM = "no reply with a grammar is shorter than its minimum number of tokens"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state of the engine at one moment. Counters start when the engine starts."""

    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    oldest_wait_s: float  # age of the oldest request that waits for its first turn; 0 if none waits
    queued_prefill_tokens: int
    steps: int
    tokens_produced: int
    preemptions: int
    kv_blocks_cached: int  # free, but with reusable content
    prefix_hit_tokens: int  # prompt tokens found in the cache
    drafted: int = 0  # tokens that were guessed and verified
    accepted: int = 0  # drafted tokens that were right
    prompt_tokens: int = 0  # prompt tokens of started requests, including cached ones
    step_seconds: float = 0.0  # total duration of all steps
    step_sequences: int = 0  # number of sequences in a step, summed over all steps


class Sample(NamedTuple):
    """A value of a metric that only one kind of engine has. A counter starts at 0 when the engine starts."""

    kind: Literal["counter", "gauge"]
    name: str
    description: str
    labels: Mapping[str, str]
    value: float


class EnginePort(Protocol):
    """An engine that has started: it has its weights and accepts requests. Safe to use from any thread."""

    @property
    def chat(self) -> ChatRenderer:
        """Renders messages with the model's template."""

    @property
    def max_context(self) -> int:
        """Maximum number of tokens of prompt and reply together."""

    @property
    def max_running(self) -> int:
        """Maximum number of requests that run together."""

    @property
    def lacks(self) -> frozenset[Promise]:
        """The guarantees that this engine cannot give."""

    @property
    def fingerprint(self) -> str:
        """Identifies everything that affects replies; empty if unknown."""

    def fingerprint_of(self, adapter: str) -> str:
        """Identifies everything that affects an adapter's replies. Raises UnknownAdapter."""

    def set_adapters(self, adapters: Mapping[str, str]) -> None:
        """Set the adapters that requests may name: name → folder, or name on the hub.

        New adapters are loaded in the background; requests for them wait. If an adapter can't be loaded, the log has
        the reason, and requests for it raise UnknownAdapter. A removed adapter is unloaded when all requests that use
        it have ended.
        """

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Queue a request and yield its events; `Finished` is the last. Closing the generator aborts the request.

        If the request has `said` tokens, `Started` carries their number and text. The following events are the same as
        if the engine had generated those tokens itself.

        Raises, instead of the first event or after `Started`:
            ValueError: the prompt is empty, a live request has the same id, a parameter is out of its range, or the
                `said` tokens already end the reply.
            UnsupportedGrammar: a subclass of ValueError: the engine cannot enforce the grammar.
            RequestRefused: a subclass of ValueError: the engine does not support the parameters.
            ContextLengthExceeded: the prompt leaves no room for a token of output.
            QueueFull: too many requests are waiting.
            UnknownAdapter: the engine has no such adapter.
            EngineClosed: the engine was closed.
        """

    def stats(self) -> EngineStats:
        """The current load."""

    def samples(self) -> Iterable[Sample]:
        """The engine's own metrics, besides `stats`."""

    def check_health(self) -> None:
        """Raises EngineFailed if the engine accepts no more requests, so that its replica must be replaced."""

    def close(self) -> None:
        """Abort all requests; returns when nothing runs any more. May be called twice."""
