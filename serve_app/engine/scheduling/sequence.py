"""The engine's record of one request, and the plan of one step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b

from serve_app.engine.request import GenerationRequest


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class TokenSequence:
    """One request in the engine: its tokens, KV blocks and progress. Mutable; compared by identity."""

    request: GenerationRequest
    arrival: int  # order of submission, unique
    arrival_time: float  # seconds on the engine's clock
    max_output: int  # maximum number of output tokens
    tokens: list[int] = field(default_factory=list)  # prompt, then output
    num_computed: int = 0  # tokens whose K and V are in the cache
    block_table: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)  # keys of its full blocks, see `blocks.extend_chain`
    num_published: int = 0  # full blocks at the start of the table that other sequences can find
    cached_tokens: int = 0  # prompt tokens found in the cache when the sequence started
    length_class: int = 0  # selects the rotary frequencies, see `rope`
    status: SequenceStatus = SequenceStatus.WAITING
    started: bool = False  # whether it has left the queue once, so that `Started` was sent
    yielded: bool = False  # whether it has made room for another tenant; happens at most once
    num_proven: int = 0  # tokens whose K and V have produced logits without NaN
    num_written: int = 0  # tokens whose K and V may be in the cache; those beyond `num_proven` may be NaN
    num_scored: int = 0  # prompt tokens whose log-probabilities are known, including the first token, which has none

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt_token_ids, *self.request.said]

    def own_key(self, key: bytes) -> bytes:
        """The key under which only this sequence finds a block, derived from the block's shared key."""
        return blake2b(key, digest_size=len(key), salt=self.arrival.to_bytes(16)).digest()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Number of tokens to compute before the next token can be sampled; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of the prompt are requested and still missing.

        The sequence's chunks must then return the logits of every prompt token.
        """
        return self.request.sampling.prompt_logprobs is not None and self.num_scored < self.num_prompt

    @property
    def is_decoding(self) -> bool:
        """Whether one token is pending and at least one was produced. Other sequences must not delay such a stream."""
        return self.num_pending == 1 and self.num_output > 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start .. start + length` of one sequence, computed in one step.

    `draft` holds guesses for the tokens after the sequence's last token. They are counted in `length` and computed in
    the same step, which verifies all of them.
    """

    sequence: TokenSequence
    start: int
    length: int
    draft: tuple[int, ...] = ()
    is_scored: bool = False  # whether each token needs logits, for the log-probabilities of the prompt

    @property
    def end(self) -> int:
        """Number of the sequence's tokens that have been computed once the chunk has run, without the draft."""
        return self.start + self.length - len(self.draft)

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's last token, so that the next token is sampled from it.

        True only until the next token is appended.
        """
        return self.end == len(self.sequence.tokens)

    @property
    def num_logits(self) -> int:
        """Number of the chunk's last tokens for which the step returns a row of logits; all tokens if `is_scored`."""
        if self.is_scored:
            return self.length
        return 1 + len(self.draft) if self.samples else 0

    @property
    def scored(self) -> range:
        """Indices of the prompt tokens whose log-probabilities come from the first rows of the chunk's logits."""
        return range(self.start + 1, min(self.end + 1, self.sequence.num_prompt)) if self.is_scored else range(0)

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute, the draft last."""
        return self.sequence.tokens[self.start : self.end] + list(self.draft)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step: at most one chunk per sequence."""

    chunks: tuple[Chunk, ...]
    started: tuple[TokenSequence, ...]  # sequences that left the queue for the first time
    to_clear: tuple[int, ...] = ()  # KV blocks to clear before the step: they may hold NaN, which masks do not remove

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def halves(self) -> tuple[StepPlan, ...]:
        """Two plans that together compute this plan, in order; empty if the plan cannot be divided."""
        if len(self.chunks) > 1:
            middle = len(self.chunks) // 2
            parts = self.chunks[:middle], self.chunks[middle:]
        elif self.num_tokens > 1 and not self.chunks[0].draft:
            chunk, half = self.chunks[0], self.num_tokens // 2
            parts = (
                (replace(chunk, length=half),),
                (replace(chunk, start=chunk.start + half, length=chunk.length - half),),
            )
        else:
            return ()
        return StepPlan(parts[0], (), self.to_clear), StepPlan(parts[1], ())

    def still_running(self) -> StepPlan:
        """The plan without the chunks of sequences that have ended in the meantime."""
        chunks = tuple(chunk for chunk in self.chunks if chunk.sequence.status is SequenceStatus.RUNNING)
        return StepPlan(chunks, self.started, self.to_clear)
