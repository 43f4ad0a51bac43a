"""Typed and validated settings of the service. An unknown key or a bad value raises an error that names its path.

Changing an application's `args` restarts the application. Changing a deployment's `user_config` applies to the running
service.
"""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from serve_app.contracts.billing import Seller
from serve_app.contracts.limits import Contract
from serve_app.contracts.money import Price, parse_amount, price_per_million
from serve_app.contracts.served import check_aliases
from serve_app.engine.config import EngineSettings
from serve_app.engine.engines import ENGINES
from serve_app.engine.vllm_adapter.vllm_settings import VllmSettings
from serve_app.limiter.pressure import Tuning
from serve_app.model.tools.format_table import TOOL_FORMATS

Settings = TypeVar("Settings", bound=BaseModel)
UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")  # pydantic's error types, of models and dataclasses


class SettingsError(ValueError):
    """Invalid settings. The message has one line per problem, which begins with the path of the setting."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


Seconds = Annotated[float, Field(gt=0)]


class PriceSettings(_Strict):
    """Prices in the service's currency, as decimal strings with at most three decimals.

    Every charge is then a whole number of nano-units.
    """

    input: str
    """Price per million prompt tokens that are not cached."""
    cached_input: str
    """Price per million prompt tokens that are cached."""
    output: str
    """Price per million generated tokens."""

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

    backends: dict[str, Annotated[int, Field(ge=0)]]
    """Application name → weight. Several backends share the traffic; weight 0 gets none. `application:adapter` is an
    adapter of a vLLM backend."""
    price: PriceSettings
    """The identifier's price."""
    first_token_target_s: Seconds = 5.0
    """Target for the time to the first token, in seconds. Replies that meet this target and `output_token_target_s`
    count as goodput; alerts watch the share of the others."""
    output_token_target_s: Seconds = 0.2
    """Target for the mean time per output token of a reply, in seconds."""
    context_length: Annotated[int, Field(ge=1)] = 32768
    """Maximum tokens of prompt and reply together."""
    max_output: Annotated[int, Field(ge=1)] = 4096
    """Maximum tokens of a reply."""
    recommended_temperatures: dict[str, Annotated[float, Field(ge=0, le=2)]] = {}
    """Purpose → temperature, shown in `/models` as a recommendation."""
    fallback: str | None = None
    """Backend that replies while the weighted backends have no capacity."""
    aliases: list[str] = []
    """Further names that clients may send, such as `gpt-4o-mini`. An alias with `*` at its end stands for all names
    with this beginning: `claude-*` for names that begin with `claude-`. Requests are billed, limited and logged as the
    identifier's."""

    @model_validator(mode="after")
    def _some_backend(self) -> IdentifierSettings:
        if sum(self.backends.values()) <= 0:
            raise ValueError("at least one backend needs a weight above 0")
        return self


