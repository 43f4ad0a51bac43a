"""Endpoints for an account's alerts. They require a management key of the account."""

from __future__ import annotations

import base64
from typing import Annotated, Final, Literal

from pydantic import Field

from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.once import Once
from serve_app.admin.own_account import TAG
from serve_app.admin.values import Amount, Body, Money, Reply, Time, amount_of, example
from serve_app.api import errors
from serve_app.contracts import notices
from serve_app.contracts.books import Audit
from serve_app.contracts.limiting import Identity
from serve_app.storage.sealing import of_webhooks, seal
from serve_app.webhook_address import BadAddress, pinned

endpoint = Endpoints(TAG, "managementKey")

AlertKind = Literal["balance", "day", "month", "unusual"]
_KINDS: Final = "; ".join(f"`{kind}`: {what}" for kind, what in notices.KINDS.items()) + "."


class Alert(Reply):
    """An alert: its kind, threshold and target."""

    id: str = Field(validation_alias="alert_id", examples=["alert_5b1f0c9e7a3d42868f0e1c7b2a"])
    kind: AlertKind = Field(description=_KINDS)
    threshold: Money = Field(examples=["10.00"])
    target: str = Field(
        description="E-mail address, or URL of a webhook.", examples=["https://northwind.example/alerts"]
    )
    state: str = Field(
        description="Why the alert last fired: the day (`2026-09-28`) or month (`2026-09`) in which spending reached "
        "the threshold, or `low` while the balance is below it. Empty: it has not fired, or the balance has recovered. "
        "It does not fire again for the same value.",
        examples=[""],
    )
    created_at: Time


class NewAlert(Alert):
    """A newly created alert."""

    secret: str | None = Field(
        description="Signs the webhook's messages; shown only once. null for an e-mail address.",
        examples=["whsec_Zm9yIGRvY3VtZW50YXRpb24gb25seSwgbm8gc2VjcmU="],
    )


class AlertList(Reply):
    """All alerts of the account."""

    data: list[Alert]


class CreateAlert(Body):
    """A new alert."""

    model_config = example(kind="balance", threshold="10.00", target="https://northwind.example/alerts")

    kind: AlertKind = Field(description=_KINDS)
    threshold: Amount
    target: Annotated[
        str,
        Field(
            min_length=3, max_length=500, description="The https URL of a webhook at port 443, or an e-mail address."
        ),
    ]


@endpoint("GET", "/account/alerts", "List the account's alerts", success="All alerts of the account, oldest first.")
async def list_alerts(admin: AdminServices, identity: Identity) -> AlertList:
    found = await admin.run(notices.ListAlerts(identity.account_id))
    return AlertList(data=[Alert.from_fields(one) for one in found])


@endpoint(
    "POST",
    "/account/alerts",
    "Create an alert",
    success="The new alert. The secret of a webhook is in no other reply.",
    status=201,
)
async def create_alert(
    admin: AdminServices, body: CreateAlert, identity: Identity, audit: Audit, once: Once
) -> NewAlert:
    """An account has at most 20 alerts, and they send at most 50 messages in a day (UTC)."""
    is_webhook = notices.is_webhook(body.target)
    if is_webhook:
        try:
            await pinned(body.target, private=admin.private_webhooks)
        except BadAddress as error:
            raise errors.invalid_parameters(f"target: {error}", param="target") from None
    elif not admin.alert_mail:
        raise errors.invalid_parameters(
            "target: this service sends no e-mail: use the https address of a webhook", param="target"
        )
    threshold = amount_of(body.threshold, "threshold")
    alert_id, bits = await _new_values(admin, identity, once)
    secret = f"whsec_{base64.b64encode(bits.to_bytes(32)).decode()}" if is_webhook else ""
    stored = seal(secret, admin.secret_keys, of_webhooks(identity.account_id)) if is_webhook else ""
    command = notices.CreateAlert(identity.account_id, body.kind, threshold, body.target, stored, audit, alert_id)
    return NewAlert.from_fields(await admin.run(command), secret=secret or None)


@endpoint("DELETE", "/account/alerts/{alert_id}", "Remove an alert", success="The removed alert.")
async def remove_alert(admin: AdminServices, alert_id: str, identity: Identity, audit: Audit) -> Alert:
    for one in await admin.run(notices.ListAlerts(identity.account_id)):
        if one.alert_id == alert_id:
            await admin.run(notices.RemoveAlert(identity.account_id, alert_id, audit))
            return Alert.from_fields(one)
    raise errors.not_found("this account has no such alert: list its alerts to see the ids that exist")


async def _new_values(admin: AdminServices, identity: Identity, once: Once) -> tuple[str, int]:
    """Returns the alert's id and the bits of its secret: new, or those created under the same idempotency key."""
    ids = [f"alert_{bits:064x}"[:32] for bits in once.bits("alert")]
    new, *before = zip(ids, once.bits("secret"), strict=True)
    if before:
        existing = {alert.alert_id for alert in await admin.run(notices.ListAlerts(identity.account_id))}
        return next((earlier for earlier in before if earlier[0] in existing), new)
    return new
