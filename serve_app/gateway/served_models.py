"""Merges the models in a gateway's settings with the models that were created in the ledger."""

from __future__ import annotations

from serve_app.contracts.money import format_price
from serve_app.contracts.served import Served, ServedModel
from serve_app.settings import GatewaySettings, IdentifierSettings, PriceSettings


def models_of(settings: GatewaySettings, served: Served) -> dict[str, IdentifierSettings]:
    """Returns the settings by identifier, the configured ones first. Weights in the ledger replace configured ones."""
    models = dict(settings.models)
    for name, model in served.models.items():
        if name not in models and name in served.traffic and served.prices.get(name):
            models[name] = _created(model, served)
    for name, traffic in served.traffic.items():
        if name in models and traffic.weights:
            models[name] = models[name].model_copy(update={"backends": dict(traffic.weights)})
    return models


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
        aliases=list(spec.aliases),
    )