class GatewaySettings(_Strict):
    """`user_config` of the deployment Gateway."""

    models: Annotated[dict[str, IdentifierSettings], Field(min_length=1)]
    """Identifier that clients use → its backends, price and limits."""
    admit_timeout_s: Seconds = 30.0
    """Maximum wait for the limiter, in seconds. Keep it above `limiter_lease_s` plus 3 s, the time that a limiter needs
    to restart on another machine."""
    settle_timeout_s: Seconds = 0.5
    """Maximum time that the last chunk waits for the ledger, in seconds. Then the settlement goes to the spool."""
    queue_timeout_s: Seconds = 120.0
    """Maximum time from admission to the start of the prompt's computation, in seconds. Then the request gets 503."""
    keep_alive_s: Seconds = 10.0
    """Interval of the comments that a stream sends while it waits for the next token, in seconds."""
    early_reply_s: Seconds = 3.0
    """Seconds after which the gateway sends the headers of a non-streamed reply that is not complete yet."""
    line_feed_s: Seconds = 1.0
    """Interval of the line feeds that a response started by `early_reply_s` sends until the reply is complete, in
    seconds."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * 1024 * 1024
    """Maximum bytes of a request's body."""
    max_body_items: Annotated[int, Field(ge=1000)] = 100_000
    """Maximum number of values in a body, counted by brackets and commas outside of strings. Each message counts as
    three values. A longer context allows more messages, so raise this setting together with `context_length`."""
    body_timeout_s: Seconds = 30.0
    """Maximum time until a body is complete, in seconds. Then the request gets 408. A slow body gets 408 earlier: after
    5 s plus one second for each 2 KiB received."""
    bodies_max_bytes: Annotated[int, Field(ge=1024 * 1024)] = 128 * 1024 * 1024
    """Maximum total bytes of the bodies that a gateway reads and parses at the same time, not counting the first 64 KiB
    of each. A key that exceeds an eighth (or `max_body_bytes`, if larger) gets 429. Above the total, requests get
    503."""
    spool_max_bytes: Annotated[int, Field(ge=4096)] = 64 * 1024 * 1024
    """Maximum bytes of the spool; a settlement takes about 400. Requests get 503 while the spool is full."""
    queries_per_minute: Annotated[int, Field(ge=1)] = 60
    """Maximum requests to `/models` and `/user/*` per API key, and to `/account` per management key. An account may
    send four times as many. Requests that count or convert tokens are limited separately, to ten times this number.
    Each gateway counts separately. Requests for replies are not counted."""
    trace_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of traces to keep."""
    trace_slow_s: Seconds = 30.0
    """Duration from which a request is slow and its trace is always kept, in seconds."""
    request_log: bool = True
    """Whether the gateway logs one line per request in `logs` of the state folder."""
    logged_texts: Annotated[list[str], Field(max_length=100)] = []
    """Ids of accounts whose prompts and replies are logged. Use it temporarily."""
    stored_responses_s: Annotated[float, Field(ge=0, le=30 * 86400)] = 86400.0
    """Seconds for which a response of `/responses` can be read and continued. 0: none is stored."""
    unstored_accounts: Annotated[list[str], Field(max_length=10_000)] = []
    """Ids of accounts whose responses are not stored, whatever their requests say."""
    trusted_proxies: Annotated[int, Field(ge=0, le=16)] = 0
    """Number of proxies in front that append to `x-forwarded-for`: 0 for Ray Serve's HAProxy, 1 for a Kubernetes
    ingress."""

    @model_validator(mode="after")
    def _aliases_are_clear(self) -> GatewaySettings:
        check_aliases({identifier: model.aliases for identifier, model in self.models.items()})
        return self


class LimiterSettings(_Strict):
    """`user_config` of the deployment Limiter and of each of its shards."""

    contract: Contract = Contract()
    """Default limits of an account."""
    pressure: Tuning = Tuning()
    """Control of limits by the load of the replicas."""


class _StateArgs(_Strict):
    home: Path | None = None
    """State folder. Default: `SERVE_APP_HOME`, else `.serve-app` in the working directory."""

    def state_dir(self) -> Path:
        """Returns the state folder. Creates it, accessible only to its owner, if it is missing."""
        path = self.home or home_dir()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path


_PAGE_ADDRESS: Final = r"^(https?://[^\s<>]+)?$"


class BrandSettings(_Strict):
    """Name, look and links of the product on its pages."""

    name: Annotated[str, Field(min_length=1, max_length=40)] = "serve-app"
    """The product's name."""
    logo: Path | None = None
    """File of the logo, an SVG or a PNG, square. Default: a built-in icon."""
    accent: Annotated[str, Field(pattern=r"^#[0-9a-fA-F]{6}$")] = "#066fd1"
    """Colour of buttons and links, as `#RRGGBB`. White text must be legible on it."""
    terms_url: Annotated[str, Field(pattern=_PAGE_ADDRESS)] = ""
    """Address of your terms of service. Each link that you set in `brand` appears below every public page."""
    privacy_url: Annotated[str, Field(pattern=_PAGE_ADDRESS)] = ""
    """Address of your privacy policy."""
    contact: Annotated[str, Field(pattern=rf"{_PAGE_ADDRESS}|^[^@\s<>]+@[^@\s<>]+$")] = ""
    """E-mail address, or address of a page, for questions."""
    status_url: Annotated[str, Field(pattern=_PAGE_ADDRESS)] = ""
    """Address of your status page."""

    def links(self) -> list[tuple[str, str]]:
        """Returns names and addresses of the operator's pages."""
        contact = self.contact if not self.contact or "://" in self.contact else f"mailto:{self.contact}"
        pages = {"Terms": self.terms_url, "Privacy": self.privacy_url, "Contact": contact, "Status": self.status_url}
        return [(name, address) for name, address in pages.items() if address]

    @field_validator("logo")
    @classmethod
    def _is_picture(cls, value: Path | None) -> Path | None:
        if value is not None and (value.suffix not in (".svg", ".png") or not value.is_file()):
            raise ValueError("must be the path of an .svg or .png file that exists")
        return value


