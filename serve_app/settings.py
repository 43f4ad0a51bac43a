"""Every setting of the service, typed and validated: an unknown key or a bad value names its path and stops.

A change of an application's `args` restarts it. A change of a deployment's `user_config` applies to the running
service.
"""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from serve_app.contracts.limits import Contract
from serve_app.contracts.money import Price, parse_amount, price_per_million
from serve_app.engine.config import EngineSettings
from serve_app.engine.engines import ENGINES
from serve_app.engine.vllm_adapter.vllm_settings import VllmSettings
from serve_app.limiter.pressure import Tuning
from serve_app.model.tools.format_table import TOOL_FORMATS

Settings = TypeVar("Settings", bound=BaseModel)
UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")  # pydantic's types of error, of models and dataclasses


class SettingsError(ValueError):
    """Wrong settings; the message has one line for each, beginning with its path."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Seconds = Annotated[float, Field(gt=0)]
PerMillion = Annotated[str, Field(description="price per million tokens, at most three decimals")]


class PriceSettings(_Strict):
    """Prices in the service's currency, as decimal strings."""

    input: PerMillion
    cached_input: PerMillion
    output: PerMillion

    @field_validator("input", "cached_input", "output", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        # YAML reads 0.27 as a float; its shortest decimal is the text that the operator wrote.
        return str(Decimal(repr(value))) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @field_validator("input", "cached_input", "output")
    @classmethod
    def _check_decimals(cls, value: str) -> str:
        price_per_million(value)
        return value

    def per_token(self) -> Price:
        """In nano-units per token."""
        return Price(
            input=price_per_million(self.input),
            cached_input=price_per_million(self.cached_input),
            output=price_per_million(self.output),
        )


class IdentifierSettings(_Strict):
    """One model identifier that clients see, and its backends."""

    backends: dict[str, Annotated[int, Field(ge=0)]]  # application name -> weight
    price: PriceSettings
    # What users are to get; replies within both are the goodput, and alerts watch how many are not (docs/runbooks.md).
    first_token_target_s: Seconds = 5.0
    output_token_target_s: Seconds = 0.2  # the mean of a reply
    context_length: Annotated[int, Field(ge=1)] = 32768
    max_output: Annotated[int, Field(ge=1)] = 4096
    recommended_temperatures: dict[str, Annotated[float, Field(ge=0, le=2)]] = {}  # by use; advice that /models gives
    fallback: str | None = None  # the backend that replies while those with weight have no capacity

    @model_validator(mode="after")
    def _some_backend(self) -> IdentifierSettings:
        if sum(self.backends.values()) <= 0:
            raise ValueError("at least one backend needs a weight above 0")
        return self


class GatewaySettings(_Strict):
    """`user_config` of the Gateway deployment."""

    models: Annotated[dict[str, IdentifierSettings], Field(min_length=1)]
    # How long to wait for a limiter: on another machine one begins 3 s after `limiter_lease_s`.
    admit_timeout_s: Seconds = 30.0
    settle_timeout_s: Seconds = 0.5  # a last chunk waits so long for the ledger, then its settlement goes to the spool
    queue_timeout_s: Seconds = 120.0  # from admission to the first token's prefill
    keep_alive_s: Seconds = 10.0
    early_reply_s: Seconds = 3.0  # after so long a reply that is not streamed begins
    line_feed_s: Seconds = 1.0  # from then on it sends a line feed so often, until it is complete
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * 1024 * 1024
    max_body_items: Annotated[int, Field(ge=1000)] = 100_000  # values in one body
    body_timeout_s: Seconds = 30.0  # a request whose body is not complete by then is rejected
    # Bytes of all bodies that are being read and parsed. One key may have an eighth, or one body of the longest.
    bodies_max_bytes: Annotated[int, Field(ge=1024 * 1024)] = 128 * 1024 * 1024
    spool_max_bytes: Annotated[int, Field(ge=4096)] = 64 * 1024 * 1024
    # Of one key to /models, /user and /account, in each gateway; an account has four times as many. Chat isn't counted.
    queries_per_minute: Annotated[int, Field(ge=1)] = 60
    # Of traces: the share that is kept, and from how long on a request is slow, so that its trace is kept in any case.
    trace_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    trace_slow_s: Seconds = 30.0
    request_log: bool = True  # one line per request in `logs` of the state folder
    # Accounts whose prompts and replies are in the log, for as long as an operator needs them.
    logged_texts: Annotated[list[str], Field(max_length=100)] = []
    # How many proxies in front append to x-forwarded-for. Ray Serve's HAProxy does not, a Kubernetes ingress is 1.
    trusted_proxies: Annotated[int, Field(ge=0, le=16)] = 0


class LimiterSettings(_Strict):
    """`user_config` of the Limiter deployment and of each of its shards."""

    contract: Contract = Contract()  # of accounts without limits of their own
    pressure: Tuning = Tuning()  # how limits follow the load of the replicas


class GatewayArgs(_Strict):
    """`args` of the gateway application."""

    home: Path | None = None  # state folder; default: SERVE_APP_HOME, else .serve-app in the working directory
    # Default: SERVE_APP_DATABASE_URL, else (on one machine: `keeps_local_state`) SQLite in the state folder.
    database_url: str | None = None
    # An operation on PostgreSQL that takes longer is given up, and its connection closed. Below what a commit may take.
    database_timeout_s: Annotated[float, Field(ge=2, le=20)] = 10.0
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = "USD"
    lease_s: Annotated[float, Field(gt=1)] = 10.0  # a gateway that is silent for so long loses its holds
    # A successor waits for so long for a limiter of which nothing is heard; its gateways need half of that to post
    # their holds. While the ledger is away the holder of the lease goes on for `outage_grace_s` longer.
    limiter_lease_s: Annotated[float, Field(ge=10)] = 20.0
    outage_grace_s: Annotated[float, Field(ge=0)] = 0.0
    key_staleness_s: Annotated[float, Field(ge=1)] = 5.0  # keys get 503 when no change could be read for so long
    orphan_delay_s: Seconds = 2.0  # a replica settles for a dead gateway after so long
    # Processes among which the accounts are divided. Change limiter_shards only while the service is stopped.
    limiter_shards: Annotated[int, Field(ge=1, le=64)] = 1
    accounting_shards: Annotated[int, Field(ge=1, le=64)] = 1
    # Between two checks of the books, each from the last one; an alert waits for one that does not come.
    books_check_s: Annotated[float, Field(ge=60, le=1800)] = 900.0
    # What one account keeps for retries under idempotency keys, at most a day; the oldest replies leave first.
    stored_replies: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    stored_reply_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024 * 1024
    # For `/account/alerts`, as the console's: it has `mail`, and alerts may go to addresses that are not public.
    alert_mail: bool = False
    private_webhooks: bool = False

    @model_validator(mode="after")
    def _lease_outlives_orphans(self) -> GatewayArgs:
        if self.lease_s < self.orphan_delay_s + 2:
            # The hold must protect a dead gateway's charge until its replica has settled it.
            raise ValueError(f"lease_s must be at least 2 s above orphan_delay_s, which is {self.orphan_delay_s}")
        return self

    def state_dir(self) -> Path:
        """The state folder; makes it."""
        path = self.home or home_dir()
        path.mkdir(parents=True, exist_ok=True)
        return path

    def ledger_url(self) -> str:
        """The ledger's SQLAlchemy URL. Raises SettingsError for none on a cluster, and for a template's placeholder."""
        configured = self.database_url or os.environ.get("SERVE_APP_DATABASE_URL", "").strip()
        if configured:
            if is_placeholder(configured):
                raise SettingsError(
                    "SERVE_APP_DATABASE_URL: still the placeholder of a template; write the database's address: "
                    "postgresql+psycopg://USER:PASSWORD@HOST:5432/DATABASE"
                )
            return configured
        if not keeps_local_state():
            # SQLite would be a ledger of this node's own, and lost with its disk.
            raise SettingsError(
                "SERVE_APP_DATABASE_URL: not set; write the address of the PostgreSQL database that holds the ledger, "
                "or set SERVE_APP_LOCAL_STATE=1 if the whole service runs on this one machine"
            )
        return f"sqlite:///{self.state_dir().absolute() / 'ledger.db'}"


class MailSettings(_Strict):
    """Where the console hands e-mail over. A password is in SERVE_APP_SMTP_PASSWORD."""

    host: str
    port: Annotated[int, Field(ge=1, le=65535)] = 587
    sender: Annotated[str, Field(pattern=r"^[^@\s<>]+@[^@\s<>]+$")]  # the address that it comes from
    starttls: bool = True  # with a certificate that this machine trusts, or one of SSL_CERT_FILE
    user: str = ""  # empty: without logging in


class OpenIdSettings(_Strict):
    """An OpenID Connect provider where people of the console sign in. Its secret is in SERVE_APP_OIDC_SECRET."""

    issuer: Annotated[str, Field(pattern=r"^(https://[^\s?#]+|http://127\.0\.0\.1(:\d+)?[^\s?#]*)$")]
    client_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1, max_length=60)] = "single sign-on"  # as the pages call it


