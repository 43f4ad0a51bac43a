"""One generation as it crosses from gateway to replica and back. Plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from serve_app.engine.request import Event, FinishReason, SamplingParams, TokenLogprob
from serve_app.ledger.messages import Price
from serve_app.tools.parts import Part

ToolChoice = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Bill:
    """Who pays and at which price: all that a replica needs to settle a request whose gateway has died."""

    account_id: str
    key_id: str
    model: str
    backend: str
    price: Price


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """Asks a replica for a reply of `n` choices.

    `credit` is the hold in nano-units: the prompt, once, and the whole output budget of every choice must fit.
    `tools` are those that the model may call, as the API defines them; `function` is the only one, where one is named.
    """

    request_id: str
    messages: tuple[dict[str, Any], ...]
    sampling: SamplingParams
    credit: int
    bill: Bill
    continue_final: bool = False
    settle_after_s: float = 2.0  # so long after a cut the replica settles, should the gateway have died
    weight: float = 1.0  # of the account, in the engine's fair queue
    # Seconds from the call on, for no two machines have the same clock; a reply that has begun is never cut by it.
    first_token_within_s: float | None = None
    n: int = 1
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = "none"
    function: str | None = None
    parallel_calls: bool = True  # whether a forced reply may be several calls


class Rejection(StrEnum):
    """Why a replica does not start a request."""

    CREDIT = "credit"  # the exact prompt needs a larger hold; ask again after adjusting it
    CONTEXT = "context"
    QUEUE_FULL = "queue_full"
    INVALID = "invalid"  # only the model can tell: its template refuses the messages, its tokens or grammars a field
    CLOSED = "closed"  # the engine has ended; Serve replaces the replica


@dataclass(frozen=True, slots=True)
class Rejected:
    """The only event of a request that did not start. Nothing was generated and nothing is billed."""

    reason: Rejection
    prompt_tokens: int = 0
    limit: int = 0  # tokens, with CONTEXT
    message: str = ""  # with INVALID
    param: str = "messages"  # with INVALID, the field at fault


@dataclass(frozen=True, slots=True)
class Said:
    """More of a choice, in parts; what is plain text of an only choice comes as the engine's Delta.

    `completion_tokens` counts the output of all choices so far. `tokens` are those to tell, where that is asked for.
    """

    parts: tuple[Part, ...]
    completion_tokens: int
    tokens: tuple[TokenLogprob, ...] = ()
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """One of several choices is complete. Finished, which counts all of them, comes after the last."""

    choice: int
    reason: FinishReason


BackendEvent = Event | Rejected | Said | Ended
"""Of a reply with several choices, Finished counts them all; its `marked_tokens` are those of reasoning."""
