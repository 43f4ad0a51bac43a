"""What the other routes for API keys answer: models, balance, usage, and whether the service is up."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

Amount = Annotated[
    str, Field(pattern=r"^-?[0-9]+\.[0-9]{2,9}$", description="A decimal of the account's currency, exact.")
]
Count = Annotated[int, Field(ge=0)]
Day = Annotated[str, Field(json_schema_extra={"format": "date"}, description="In UTC.")]


class Model(BaseModel):
    """One identifier."""

    id: str
    object: Literal["model"]
    created: int = Field(description="Unix time in seconds.")
    owned_by: str
    context_length: int = Field(ge=1, description="The most tokens of prompt and reply together.")
    max_output_length: int = Field(ge=1, description="The most tokens of one choice.")
    recommended_temperatures: dict[str, Annotated[float, Field(ge=0, le=2)]] = Field(
        description="By use; advice, not enforced."
    )
    system_fingerprints: list[str] = Field(
        description="What replies have as `system_fingerprint` now; empty while no backend answers."
    )


class ModelList(BaseModel):
    """All identifiers."""

    object: Literal["list"]
    data: list[Model]


class BalanceInfo(BaseModel):
    """The balance in one currency, without grants that have expired."""

    currency: str = Field(pattern="^[A-Z]{3}$", description="ISO 4217.")
    total_balance: Amount
    granted_balance: Amount
    topped_up_balance: Amount


class Balance(BaseModel):
    """What is left to spend."""

    is_available: bool = Field(description="Whether there is anything left.")
    balance_infos: list[BalanceInfo]


class UsageSums(BaseModel):
    """Sums of one group; what it is not grouped by is absent."""

    day: Day | None = None
    model: str | None = None
    account_id: str | None = None
    key_id: str | None = None
    requests: Count
    prompt_tokens: Count
    cached_tokens: Count = Field(description="Part of the prompt's.")
    completion_tokens: Count
    total_tokens: Count
    charged: Amount


class UsageList(BaseModel):
    """Usage by group."""

    object: Literal["list"]
    data: list[UsageSums]


class Health(BaseModel):
    """The process is alive."""

    status: Literal["alive"]
    version: str


class Ready(BaseModel):
    """Every backend has a replica."""

    status: Literal["ready"]
    backends: list[str]
