"""The web console on Serve: a separate application, which calls Gateway and Accounting of the gateway's application."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.handles import PICKLED, AccountingHandle, answer_of
from deployments.http_server import amend_http_server
from deployments.priority import PAGES_YIELDING, yield_to_models
from serve_app import secret_files
from serve_app.console.app import build_console
from serve_app.console.landing import landing
from serve_app.console.mailer import Mailer
from serve_app.console.notifier import Notifier
from serve_app.console.openid import OpenId
from serve_app.console.payments import PaymentProvider
from serve_app.console.pressure import Pressure
from serve_app.console.recharger import Recharger
from serve_app.console.resealing import Resealing
from serve_app.console.web import Console
from serve_app.contracts.accounting_shards import AccountingShards
from serve_app.contracts.books import Audit
from serve_app.contracts.calls import shard_name
from serve_app.contracts.limiting import AccountStatus
from serve_app.contracts.money import parse_amount
from serve_app.contracts.offers import Front
from serve_app.contracts.served import Offer
from serve_app.settings import ConsoleArgs
from serve_app.storage.request_log import FOLDER, find_lines

GATEWAY = "gateway"  # the application's name


@serve.deployment(
    name="Console",
    # One process must count all sign-in attempts.
    num_replicas=1,
    max_ongoing_requests=200,
    health_check_period_s=1,
    graceful_shutdown_wait_loop_s=0.2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=15,
    ray_actor_options={"num_cpus": 0},
)
@serve.ingress()
class ConsoleIngress:
    """The Serve deployment of the console."""

    def __init__(self, args: ConsoleArgs) -> None:
        yield_to_models(PAGES_YIELDING)
        amend_http_server()
        keys = secret_files.load_secrets(args.state_dir())
        shards = [_handle(shard_name("Accounting", index)) for index in range(args.accounting_shards)]
        gateway = _handle("Gateway")
        self._identifiers = gateway.options(method_name="identifiers", **PICKLED)
        self._gateway_offers = gateway.options(method_name="offers", **PICKLED)
        self._gateway_status = gateway.options(method_name="status_of", **PICKLED)
        self._gateway_run = gateway.options(method_name="run_for_console", **PICKLED)
        self._gateway_document = gateway.options(method_name="document", **PICKLED)
        self._gateway_live = gateway.options(method_name="live", **PICKLED)
        self._console = Console(
            AccountingShards([AccountingHandle(shard) for shard in shards]),
            keys.secret_keys,
            self._models,
            self._live,
            self._status_of,
            administer=self._administer,
            document=self._document,
            trusted_proxies=args.trusted_proxies,
            has_mail=args.mail is not None,
            url=args.url,
            signup=args.signup,
            signup_credit=parse_amount(args.signup_credit),
            signup_credit_per_day=parse_amount(args.signup_credit_per_day),
            private_webhooks=args.private_webhooks,
            payments=_payments(),
            credit_alone=parse_amount(args.credit_alone),
            find_lines=partial(find_lines, args.state_dir() / FOLDER),
            trace_url=args.trace_url,
            offers=self._offers,
            brand=args.brand,
            seller=args.seller.issuer(args.brand),
        )
        if args.openid is not None:
            secret = os.environ.get("SERVE_APP_OIDC_SECRET", "")
            self._console.openid = OpenId(args.openid, secret, self._console.now)
        if args.mail is not None:
            password = os.environ.get("SERVE_APP_SMTP_PASSWORD", "")
            self._console.mailer = Mailer(args.mail, password, self._console.now)
        self._notifier = Notifier(
            self._console.books,
            self._console.mailer,
            self._console.now,
            secret_keys=keys.secret_keys,
            private_webhooks=args.private_webhooks,
        )

    async def _models(self) -> list[str]:
        found: list[str] = await answer_of(self._identifiers.remote())
        return found

    async def _offers(self) -> list[Offer]:
        found: list[Offer] = await answer_of(self._gateway_offers.remote())
        return found

    async def _status_of(self, account_id: str) -> AccountStatus:
        found: AccountStatus = await answer_of(self._gateway_status.remote(account_id))
        return found

    async def _administer(self, operation: str, given: Mapping[str, Any], audit: Audit | None) -> dict[str, Any]:
        found: dict[str, Any] = await answer_of(self._gateway_run.remote(operation, given, audit))
        return found

    async def _live(self) -> dict[str, Any]:
        found: dict[str, Any] = await answer_of(self._gateway_live.remote())
        return found

    async def _document(self) -> bytes:
        found: bytes = await answer_of(self._gateway_document.remote())
        return found

    async def landing(self, front: Front) -> tuple[bytes, dict[str, str]]:
        """Returns the page at the service's root and its headers, for the gateway."""
        return landing(self._console, front)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Builds the app and starts its background tasks. Serve calls this once, after the constructor."""
        watching: list[Notifier | Pressure | Recharger | Resealing] = [self._notifier, self._console.pressure]
        watching.append(Resealing(self._console.books, self._console.secret_keys))
        if self._console.payments is not None:
            watching.append(Recharger(self._console.books, self._console.payments))
        self._watching = [asyncio.create_task(one.run()) for one in watching]
        return build_console(self._console)


def _payments() -> PaymentProvider | None:
    """Returns Stripe if the environment has its secrets, else None."""
    key, secret = (os.environ.get(f"SERVE_APP_STRIPE_{name}", "") for name in ("KEY", "WEBHOOK_SECRET"))
    if not key or not secret:
        return None
    from serve_app.console.stripe_payments import Stripe  # loads a large library

    return Stripe(key, secret)


def _handle(deployment: str) -> DeploymentHandle:
    """Returns a handle in the gateway's application, which may start later than this one."""
    return serve.get_deployment_handle(deployment, app_name=GATEWAY, _check_exists=False)