class GatewayArgs(_StateArgs):
    """`args` of the gateway application."""

    database_url: str | None = None
    """The ledger's SQLAlchemy URL. Default: `SERVE_APP_DATABASE_URL`, else (on one machine) SQLite in the state
    folder."""
    database_timeout_s: Annotated[float, Field(ge=2, le=20)] = 10.0
    """Timeout of a call to PostgreSQL, in seconds. The service then closes the connection."""
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = "USD"
    """Currency of the ledger, its accounts and prices (ISO 4217). It is fixed when the ledger is created, because
    amounts cannot be converted; the service does not start with a different value."""
    lease_s: Annotated[float, Field(gt=1)] = 10.0
    """Seconds of silence after which a gateway loses its holds."""
    limiter_lease_s: Annotated[float, Field(ge=10)] = 20.0
    """Seconds that a new limiter waits for a predecessor that does not respond. It admits requests 3 s later, when
    gateways have sent it their holds."""
    outage_grace_s: Annotated[float, Field(ge=0)] = 0.0
    """Additional seconds for which the limiter admits requests while the ledger is unavailable. A new limiter waits for
    the same additional time."""
    key_staleness_s: Annotated[float, Field(ge=1)] = 5.0
    """Maximum time, in seconds, since the limiter last read the changes of keys and accounts. After that, requests get
    503. To serve requests during ledger outages, raise it together with `outage_grace_s`; a key that is revoked just
    before or during an outage then works until the outage ends."""
    orphan_delay_s: Seconds = 2.0
    """Seconds from the loss of a request's gateway until the replica settles the request itself."""
    limiter_shards: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of limiter processes that share the accounts. Change it only while the service is stopped."""
    accounting_shards: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of accounting processes that share the accounts."""
    books_check_s: Annotated[float, Field(ge=60, le=1800)] = 900.0
    """Interval between checks of the books, in seconds. Each check continues from the last one. Its result is a metric;
    an alert fires for problems and for a missing check."""
    stored_replies: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Maximum stored replies per account for retries with idempotency keys, and maximum stored responses of
    `/responses`. Replies are kept for at most a day; the oldest are evicted first."""
    stored_reply_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024 * 1024
    """Maximum bytes of the stored replies per account, and of its stored responses."""
    alert_mail: bool = False
    """Whether `/account/alerts` accepts e-mail addresses. Set it to true if the console has `mail`: the gateway does
    not read the console's settings."""
    private_webhooks: bool = False
    """Whether `/account/alerts` also accepts plain http, any port, and addresses that are not public. Must equal the
    console's setting."""
    brand: BrandSettings = BrandSettings()
    """Name, look and links of the product on the pages below `/docs`. Should equal the console's setting."""

    @model_validator(mode="after")
    def _lease_outlives_orphans(self) -> GatewayArgs:
        if self.lease_s < self.orphan_delay_s + 2:
            # A dead gateway's hold must last until the model replica has settled the request.
            raise ValueError(f"lease_s must be at least 2 s above orphan_delay_s, which is {self.orphan_delay_s}")
        return self

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
    """The server that sends the console's e-mail. Its password, if any, is in SERVE_APP_SMTP_PASSWORD."""

    host: str
    """Host name of the SMTP server."""
    port: Annotated[int, Field(ge=1, le=65535)] = 587
    """Port of the SMTP server."""
    sender: Annotated[str, Field(pattern=r"^[^@\s<>]+@[^@\s<>]+$")]
    """The sender's address."""
    starttls: bool = True
    """Whether to use STARTTLS. The server's certificate must be trusted by this machine or be in `SSL_CERT_FILE`."""
    user: str = ""
    """User name for the login; empty: no login."""


