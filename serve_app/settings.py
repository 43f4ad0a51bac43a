"""Typed and validated settings of the service. An unknown key or a bad value raises an error that names its path.

Changing an application's `args` restarts the application. Changing a deployment's `user_config` applies to the running
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
UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")  # pydantic's error types, of models and dataclasses


class SettingsError(ValueError):
    """Invalid settings. The message has one line per problem, which begins with its path."""


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
        """Returns the prices in nano-units per token."""
        return Price(
            input=price_per_million(self.input),
            cached_input=price_per_million(self.cached_input),
            output=price_per_million(self.output),
        )


class IdentifierSettings(_Strict):
    """One model identifier that clients see, and its backends."""

    backends: dict[str, Annotated[int, Field(ge=0)]]  # application name -> weight
    price: PriceSettings
    # Latency targets. Replies within both count as goodput; alerts watch the share of the rest (docs/runbooks.md).
    first_token_target_s: Seconds = 5.0
    output_token_target_s: Seconds = 0.2  # mean of a reply
    context_length: Annotated[int, Field(ge=1)] = 32768
    max_output: Annotated[int, Field(ge=1)] = 4096
    recommended_temperatures: dict[str, Annotated[float, Field(ge=0, le=2)]] = {}  # by use, as /models recommends
    fallback: str | None = None  # the backend that replies while the weighted backends have no capacity

    @model_validator(mode="after")
    def _some_backend(self) -> IdentifierSettings:
        if sum(self.backends.values()) <= 0:
            raise ValueError("at least one backend needs a weight above 0")
        return self


class GatewaySettings(_Strict):
    """`user_config` of the Gateway deployment."""

    models: Annotated[dict[str, IdentifierSettings], Field(min_length=1)]
    # Maximum wait for a limiter. On another machine, a new limiter starts 3 s after `limiter_lease_s`.
    admit_timeout_s: Seconds = 30.0
    settle_timeout_s: Seconds = 0.5  # the last chunk's maximum wait for the ledger; then its settlement is spooled
    queue_timeout_s: Seconds = 120.0  # from admission to the first token's prefill
    keep_alive_s: Seconds = 10.0
    early_reply_s: Seconds = 3.0  # a non-streamed reply begins after this time
    line_feed_s: Seconds = 1.0  # after that, the reply sends a line feed at this interval until it is complete
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * 1024 * 1024
    max_body_items: Annotated[int, Field(ge=1000)] = 100_000  # values in one body
    body_timeout_s: Seconds = 30.0  # a request whose body is not complete by then is rejected
    # Total bytes of the bodies being read and parsed. One key may use an eighth, or one body of maximum size.
    bodies_max_bytes: Annotated[int, Field(ge=1024 * 1024)] = 128 * 1024 * 1024
    spool_max_bytes: Annotated[int, Field(ge=4096)] = 64 * 1024 * 1024
    # Requests to /models, /user and /account per key and gateway; four times as many per account.
    queries_per_minute: Annotated[int, Field(ge=1)] = 60
    # The share of traces to keep, and the duration from which a request is slow and its trace is always kept.
    trace_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    trace_slow_s: Seconds = 30.0
    request_log: bool = True  # one line per request in `logs` of the state folder
    # Accounts whose prompts and replies are logged, for temporary use by an operator.
    logged_texts: Annotated[list[str], Field(max_length=100)] = []
    # Proxies in front that append to x-forwarded-for: 0 for Ray Serve's HAProxy, 1 for a Kubernetes ingress.
    trusted_proxies: Annotated[int, Field(ge=0, le=16)] = 0


class LimiterSettings(_Strict):
    """`user_config` of the Limiter deployment and of each of its shards."""

    contract: Contract = Contract()  # default for accounts without individual limits
    pressure: Tuning = Tuning()  # how limits follow the load of the replicas


class GatewayArgs(_Strict):
    """`args` of the gateway application."""

    home: Path | None = None  # state folder; default: SERVE_APP_HOME, else .serve-app in the working directory
    # Default: SERVE_APP_DATABASE_URL, else (on one machine: `keeps_local_state`) SQLite in the state folder.
    database_url: str | None = None
    # Timeout of an operation on PostgreSQL; its connection is then closed. Shorter than the maximum for a commit.
    database_timeout_s: Annotated[float, Field(ge=2, le=20)] = 10.0
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = "USD"
    lease_s: Annotated[float, Field(gt=1)] = 10.0  # a gateway that is silent for this time loses its holds
    # Time that a successor waits for a silent limiter. Gateways need half of this time to post their holds. While the
    # ledger is unavailable, the holder of the lease continues for `outage_grace_s` longer.
    limiter_lease_s: Annotated[float, Field(ge=10)] = 20.0
    outage_grace_s: Annotated[float, Field(ge=0)] = 0.0
    key_staleness_s: Annotated[float, Field(ge=1)] = 5.0  # keys get 503 if no change could be read for this time
    orphan_delay_s: Seconds = 2.0  # a replica settles for a dead gateway after this time
    # Number of processes that share the accounts. Change limiter_shards only while the service is stopped.
    limiter_shards: Annotated[int, Field(ge=1, le=64)] = 1
    accounting_shards: Annotated[int, Field(ge=1, le=64)] = 1
    # Interval between checks of the books. Each continues from the previous one. A missing check triggers an alert.
    books_check_s: Annotated[float, Field(ge=60, le=1800)] = 900.0
    # Replies that one account keeps for retries with idempotency keys, for at most a day. The oldest are evicted first.
    stored_replies: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    stored_reply_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024 * 1024
    # For `/account/alerts`; must match the console: whether it has `mail`, and its `private_webhooks`.
    alert_mail: bool = False
    private_webhooks: bool = False

    @model_validator(mode="after")
    def _lease_outlives_orphans(self) -> GatewayArgs:
        if self.lease_s < self.orphan_delay_s + 2:
            # The hold must protect a dead gateway's charge until its replica has settled it.
            raise ValueError(f"lease_s must be at least 2 s above orphan_delay_s, which is {self.orphan_delay_s}")
        return self

    def state_dir(self) -> Path:
        """Returns the state folder. Creates it if it is missing."""
        path = self.home or home_dir()
        path.mkdir(parents=True, exist_ok=True)
        return path

    def ledger_url(self) -> str:
        """Returns the ledger's SQLAlchemy URL.

        Raises SettingsError if it is missing on a cluster or is a template's placeholder.
        """
        configured = self.database_url or os.environ.get("SERVE_APP_DATABASE_URL", "").strip()
        if configured:
            if is_placeholder(configured):
                raise SettingsError(
                    "SERVE_APP_DATABASE_URL: still the placeholder of a template; write the database's address: "
                    "postgresql+psycopg://USER:PASSWORD@HOST:5432/DATABASE"
                )
            return configured
        if not keeps_local_state():
            # A SQLite ledger would exist only on this node, and would be lost with its disk.
            raise SettingsError(
                "SERVE_APP_DATABASE_URL: not set; write the address of the PostgreSQL database that holds the ledger, "
                "or set SERVE_APP_LOCAL_STATE=1 if the whole service runs on this one machine"
            )
        return f"sqlite:///{self.state_dir().absolute() / 'ledger.db'}"


class MailSettings(_Strict):
    """The server that sends the console's e-mail. A password is in SERVE_APP_SMTP_PASSWORD."""

    host: str
    port: Annotated[int, Field(ge=1, le=65535)] = 587
    sender: Annotated[str, Field(pattern=r"^[^@\s<>]+@[^@\s<>]+$")]  # the sender's address
    starttls: bool = True  # the certificate must be trusted by this machine or be in SSL_CERT_FILE
    user: str = ""  # empty: no login


