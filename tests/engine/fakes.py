"""Stand-ins that need no weights: a model whose next token is a fixed function of its last ones, and a tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from serve_app.engine.detokenizer import Vocabulary, bytes_of_unicode
from serve_app.engine.engine import Engine, EngineSettings
from serve_app.engine.request import Event, Finished, GenerationRequest, SamplingParams
from serve_app.engine.sequence import Chunk

EOS = 256
VOCAB = 257


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: token b is byte b, token 256 ends a sequence."""
    vocabulary = bytes_of_unicode()
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


class FakeRunner:
    """Says `script` byte by byte after any prompt, then ends. Checks that every chunk follows the last one.

    `gate`, where set, holds each step until it is released; `failures` maps a step's number to what it raises.
    """

    def __init__(self, script: bytes = b"hello world", num_blocks: int = 64, max_context: int = 1024) -> None:
        self.script = script
        self.num_blocks = num_blocks
        self.class_bounds = (max_context,)
        self.vocab_size = VOCAB
        self.gate: threading.Semaphore | None = None
        self.entered = threading.Semaphore(0)
        self.failures: dict[int, BaseException] = {}
        self.steps: list[tuple[Chunk, ...]] = []
        self.cleared: list[tuple[int, ...]] = []

    def execute(self, chunks: Seq[Chunk]) -> torch.Tensor:
        self.steps.append(tuple(chunks))
        self.entered.release()
        if self.gate is not None:
            self.gate.acquire()
        if (failure := self.failures.pop(len(self.steps), None)) is not None:
            raise failure
        said = []
        for chunk in chunks:
            assert chunk.start == chunk.sequence.num_computed
            for row in range(chunk.num_logits):
                at = chunk.sequence.num_output + row
                said.append(self.script[at] if at < len(self.script) else EOS)
        logits = torch.zeros(len(said), VOCAB)
        logits[torch.arange(len(said)), said] = 50.0
        return logits

    def clear_blocks(self, blocks: Seq[int]) -> None:
        self.cleared.append(tuple(blocks))


def fake_engine(runner: FakeRunner, **settings: object) -> Engine:
    return Engine(
        runner,
        Vocabulary(byte_tokenizer()),
        frozenset({EOS}),
        EngineSettings(model="fake", **{"block_size": 4, **settings}),  # type: ignore[arg-type]
    )


def request(name: str = "r", prompt: Seq[int] = (1, 2, 3), **sampling: object) -> GenerationRequest:
    return GenerationRequest(name, tuple(prompt), SamplingParams(**{"max_tokens": 64, "temperature": 0.0, **sampling}))  # type: ignore[arg-type]


class Inbox:
    """Receives the events of one request and waits for the last."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._finished = threading.Event()
        self.finals = 0

    def __call__(self, event: Event) -> None:
        assert self.finals == 0, "an event after the last one"
        self.events.append(event)
        if isinstance(event, Finished):
            self.finals += 1
            self._finished.set()

    def wait(self, timeout: float = 60.0) -> Finished:
        assert self._finished.wait(timeout), f"not finished: {self.events}"
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last

    @property
    def text(self) -> str:
        return "".join(getattr(event, "text", "") for event in self.events)
