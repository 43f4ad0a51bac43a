"""Every setting of the service, typed and validated: an unknown key or a bad value names its path and stops.

Builder arguments (`args` in config.yaml) need a restart of their application; `user_config` of a deployment is applied
to the running service.
"""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from serve_app.engine.config import EngineSettings
from serve_app.ledger.messages import Price
from serve_app.ledger.money import price_per_million
from serve_app.limits.messages import Contract
from serve_app.limits.pressure import Tuning
from serve_app.tools import FAMILIES

Settings = TypeVar("Settings", bound=BaseModel)


class SettingsError(ValueError):
    """A setting is wrong; the message names its path, one problem a line."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


PerMillion = Annotated[str, Field(description="price per million tokens, at most three decimals")]


class PriceSettings(_Strict):
    """Prices per million tokens in the service's currency, as decimal strings."""

    input: PerMillion
    cached_input: PerMillion
    output: PerMillion

    @field_validator("input", "cached_input", "output", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        # YAML reads 0.27 as a float; its shortest decimal is what the operator wrote.
        return str(Decimal(repr(value))) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @field_validator("input", "cached_input", "output")
    @classmethod
    def _exact(cls, value: str) -> str:
        price_per_million(value)
        return value

    def price(self) -> Price:
        """In nano-units per token."""
        return Price(
            input=price_per_million(self.input),
            cached_input=price_per_million(self.cached_input),
            output=price_per_million(self.output),
        )


class IdentifierSettings(_Strict):
    """One model identifier that clients see, and what stands behind it."""

    backends: dict[str, Annotated[int, Field(ge=0)]]  # application name -> weight
    price: PriceSettings
    context_length: Annotated[int, Field(ge=1)] = 32768
    max_output: Annotated[int, Field(ge=1)] = 4096

    @model_validator(mode="after")
    def _some_backend(self) -> IdentifierSettings:
        if sum(self.backends.values()) <= 0:
            raise ValueError("at least one backend needs a weight above 0")
        return self


class GatewaySettings(_Strict):
    """`user_config` of the Gateway deployment."""

    models: Annotated[dict[str, IdentifierSettings], Field(min_length=1)]
    admit_timeout_s: Annotated[float, Field(gt=0)] = 10.0  # a limiter that is restarting is waited for so long
    settle_timeout_s: Annotated[float, Field(gt=0)] = 10.0  # then the settlement goes to the spool
    queue_timeout_s: Annotated[float, Field(gt=0)] = 120.0  # from admission to the first token's prefill
    keep_alive_s: Annotated[float, Field(gt=0)] = 10.0
    early_reply_s: Annotated[float, Field(gt=0)] = 3.0  # a reply that is not streamed is begun after so long
    line_feed_s: Annotated[float, Field(gt=0)] = 1.0  # and from then on sends a line feed so often until it is complete
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * 1024 * 1024
    body_timeout_s: Annotated[float, Field(gt=0)] = 30.0  # a request's body is complete after so long, or refused
    spool_max_bytes: Annotated[int, Field(ge=4096)] = 64 * 1024 * 1024
    # How many proxies in front append to x-forwarded-for. Ray Serve's HAProxy does not, a Kubernetes ingress is 1.
    trusted_proxies: Annotated[int, Field(ge=0, le=16)] = 0


class ContractSettings(_Strict):
    """Limits of an account that has none of its own."""

    rpm: Annotated[int, Field(ge=1)] = 600
    tpm: Annotated[int, Field(ge=1)] = 1_000_000
    concurrency: Annotated[int, Field(ge=1)] = 64
    weight: Annotated[int, Field(ge=1, le=1_000_000)] = 100  # share under pressure, beside the other accounts'


class PressureSettings(_Strict):
    """How limits follow what replicas have to do. See serve_app.limits.pressure."""

    target_s: Annotated[float, Field(gt=0, le=60)] = 0.75  # queueing delay to keep
    prefill_target_s: Annotated[float, Field(gt=0, le=600)] = 3.0  # work in queued prompts to keep, in seconds
    kv_target: Annotated[float, Field(gt=0, le=1)] = 0.95  # KV use from which limits do not rise while requests wait
    floor: Annotated[float, Field(gt=0, le=1)] = 0.001  # of its contract, which every account keeps
    burst_s: Annotated[float, Field(gt=0, le=60)] = 6.0  # an account may be ahead of its share by so many seconds
    deadline_s: Annotated[float, Field(gt=0)] = 120.0  # a wait of a third of it is answered with 503 at once
    silent_s: Annotated[float, Field(ge=1)] = 3.0  # a replica that has not reported for so long is forgotten

    def tuning(self) -> Tuning:
        """As the limiter wants it."""
        return Tuning(**self.model_dump())


class LimiterSettings(_Strict):
    """`user_config` of the Limiter deployment and of each of its shards."""

    contract: ContractSettings = ContractSettings()
    pressure: PressureSettings = PressureSettings()

    def default_contract(self) -> Contract:
        """As the limiter wants it."""
        return Contract(**self.contract.model_dump())


class GatewayArgs(_Strict):
    """`args` of the gateway application."""

    home: Path | None = None  # state folder; default: SERVE_APP_HOME, else .serve-app in the working directory
    database_url: str | None = None  # default: SERVE_APP_DATABASE_URL, else SQLite in the state folder
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = "USD"
    lease_s: Annotated[float, Field(gt=1)] = 10.0  # holds of a gateway that is silent for so long are dropped
    orphan_delay_s: Annotated[float, Field(gt=0)] = 2.0  # a replica settles for a dead gateway after so long
    # Processes that share the accounts, each account belonging to one. Changed with the service stopped.
    limiter_shards: Annotated[int, Field(ge=1, le=64)] = 1
    accounting_shards: Annotated[int, Field(ge=1, le=64)] = 1

    @model_validator(mode="after")
    def _lease_outlives_orphans(self) -> GatewayArgs:
        if self.lease_s < self.orphan_delay_s + 2:
            # The hold must protect a dead gateway's charge until its replica has settled it.
            raise ValueError(f"lease_s must be at least 2 s above orphan_delay_s, which is {self.orphan_delay_s}")
        return self

    def state_dir(self) -> Path:
        """The state folder, which exists afterwards."""
        path = self.home or home_dir()
        path.mkdir(parents=True, exist_ok=True)
        return path

    def ledger_url(self) -> str:
        """The ledger's SQLAlchemy URL."""
        configured = self.database_url or os.environ.get("SERVE_APP_DATABASE_URL")
        return configured or f"sqlite:///{self.state_dir().absolute() / 'ledger.db'}"


class ModelArgs(EngineSettings):
    """`args` of a model application: the engine's settings. `model: bundled` is the model that ships with it."""

    tool_format: str = "auto"  # how it writes tool calls, a name of serve_app.tools.FAMILIES; its template tells
    reasoning: Literal["auto", "none"] = "auto"  # whether reasoning is told apart from the text; its template tells

    @field_validator("tool_format")
    @classmethod
    def _known(cls, value: str) -> str:
        if value != "auto" and value not in FAMILIES:
            raise ValueError(f"must be auto or one of {', '.join(FAMILIES)}")
        return value


def home_dir() -> Path:
    """The state folder: SERVE_APP_HOME, else `.serve-app` in the working directory."""
    return Path(os.environ.get("SERVE_APP_HOME") or ".serve-app").expanduser().absolute()


def parse(kind: type[Settings], raw: Any, where: str) -> Settings:
    """Validates `raw`; raises SettingsError that names each bad path below `where`."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        lines = [
            f"{'.'.join([where, *map(str, problem['loc'])])}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_context=False)
        ]
        raise SettingsError("\n".join(lines)) from None
