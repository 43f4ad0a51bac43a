"""The bodies of `/models`, `/user/balance` and `/user/usage`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

RECOMMENDED_TEMPERATURES: Final[Mapping[str, Mapping[str, float]]] = {
    "svc-chat": {
        "coding_and_math": 0.0,
        "data_cleaning_and_analysis": 0.7,
        "conversation": 1.0,
        "translation": 1.1,
        "creative_writing_and_poetry": 1.25,
    },
    "svc-coder": {"programming_and_math": 1.0},
}
"""Advice by use case, from the published description of the models; not enforced."""

_CREATED: Final = 1735689600  # 2025-01-01: the identifiers are fixed, whatever serves them


def model_body(
    identifier: str,
    *,
    context_length: int,
    max_output_length: int,
    fingerprints: Sequence[str],
    created: int = _CREATED,
    owned_by: str = "serve-app",
) -> dict[str, Any]:
    """One identifier as `/models/{id}` shows it; lengths are in tokens, `created` in Unix seconds.

    `fingerprints` are the `system_fingerprint`s that replies have now.
    """
    return {
        "id": identifier,
        "object": "model",
        "created": created,
        "owned_by": owned_by,
        "context_length": context_length,
        "max_output_length": max_output_length,
        "recommended_temperatures": dict(RECOMMENDED_TEMPERATURES.get(identifier, {"default": 1.0})),
        "system_fingerprints": list(fingerprints),
    }


def model_list(models: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The list that `/models` answers, from `model_body` of each."""
    return {"object": "list", "data": [dict(model) for model in models]}


def balance_body(*, available: bool, currency: str, total: str, granted: str, topped_up: str) -> dict[str, Any]:
    """`/user/balance`; amounts are decimal strings of the currency, so that no client rounds them."""
    info = {"currency": currency, "total_balance": total, "granted_balance": granted, "topped_up_balance": topped_up}
    return {"is_available": available, "balance_infos": [info]}


def usage_body(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """`/user/usage`; a row has the token sums of one group, and the fields that the grouping leaves out are absent."""
    return {
        "object": "list",
        "data": [{name: value for name, value in row.items() if value is not None} for row in rows],
    }
