"""One frame of the live view, as the JSON that `serve-app top --json` prints."""

from __future__ import annotations

from typing import Any

from serve_app.cli.live.rates import Rates
from serve_app.contracts import metrics

Json = dict[str, Any]


def build_frame(live: Json, rates: Rates) -> Json:
    """The answer of `/admin/live`, and beside it the figures of gateways; those are null while they are unknown."""
    return {
        **live,
        "models": [_model(model, rates) for model in live["models"]],
        "total": _served(rates) | _refused(rates),
        "rates": {"source": rates.source or None, "over_s": _rounded(rates.over_s), "notes": list(rates.notes)},
        "problem": None,
    }


def _model(model: Json, rates: Rates) -> Json:
    backends = [backend | _served(rates, model["id"], backend["name"]) for backend in model["backends"]]
    return model | {"backends": backends} | _served(rates, model["id"]) | _refused(rates, model["id"])


def _served(rates: Rates, *labels: str) -> Json:
    """Of an identifier, or of a backend behind it. Requests are all that ended, those that were refused too."""
    first_token = metrics.FIRST_TOKEN_SECONDS
    return {
        "requests_per_s": _rounded(rates.of(metrics.REQUESTS, *labels)),
        "first_token_p50_s": _rounded(rates.quantile(0.5, first_token, *labels)),
        "first_token_p95_s": _rounded(rates.quantile(0.95, first_token, *labels)),
        "prompt_tokens_per_s": _rounded(rates.of(metrics.PROMPT_TOKENS, *labels)),
        "output_tokens_per_s": _rounded(rates.of(metrics.COMPLETION_TOKENS, *labels)),
    }


def _refused(rates: Rates, *labels: str) -> Json:
    """Refusals have no backend. By reason only those that there are."""
    by_reason: dict[str, float] = rates.by_last(metrics.REFUSALS, *labels)
    return {
        "refusals_per_s": _rounded(rates.of(metrics.REFUSALS, *labels)),
        "refusals_by_reason": {reason: _rounded(rate) for reason, rate in by_reason.items() if rate > 0},
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