class OpenIdSettings(_Strict):
    """An OpenID Connect provider for signing in to the console. Its secret is in SERVE_APP_OIDC_SECRET."""

    issuer: Annotated[str, Field(pattern=r"^(https://[^\s?#]+|http://127\.0\.0\.1(:\d+)?[^\s?#]*)$")]
    client_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1, max_length=60)] = "single sign-on"  # its name on the pages


class ConsoleArgs(_Strict):
    """`args` of the console's application. `home` and `accounting_shards` must equal the gateway's."""

    home: Path | None = None
    accounting_shards: Annotated[int, Field(ge=1, le=64)] = 1
    trusted_proxies: Annotated[int, Field(ge=0, le=16)] = 0  # as in the gateway's settings
    mail: MailSettings | None = None  # None: alerts go only to webhooks
    # Maximum credit that one operator may grant alone, in units of the currency. More needs a second operator.
    credit_alone: str = "100.00"
    private_webhooks: bool = False  # alerts may go to http and to addresses that are not public
    openid: OpenIdSettings | None = None  # None: people sign in only with passwords

    @field_validator("credit_alone")
    @classmethod
    def _is_amount(cls, value: str) -> str:
        parse_amount(value)
        return value

    def state_dir(self) -> Path:
        """Returns the state folder. Creates it if it is missing."""
        path = self.home or home_dir()
        path.mkdir(parents=True, exist_ok=True)
        return path


