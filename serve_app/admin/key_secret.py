"""What still needs the key secret before, with the operator's key: until nothing does, it must not be removed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.values import WHOLE, Count, Instant, Query, Reply
from serve_app.contracts.key_format import mark_of
from serve_app.contracts.key_secrets import ListSealed, ListUnmoved
from serve_app.contracts.sealed import is_current

endpoint = Endpoints("Operator: Keys", "operatorKey")


class UnmovedKey(Reply):
    """An active key that the present secret does not open."""

    kind: Literal["api", "management"]
    id: str = Field(validation_alias="key_id")
    account_id: str
    account_name: str
    name: str
    hint: str = Field(description="Its readable start and end.")
    created_at: Instant
    mark: str | None = Field(description="Of the secret that it is under; null: of a release that wrote none.")
    last_day: str | None = Field(
        description="On which a request with it was billed, YYYY-MM-DD, UTC; null: none, or a management key."
    )


class KeySecret(Reply):
    """Which keys and sealed secrets are under the present key secret, and which are not."""

    mark: str = Field(description="Tells the present secret from others.")
    previous_mark: str | None = Field(description="Of the one before it, where that is valid too.")
    moved: Count = Field(description="Active API and management keys that the present secret opens.")
    unmoved: Count = Field(description="Those that it does not.")
    unsealed: Count = Field(description="Secrets of one-time codes and webhooks that it does not open.")
    data: list[UnmovedKey]
    next: str | None = Field(description="`after` of the next page of `data`; null: there is none.")


class KeySecretQuery(Query):
    after: Annotated[str, Field(min_length=1, max_length=100)] | None = Field(
        None, description="`next` of the page before."
    )
    limit: Annotated[int, WHOLE] = Field(100, ge=1, le=500, description="The most keys of a page.")


@endpoint("GET", "/admin/key-secret", "What still needs the key secret before", recorded="read_key_secret")
async def show_key_secret(admin: AdminServices, query: KeySecretQuery) -> KeySecret:
    secrets = admin.key_secrets
    mark = mark_of(secrets.current)
    keys = await admin.run(ListUnmoved(mark, query.after or "", query.limit))
    return KeySecret(
        mark=mark,
        previous_mark=mark_of(secrets.previous) if secrets.previous else None,
        moved=keys.moved,
        unmoved=keys.unmoved,
        unsealed=await _unsealed(admin),
        data=[UnmovedKey.from_fields(key) for key in keys.rows],
        next=keys.next,
    )


async def _unsealed(admin: AdminServices) -> int:
    count = 0
    after: str | None = ""
    while after is not None:
        listed, after = await admin.run(ListSealed(after))
        count += sum(not is_current(one.stored, admin.key_secrets, one.purpose) for one in listed)
    return count
