"""One request on its way through the engine: its tokens, its KV blocks and how far it has got."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from serve_app.engine.request import GenerationRequest


class SequenceStatus(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """The engine's mutable record of one request; compared by identity."""

    request: GenerationRequest
    arrival: int  # order of submission, never repeated
    arrival_time: float  # the engine clock's seconds
    max_output: int  # tokens of output this sequence may have
    tokens: list[int] = field(default_factory=list)  # prompt, then output
    num_computed: int = 0  # tokens whose K and V are in the cache
    block_table: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)  # names of its full blocks, see `prefix`
    num_published: int = 0  # full blocks at the table's start that others can find
    cached_tokens: int = 0  # of the prompt, found in the cache when the sequence started
    length_class: int = 0  # which rotary frequencies it uses, see `rope`
    status: SequenceStatus = SequenceStatus.WAITING
    started: bool = False  # has left the queue once, so `Started` was sent
    yielded: bool = False  # has made room for another tenant; that is asked of nobody twice
    num_proven: int = 0  # tokens whose K and V have led to logits without NaN
    unproven: bool = False  # K and V were written after those

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)

    @property
    def request_id(self) -> str:
        """The request's own id."""
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        """Tokens of output so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens that have to go through the model before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """One token to compute and at least one produced: a stream that others must not hold up."""
        return self.num_pending == 1 and self.num_output > 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start .. start + length` of one sequence, to be computed in this step.

    `draft` are guesses at what follows the sequence's last token; they count in `length` and are computed with it, so
    that all of them are verified in one step.
    """

    sequence: Sequence
    start: int
    length: int
    draft: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed after the chunk, drafts aside."""
        return self.start + self.length - len(self.draft)

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's last token, so that the next one is sampled from it.

        True only until that one is appended.
        """
        return self.end == len(self.sequence.tokens)

    @property
    def num_logits(self) -> int:
        """Rows of logits that the step returns for this chunk: after its last token and after each draft token."""
        return 1 + len(self.draft) if self.samples else 0

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute, drafts last."""
        return self.sequence.tokens[self.start : self.end] + list(self.draft)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: at most one chunk per sequence."""

    chunks: tuple[Chunk, ...]
    started: tuple[Sequence, ...]  # left the queue for the first time
    preempted: int = 0
    to_clear: tuple[int, ...] = ()  # KV blocks that may hold NaN: zeroed before the step, since masks multiply by 0

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(chunk.length for chunk in self.chunks)
