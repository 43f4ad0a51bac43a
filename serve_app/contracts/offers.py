"""The models, prices and addresses that the gateway shows on the page at `/`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offer:
    """A model. Prices are per million tokens."""

    identifier: str
    aliases: tuple[str, ...]
    context_length: int
    max_output: int
    input_price: str
    cached_input_price: str
    output_price: str


@dataclass(frozen=True, slots=True)
class Front:
    """Data of the page. `base` is the service's address as the browser sees it. `root` is the console's path."""

    base: str
    root: str
    offers: tuple[Offer, ...]
    currency: str
    is_ready: bool
