"""Endpoints for an account's API keys. They require a management key of the account."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.keys import CreateKey, Key, KeyChanges, KeyList, NewKey, terms_of
from serve_app.admin.once import Once
from serve_app.admin.own_account import TAG
from serve_app.admin.values import Body, example
from serve_app.api import errors
from serve_app.contracts import commands
from serve_app.contracts.books import Audit, KeySnapshot
from serve_app.contracts.errors import KeyNotFound
from serve_app.contracts.key_format import digest, hint, new_key
from serve_app.contracts.limiting import Identity

endpoint = Endpoints(TAG, "managementKey")

ONE = "/account/keys/{key_id}"


class RotateKey(Body):
    """How the old key ends."""

    model_config = example(overlap_hours=48)

    overlap_hours: Annotated[
        int, Field(ge=0, le=168, description="Hours during which the old key keeps working; 0 revokes it at once.")
    ] = 24


@endpoint("GET", "/account/keys", "List the account's API keys", success="All keys of the account, oldest first.")
async def list_own_keys(admin: AdminServices, identity: Identity) -> KeyList:
    """The list includes revoked and expired keys."""
    keys = await admin.run(commands.ListKeys(identity.account_id))
    return KeyList(data=[Key.from_snapshot(admin.now(), key) for key in keys])


@endpoint(
    "POST",
    "/account/keys",
    "Create an API key",
    success="The new key. Store its text now: only a repeated call with the same `idempotency-key` returns it again.",
    status=201,
)
async def create_own_key(admin: AdminServices, body: CreateKey, identity: Identity, audit: Audit, once: Once) -> NewKey:
    """Your account pays for all requests with the key, and the limits of the account apply as well.

    An account has at most 1,000 active keys.
    """
    terms = terms_of(admin, body)
    terms.pop("name", None)
    key = await _key_of(admin, once, "key")
    creation = commands.CreateKey(identity.account_id, body.name, digest(key), hint(key), terms, audit)
    made = await admin.run(creation)
    return NewKey.from_snapshot(admin.now(), made, key=key)


@endpoint("GET", ONE, "Show an API key", success="The key, without its text.")
async def show_own_key(admin: AdminServices, key_id: str, identity: Identity) -> Key:
    found, _ = await _own(admin, identity, key_id)
    return Key.from_snapshot(admin.now(), found)


@endpoint("PATCH", ONE, "Change an API key's restrictions", success="The changed key.")
async def update_own_key(admin: AdminServices, key_id: str, body: KeyChanges, identity: Identity, audit: Audit) -> Key:
    """A new budget also counts what the key has spent in the current period.

    null for `budget` removes its period as well.
    """
    await _own(admin, identity, key_id)
    changed = await admin.run(commands.UpdateKey(key_id, terms_of(admin, body), audit))
    return Key.from_snapshot(admin.now(), changed)


@endpoint("DELETE", ONE, "Revoke an API key", success="The revoked key.")
async def revoke_own_key(admin: AdminServices, key_id: str, identity: Identity, audit: Audit) -> Key:
    """A revoked key stays revoked. Requests with it are refused within a second. A repeated call changes nothing."""
    await _own(admin, identity, key_id)
    return Key.from_snapshot(admin.now(), await admin.run(commands.RevokeKey(key_id, audit)))


@endpoint(
    "POST",
    f"{ONE}/rotate",
    "Replace an API key with a new one that has the same limits",
    success="The new key. Store its text now: only a repeated call with the same `idempotency-key` returns it again.",
    status=201,
)
async def rotate_own_key(
    admin: AdminServices, key_id: str, body: RotateKey, identity: Identity, audit: Audit, once: Once
) -> NewKey:
    """The new key has the name and all restrictions of the old key, except the expiry.

    The old key ends after the overlap or at its own expiry, whichever is earlier.
    """
    key = await _key_of(admin, once, f"rotate {key_id}")
    until = admin.now() + body.overlap_hours * 3600.0
    command = commands.RotateKey(identity.account_id, key_id, digest(key), hint(key), until, audit)
    return NewKey.from_snapshot(admin.now(), await admin.run(command), key=key)


async def _key_of(admin: AdminServices, once: Once, what: str) -> str:
    """Returns a new key, or the key created earlier under the same idempotency key."""
    key, *before = (new_key(bits=bits) for bits in once.bits(what))
    for earlier in before:
        if await admin.run(commands.FindKeys((digest(earlier),))):
            return earlier
    return key


async def _own(admin: AdminServices, identity: Identity, key_id: str) -> tuple[KeySnapshot, list[KeySnapshot]]:
    """Returns the key and all keys of the account. Raises 404 for an unknown key and for a key of another account."""
    keys = await admin.run(commands.ListKeys(identity.account_id))
    for key in keys:
        if key.key_id == key_id:
            return key, keys
    raise errors.not_found(str(KeyNotFound(key_id)))