class ConsoleArgs(_Strict):
    """`args` of the console's application. `home` and `accounting_shards` must be those of the gateway's."""

    home: Path | None = None
    accounting_shards: Annotated[int, Field(ge=1, le=64)] = 1
    trusted_proxies: Annotated[int, Field(ge=0, le=16)] = 0  # as in the gateway's settings
    mail: MailSettings | None = None  # None: alerts go to webhooks alone
    # Credit that one operator may give alone, in units of the currency; more needs a second one.
    credit_alone: str = "100.00"
    private_webhooks: bool = False  # alerts may go to http and to addresses that are not public
    openid: OpenIdSettings | None = None  # None: people sign in with passwords alone

    @field_validator("credit_alone")
    @classmethod
    def _is_amount(cls, value: str) -> str:
        parse_amount(value)
        return value

    def state_dir(self) -> Path:
        """The state folder; makes it."""
        path = self.home or home_dir()
        path.mkdir(parents=True, exist_ok=True)
        return path


class ModelArgs(EngineSettings):
    """`args` of a model application: the engine's settings. `model: bundled` is the model that ships with it."""

    engine: str = "native"  # a name in ENGINES
    vllm: VllmSettings = VllmSettings()  # options of engine vllm; those of an engine have its name
    # The Python that runs the replicas. Default of engine vllm: SERVE_APP_VLLM_PYTHON, else that of `make engine-vllm`.
    interpreter: Path | None = None
    tool_format: str = "auto"  # how it writes tool calls, a name in TOOL_FORMATS; auto: by its template
    cost_per_hour: Annotated[float, Field(ge=0)] = 0.0  # of one replica, in units of the currency; for dashboards alone
    reasoning: Literal["auto", "none"] = "auto"  # whether reasoning is separated from the text; auto: by its template
    # Which replica gets a call: the less busy of two, or the one that knows its conversation, if that has room.
    routing: Literal["balanced", "conversation"] = "balanced"

    @field_validator("tool_format")
    @classmethod
    def _check_tool_format(cls, value: str) -> str:
        if value != "auto" and value not in TOOL_FORMATS:
            raise ValueError(f"must be auto or one of {', '.join(TOOL_FORMATS)}")
        return value

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, value: str) -> str:
        if value not in ENGINES:
            raise ValueError(f"must be one of {', '.join(ENGINES)}")
        return value

    @model_validator(mode="after")
    def _engine_and_settings_fit(self) -> ModelArgs:
        for other in self.model_fields_set & (ENGINES.keys() - {self.engine}) & ModelArgs.model_fields.keys():
            if other != "native":  # which is also a setting, of the native engine
                raise ValueError(
                    f"{other}: these settings are of another engine: write engine: {other}, or remove them"
                )
        if (wrong := ENGINES[self.engine].problem(self, self.options)) is not None:
            raise ValueError(wrong)
        return self

    @property
    def options(self) -> Any:
        """The settings that only the engine itself has; None if it has none."""
        return None if self.engine == "native" else getattr(self, self.engine)

    def python(self) -> str | None:
        """The interpreter of the replicas; None: that of the service."""
        if self.interpreter is not None:
            return str(self.interpreter.expanduser().absolute())
        return ENGINES[self.engine].python()


