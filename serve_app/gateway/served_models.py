"""Combines the identifiers of a gateway's settings, as the ledger has changed them, with those of the ledger."""

from __future__ import annotations

from collections.abc import Mapping

from serve_app.contracts.money import Price, format_price
from serve_app.contracts.served import Served, ServedModel
from serve_app.settings import GatewaySettings, IdentifierSettings, PriceSettings

Prices = tuple[tuple[float, Price], ...]
"""(in effect from, in Unix seconds; price), the latest first; the last one holds for all times before."""


def models_of(settings: GatewaySettings, served: Served) -> dict[str, IdentifierSettings]:
    """Returns the settings by identifier, the configured ones first. The ledger's weights take precedence."""
    models = dict(settings.models)
    for name, model in served.models.items():
        if name not in models and name in served.traffic and served.prices.get(name):
            models[name] = _created(model, served)
    for name, traffic in served.traffic.items():
        if name in models and traffic.weights:
            models[name] = models[name].model_copy(update={"backends": dict(traffic.weights)})
    return models


def prices_of(
    models: Mapping[str, IdentifierSettings], served: Served, configured: Mapping[str, Price]
) -> dict[str, Prices]:
    """Returns the prices by identifier.

    `configured` are the prices of the settings. They apply until the first price of the ledger does.
    """
    prices: dict[str, Prices] = {}
    for name in models:
        scheduled = [(one.effective_at, one.price) for one in reversed(served.prices.get(name, ()))]
        first = configured[name] if name in configured else scheduled[-1][1]
        prices[name] = (*scheduled, (0.0, first))
    return prices


def _created(model: ServedModel, served: Served) -> IdentifierSettings:
    spec, price = model.spec, served.prices[model.identifier][0].price
    return IdentifierSettings(
        backends=dict(served.traffic[model.identifier].weights),
        price=PriceSettings(
            input=format_price(price.input),
            cached_input=format_price(price.cached_input),
            output=format_price(price.output),
        ),
        first_token_target_s=spec.first_token_target_s,
        output_token_target_s=spec.output_token_target_s,
        context_length=spec.context_length,
        max_output=spec.max_output,
        recommended_temperatures=dict(spec.recommended_temperatures),
        fallback=spec.fallback,
    )
