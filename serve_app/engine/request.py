"""A request to generate one sequence."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.contracts.generation import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for the engine; `request_id` is unique among the engine's live requests."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = ""  # the account: tenants share the engine fairly, but do not share cached prefixes
    weight: float = 1.0  # the tenant's weight, above 0: with 2, the tenant receives twice as much service
    first_token_by: float | None = None  # seconds on the engine's clock; the request ends if it still waits then
    said: tuple[int, ...] = ()  # tokens generated elsewhere that this reply continues; they count towards `max_tokens`
    adapter: str = ""  # name of one of the model's adapters; empty: the base model