def home_dir() -> Path:
    """The state folder: SERVE_APP_HOME, else `.serve-app` in the working directory."""
    return Path(os.environ.get("SERVE_APP_HOME") or ".serve-app").expanduser().absolute()


def keeps_local_state() -> bool:
    """Whether secrets and ledger may be files of this machine: SERVE_APP_LOCAL_STATE is 1, as the launcher sets it.

    Nothing else shows it for certain: a cluster's first node is alone for a while, too.
    """
    return os.environ.get("SERVE_APP_LOCAL_STATE") == "1"


def is_placeholder(value: str) -> bool:
    """Whether a secret or an address is what a template has in its place, such as REPLACE_ME or change-me."""
    letters = "".join(filter(str.isalnum, value)).casefold()
    return any(word in letters for word in ("replaceme", "changeme"))


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config file, not validated. Raises SettingsError."""
    try:
        config = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise SettingsError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise SettingsError(f"{path}: must be a mapping with `applications`")
    return config


def parse(kind: type[Settings], raw: Any, where: str) -> Settings:
    """Validates `raw`. Raises SettingsError that names each unknown key and bad value by its path below `where`."""
    try:
        return kind.model_validate(raw, extra="forbid")
    except ValidationError as error:
        raise SettingsError("\n".join(problem_lines(error, where))) from None


def problem_lines(error: ValidationError, *where: str) -> list[str]:
    """One line for each problem."""
    return [
        f"{'.'.join([*where, *map(str, problem['loc'])])}: "
        + ("unknown key" if problem["type"] in UNKNOWN_KEY else problem["msg"])
        for problem in error.errors(include_url=False, include_context=False)
    ]
