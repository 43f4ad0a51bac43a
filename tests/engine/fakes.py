"""Stand-ins that need no weights: models whose next token is a fixed function of what they see, and a tokenizer."""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from serve_app.contracts.generation import Event, Finished, FinishReason, SamplingParams, Started
from serve_app.engine.config import EngineSettings
from serve_app.engine.core import EngineCore, Runner
from serve_app.engine.delivery import LoopSink, Outbox
from serve_app.engine.engine import Engine
from serve_app.engine.output_stream import OutputStream
from serve_app.engine.request import GenerationRequest
from serve_app.engine.scheduling.scheduler import Scheduler
from serve_app.engine.scheduling.sequence import Chunk, StepPlan, TokenSequence
from serve_app.engine.text.detokenizer import Vocabulary, bytes_of_unicode

EOS = 256
VOCAB = 257
POISON = 255  # a token that turns MemoryRunner's K and V into NaN


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: token b is byte b, token 256 ends a sequence."""
    vocabulary = bytes_of_unicode()
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


class FakeRunner:
    """Generates `script` byte by byte after any prompt, then ends. Checks that every chunk follows the last one.

    `gate`, where set, holds each step until it is released; `failures` maps a step's number to what it raises. `cost`,
    where set, says how many seconds a step takes; `now` is their sum.
    """

    def __init__(self, script: bytes = b"hello world", num_blocks: int = 64, max_context: int = 1024) -> None:
        self.script = script
        self.num_blocks = num_blocks
        self.class_bounds = (max_context,)
        self.vocab_size = VOCAB
        self.gate: threading.Semaphore | None = None
        self.entered = threading.Semaphore(0)
        self.failures: dict[int, BaseException] = {}
        self.keep_steps = True
        self.steps: list[tuple[Chunk, ...]] = []
        self.cleared: list[tuple[int, ...]] = []
        self.cost: Callable[[Sequence[Chunk]], float] | None = None
        self.now = 0.0

    def execute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        if self.keep_steps:
            self.steps.append(tuple(chunks))
            self.entered.release()
        if self.gate is not None:
            self.gate.acquire()
        if (failure := self.failures.pop(len(self.steps), None)) is not None:
            raise failure
        if self.cost is not None:
            self.now += self.cost(chunks)
        said = []
        for chunk in chunks:
            assert chunk.start == chunk.sequence.num_computed
            for row in range(chunk.num_logits):
                at = chunk.sequence.num_output + row
                said.append(self.script[at] if at < len(self.script) else EOS)
        logits = torch.zeros(len(said), VOCAB)
        logits[torch.arange(len(said)), said] = 50.0
        return logits

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        self.cleared.append(tuple(blocks))


def next_token_logits(context: Sequence[int | float]) -> torch.Tensor:
    """The next token of MemoryRunner's model: a letter or the end. It depends on every token of the context."""
    row = torch.full((VOCAB,), -30.0)
    seed = zlib.crc32(repr(list(context)).encode())
    for rank, token in enumerate((97 + seed % 3, 97 + seed // 3 % 3, 100, EOS)):
        row[token] = max(row[token].item(), (4.0, 3.0, 2.5, 1.0 + 5.0 * (seed % 29 == 0))[rank])
    return row


class MemoryRunner:
    """A model that reads only its KV cache, as a real one does.

    What it says is a hash of all the tokens found there, so a slot that is wrong changes the text. NaN anywhere in the
    blocks that it reads makes its logits NaN, also where it is masked; a `POISON` token writes NaN.
    """

    def __init__(self, num_blocks: int, block_size: int, class_bounds: tuple[int, ...]) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.class_bounds = class_bounds
        self.vocab_size = VOCAB
        self.slots: list[int | float] = [0] * (num_blocks * block_size)

    def execute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        for chunk in chunks:
            assert chunk.start == chunk.sequence.num_computed
            for at, token in enumerate(chunk.token_ids, chunk.start):
                # A hidden state computed from NaN is NaN.
                spoilt = token == POISON or torch.nan in self._seen(chunk.sequence, at)
                self.slots[self._slot(chunk.sequence, at)] = (
                    torch.nan if spoilt else token * 8 + chunk.sequence.length_class
                )
        rows = []
        for chunk in chunks:
            for at in range(chunk.start + chunk.length - chunk.num_logits, chunk.start + chunk.length):
                seen = self._seen(chunk.sequence, at + 1)
                padding = -(at + 1) % self.block_size
                masked = [self.slots[self._slot(chunk.sequence, at + 1 + i)] for i in range(padding)]
                if torch.nan in seen or torch.nan in masked:
                    rows.append(torch.full((VOCAB,), torch.nan))
                else:
                    rows.append(next_token_logits(seen))
        return torch.stack(rows) if rows else torch.zeros(0, VOCAB)

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.slots[block * self.block_size : (block + 1) * self.block_size] = [0] * self.block_size

    def _slot(self, sequence: TokenSequence, position: int) -> int:
        return sequence.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _seen(self, sequence: TokenSequence, length: int) -> list[int | float]:
        return [self.slots[self._slot(sequence, position)] for position in range(length)]


def fake_settings(**settings: object) -> EngineSettings:
    return EngineSettings(model="fake", **{"block_size": 4, **settings})  # type: ignore[arg-type]


def fake_engine(runner: Runner, clock: Callable[[], float] = time.monotonic, **settings: object) -> Engine:
    return Engine(runner, Vocabulary(byte_tokenizer()), frozenset({EOS}), fake_settings(**settings), clock=clock)


class SteppedEngine:
    """An engine's core without its thread: the test runs the steps and sets the clock."""

    vocabulary: Vocabulary | None = None

    def __init__(self, runner: Runner, stream: type[OutputStream] = OutputStream, **settings: object) -> None:
        if SteppedEngine.vocabulary is None:
            SteppedEngine.vocabulary = Vocabulary(byte_tokenizer())
        self.runner = runner
        self.settings = fake_settings(**settings)
        self.outbox = Outbox(lambda request_id: None)
        self.core = EngineCore(runner, self.settings, self.outbox)
        self.now = 0.0
        self.steps = 0
        self._stream = stream
        self._arrivals = itertools.count()

    def submit(self, request: GenerationRequest) -> Inbox:
        room = min(self.runner.class_bounds[-1], self.runner.num_blocks * self.settings.block_size)
        output = min(request.sampling.max_tokens, room - len(request.prompt_token_ids))
        sequence = TokenSequence(request, next(self._arrivals), self.now, output)
        inbox = Inbox(lambda: self.steps)
        assert self.vocabulary is not None
        rows = self.settings.speculation_rows
        self.core.add(self._stream(sequence, self.vocabulary, VOCAB, frozenset({EOS}), sink_of(inbox), rows))
        return inbox

    def step(self) -> StepPlan:
        plan = self.core.plan(self.now)
        self.outbox.deliver()
        if plan.chunks:
            began = getattr(self.runner, "now", 0.0)
            sampled = self.core.compute(plan, [self.core.streams[chunk.sequence] for chunk in plan.chunks])
            seconds = getattr(self.runner, "now", 0.0) - began
            self.now += seconds
            self.steps += 1
            self.core.commit(plan, sampled, seconds)
        self.outbox.deliver()
        return plan

    def abort(self, request_id: str) -> None:
        if request_id in self.core.by_id:
            self.core.finish(self.core.by_id[request_id], FinishReason.ABORT)
        self.outbox.deliver()

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.core.streams:
                return
            self.step()
        raise AssertionError(f"not finished after {limit} steps")


def request(
    name: str = "r",
    prompt: Sequence[int] = (1, 2, 3),
    tenant: str = "",
    weight: float = 1.0,
    first_token_by: float | None = None,
    **sampling: object,
) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 64, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return GenerationRequest(name, tuple(prompt), params, tenant, weight, first_token_by)


class _Direct:
    """Stands in for a sink's loop and for its queue: calls `receive` at once, on the engine's thread."""

    def __init__(self, receive: Callable[[Event], None]) -> None:
        self.put = receive

    def call_soon(self, callback: Callable[..., None], *args: object) -> None:
        callback(*args)

    call_soon_threadsafe = call_soon


def sink_of(receive: Callable[[Event], None]) -> LoopSink:
    """A sink without a loop; `receive` is called on the engine's thread."""
    direct: Any = _Direct(receive)
    sink = LoopSink(direct)
    sink.events = direct
    return sink


def submit(engine: Engine, request: GenerationRequest, receive: Callable[[Event], None]) -> None:
    """Queue a request as `Engine.generate` does, but without a loop: errors are raised at once."""
    engine._submit(request, sink_of(receive))


def live(scheduler: Scheduler) -> list[TokenSequence]:
    """Every sequence that has not finished."""
    return [*scheduler.running, *scheduler.waiting]


class Inbox:
    """Receives the events of one request and waits for the last. `clock` stamps the first of each kind."""

    def __init__(self, clock: Callable[[], float] = lambda: 0) -> None:
        self.events: list[Event] = []
        self.first: dict[type, float] = {}
        self._clock = clock
        self._finished = threading.Event()
        self.finals = 0

    def __call__(self, event: Event) -> None:
        assert self.finals == 0, "an event after the last one"
        self.events.append(event)
        self.first.setdefault(type(event), self._clock())
        if isinstance(event, Finished):
            self.finals += 1
            self._finished.set()

    def wait(self, timeout: float = 60.0) -> Finished:
        assert self._finished.wait(timeout), f"not finished: {self.events}"
        return self.last

    @property
    def last(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last

    @property
    def started(self) -> bool:
        return any(isinstance(event, Started) for event in self.events)

    @property
    def text(self) -> str:
        return "".join(getattr(event, "text", "") for event in self.events)