class ModelArgs(EngineSettings):
    """`args` of a model application: the engine's settings. `model: bundled` is the model shipped with the service."""

    engine: str = "native"  # a name in ENGINES
    vllm: VllmSettings = VllmSettings()  # options of engine vllm; each engine's options have its name
    # The replicas' Python. Default of engine vllm: SERVE_APP_VLLM_PYTHON, else the Python of `make engine-vllm`.
    interpreter: Path | None = None
    tool_format: str = "auto"  # the model's tool-call format, a name in TOOL_FORMATS; auto: by its template
    cost_per_hour: Annotated[float, Field(ge=0)] = 0.0  # of one replica, in units of the currency; only for dashboards
    reasoning: Literal["auto", "none"] = "auto"  # whether to separate reasoning from the text; auto: by its template
    # Replica that gets a call: the less busy of two, or the replica that knows its conversation, if it has room.
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
            if other != "native":  # also a setting of the native engine
                raise ValueError(
                    f"{other}: these settings belong to another engine: write engine: {other}, or remove them"
                )
        if (wrong := ENGINES[self.engine].problem(self, self.options)) is not None:
            raise ValueError(wrong)
        return self

    @property
    def options(self) -> Any:
        """The settings that are specific to the engine; None if there are none."""
        return None if self.engine == "native" else getattr(self, self.engine)

    def python(self) -> str | None:
        """Returns the interpreter of the replicas; None for the service's interpreter."""
        if self.interpreter is not None:
            return str(self.interpreter.expanduser().absolute())
        return ENGINES[self.engine].python()


def home_dir() -> Path:
    """Returns the state folder: SERVE_APP_HOME, else `.serve-app` in the working directory."""
    return Path(os.environ.get("SERVE_APP_HOME") or ".serve-app").expanduser().absolute()


def keeps_local_state() -> bool:
    """Returns whether secrets and ledger may be files on this machine.

    This is the case if SERVE_APP_LOCAL_STATE is 1, as the launcher sets it. Nothing else proves it: a cluster's first
    node is also alone for a while.
    """
    return os.environ.get("SERVE_APP_LOCAL_STATE") == "1"


def is_placeholder(value: str) -> bool:
    """Returns whether a secret or an address is a template's placeholder, such as REPLACE_ME or change-me."""
    letters = "".join(filter(str.isalnum, value)).casefold()
    return any(word in letters for word in ("replaceme", "changeme"))


def read_config(path: Path) -> dict[str, Any]:
    """Reads a config file without validating its content. Raises SettingsError."""
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
    """Returns one line for each problem."""
    return [
        f"{'.'.join([*where, *map(str, problem['loc'])])}: "
        + ("unknown key" if problem["type"] in UNKNOWN_KEY else problem["msg"])
        for problem in error.errors(include_url=False, include_context=False)
    ]
