"""Endpoint that counts stored secrets not yet sealed under the current secret key. It requires the operator key."""

from __future__ import annotations

from pydantic import Field

from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.values import Count, Reply
from serve_app.contracts.sealed_secrets import ListSealed
from serve_app.storage.sealing import is_current

endpoint = Endpoints("Operator: Keys", "operatorKey")


class SealedSecrets(Reply):
    """The number of stored secrets that are sealed under the current secret key, and of those that are not."""

    has_previous: bool = Field(description="Whether the previous secret key is also valid.")
    current: Count = Field(
        description="Secrets of one-time codes and webhooks that are sealed under the current key.", examples=[48]
    )
    outdated: Count = Field(
        description="Secrets that are not sealed under the current key. A running console reseals them.", examples=[3]
    )


@endpoint(
    "GET",
    "/admin/sealed-secrets",
    "Show whether the previous secret key is still needed",
    success="The number of secrets by the key that seals them.",
)
async def show_sealed_secrets(admin: AdminServices) -> SealedSecrets:
    """The previous secret key is needed while `outdated` is above 0."""
    current = outdated = 0
    after: str | None = ""
    while after is not None:
        listed, after = await admin.run(ListSealed(after))
        known = sum(is_current(one.stored, admin.secret_keys, one.purpose) for one in listed)
        current, outdated = current + known, outdated + len(listed) - known
    return SealedSecrets(has_previous=bool(admin.secret_keys.previous), current=current, outdated=outdated)
