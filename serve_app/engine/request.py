"""What goes into the engine and what comes out of it: the request, its sampling parameters and its events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the caller gave up
    ERROR = "error"  # the engine failed; nothing is billed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Ranges are checked by the caller (see docs/api.md)."""

    max_tokens: int  # >= 1, tokens of output, the end-of-sequence token not counted
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # [0, 1], relative to the most likely token
    repetition_penalty: float = 1.0  # > 0, over prompt and output
    frequency_penalty: float = 0.0  # -2..2, over output
    presence_penalty: float = 0.0  # -2..2, over output
    stop: tuple[str, ...] = ()
    seed: int | None = None
    min_tokens: int = 0  # no end-of-sequence or stop string before so many tokens
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. `request_id` is unique among the engine's live requests."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = ""  # whose fair share the request counts against, and whose cached prefixes it may use


@dataclass(frozen=True, slots=True)
class Started:
    """The sequence has left the queue: its first prefill chunk runs."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, not computed anew


@dataclass(frozen=True, slots=True)
class Delta:
    """New text. `completion_tokens` counts all tokens of output so far, those of this delta included."""

    text: str
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Always the last event of a request, with exact counts."""

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


Event = Started | Delta | Finished