class OpenIdSettings(_Strict):
    """An OpenID Connect provider for signing in to the console. Its secret is in SERVE_APP_OIDC_SECRET."""

    issuer: Annotated[str, Field(pattern=r"^(https://[^\s?#]+|http://127\.0\.0\.1(:\d+)?[^\s?#]*)$")]
    """The provider's https address; its configuration is at `/.well-known/openid-configuration` below it."""
    client_id: Annotated[str, Field(min_length=1)]
    """The console's id at the provider."""
    name: Annotated[str, Field(min_length=1, max_length=60)] = "single sign-on"
    """The provider's name on the pages."""


class SellerSettings(_Strict):
    """The company that issues statements and invoices, as PDF."""

    name: Annotated[str, Field(max_length=100)] = ""
    """The company's name. Default: the name of `brand`."""
    address: Annotated[str, Field(max_length=500)] = ""
    """The company's address, with line breaks."""
    tax_id: Annotated[str, Field(max_length=40)] = ""
    """The company's tax ID."""
    email: Annotated[str, Field(max_length=200)] = ""
    """E-mail address for questions about invoices."""
    font: Path | None = None
    """TrueType font of the documents. Default: Helvetica, which has only Western European letters; `?` replaces other
    letters."""

    @field_validator("font")
    @classmethod
    def _is_font(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_file():
            raise ValueError("must be the path of a TrueType font that exists")
        return value

    def issuer(self, brand: BrandSettings) -> Seller:
        font = None if self.font is None else str(self.font)
        return Seller(self.name or brand.name, self.address, self.tax_id, self.email, font)


class ConsoleArgs(_StateArgs):
    """`args` of the console application. `home` and `accounting_shards` must equal the gateway's."""

    accounting_shards: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of accounting processes, as in the gateway's `args`."""
    trusted_proxies: Annotated[int, Field(ge=0, le=16)] = 0
    """Number of proxies in front, as in the gateway's `user_config`."""
    mail: MailSettings | None = None
    """Server for e-mail. Without it, alerts go only to webhooks."""
    credit_alone: str = "100.00"
    """Maximum credit that one operator may grant alone in 24 hours, in units of the currency. More needs a second
    operator."""
    private_webhooks: bool = False
    """Whether webhooks may use http and addresses that are not public. Allow it only if all accounts are yours."""
    openid: OpenIdSettings | None = None
    """OpenID Connect provider. Without it, users sign in only with passwords."""
    url: Annotated[str, Field(pattern=r"^(https?://[^\s?#]+[^\s?#/])?$")] = ""
    """The console's public address, such as `https://example.com/console`, for links in e-mail: resets of passwords,
    sign-up and invitations. Without it, the console mails no links."""
    signup: Literal["closed", "invited", "open"] = "invited"
    """Who may become a new user: `closed`: people whom an operator invites; `invited`: also people whom an account's
    owner invites; `open`: everyone who confirms an e-mail address and thus gets a new account. `open` needs `mail` and
    `url`."""
    signup_credit: str = "0"
    """Credit that an account gets at sign-up, in units of the currency."""
    signup_credit_per_day: str = "0"
    """Maximum total of the credit that accounts get at sign-up in 24 hours. Accounts beyond it start without credit."""
    brand: BrandSettings = BrandSettings()
    """Name, look and links of the product."""
    seller: SellerSettings = SellerSettings()
    """Company on statements and invoices."""

    trace_url: Annotated[str, Field(pattern=r"^(https?://\S*\{trace_id\}\S*)?$")] = ""
    """Address of a trace in your tracing system, with `{trace_id}`. For operators, the page of a request then links to
    it."""

    @field_validator("credit_alone", "signup_credit", "signup_credit_per_day")
    @classmethod
    def _is_amount(cls, value: str) -> str:
        parse_amount(value)
        return value

    @model_validator(mode="after")
    def _sign_up_can_work(self) -> ConsoleArgs:
        if self.signup == "open" and (self.mail is None or not self.url):
            raise ValueError("signup: open needs mail and url, to confirm the addresses")
        if parse_amount(self.signup_credit) > parse_amount(self.signup_credit_per_day):
            raise ValueError("signup_credit is above signup_credit_per_day: no account would get it")
        return self


class ModelArgs(EngineSettings):
    """`args` of a model application: settings of the native engine, and settings of all engines."""

    engine: str = "native"
    """Engine that computes replies: `native`, or `vllm` for GPUs."""
    vllm: VllmSettings = VllmSettings()  # each engine's options are in the field with the engine's name
    """Options of `engine: vllm`. Any other key is an engine argument of vLLM under its own name."""
    interpreter: Path | None = None
    """Python that runs the replicas. Default for `engine: vllm`: `SERVE_APP_VLLM_PYTHON`, else the Python that
    `make engine-vllm` installs."""
    tool_format: str = "auto"
    """How the model writes tool calls: `auto` (from its chat template), or `hermes` (Qwen), `llama3`, `deepseek_v3`,
    `deepseek_v31`, `mistral`, `mistral_named`, `plain`."""
    cost_per_hour: Annotated[float, Field(ge=0)] = 0.0
    """Cost of one replica in units of the currency, for dashboards only."""
    reasoning: Literal["auto", "none"] = "auto"
    """Whether reasoning is separated from the text: `auto` (from the chat template) or `none`."""
    routing: Literal["balanced", "conversation"] = "conversation"
    """How one of several replicas is chosen: `conversation` selects the replica that has computed the conversation,
    unless it is much busier than the others. `balanced` picks two replicas at random and selects the less busy one."""

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
            # The setting `native` turns compiled kernels on or off, so it does not hold the options of an engine.
            if other != "native":
                raise ValueError(
                    f"{other}: these settings belong to another engine: write engine: {other}, or remove them"
                )
        if (wrong := ENGINES[self.engine].problem(self, self.options)) is not None:
            raise ValueError(wrong)
        return self

    @property
    def max_adapters(self) -> int:
        """Maximum number of LoRA adapters of a replica."""
        return self.vllm.max_adapters if self.engine == "vllm" else 0

    @property
    def options(self) -> Any:
        """The settings that are specific to the engine; None if there are none."""
        return None if self.engine == "native" else getattr(self, self.engine)

    def python(self) -> str | None:
        """Returns the interpreter of the replicas; None for the service's interpreter."""
        if self.interpreter is not None:
            return str(self.interpreter.expanduser().absolute())
        return ENGINES[self.engine].python()


class ModelSettings(_Strict):
    """`user_config` of the deployment Model."""

    adapters: dict[Annotated[str, Field(pattern=r"^[\w.-]+$")], str] = {}
    """LoRA adapters of a vLLM backend: name → folder, or name on the hub. Each is a separate backend,
    `application:adapter`. They are loaded and unloaded while requests run."""


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
    return [
        f"{'.'.join([*where, *map(str, problem['loc'])])}: "
        + ("unknown key" if problem["type"] in UNKNOWN_KEY else problem["msg"])
        for problem in error.errors(include_url=False, include_context=False)
    ]
