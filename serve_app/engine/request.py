"""One sequence for the engine to generate."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.contracts.generation import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`request_id` is unique among the engine's live requests."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = ""  # owner of the fair share that the request counts against, and of the cached prefixes it may use
    weight: float = 1.0  # > 0, of the tenant: its service is divided by this
    first_token_by: float | None = None  # seconds on the engine's clock; without a token by then the request ends
    said: tuple[int, ...] = ()  # tokens of the reply, made elsewhere, which it continues; `max_tokens` counts them too
    adapter: str = ""  # the name of one of the model's adapters; empty: the model itself
