"""Endpoints for stored responses: read, delete, cancel, list the input. An account finds only its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from fastapi.responses import Response
from pydantic import BeforeValidator, Field

from serve_app.admin import responses
from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.values import Query, Reply
from serve_app.api import errors
from serve_app.api import responses_models as models
from serve_app.api.codec import encode_json, quote
from serve_app.api.responses_chat import StoredConversation
from serve_app.api.stored_responses import decode_stored, list_items
from serve_app.contracts import commands
from serve_app.contracts.limiting import Identity

endpoint = Endpoints("Responses", "apiKey")

MAX_ITEMS: Final = 100
RUNNING: Final = ("queued", "in_progress")
POLL_S = 0.25
CANCEL_POLLS: Final = 40  # they take 10 s: longer than a gateway needs to notice the cancellation


class DeletedResponse(Reply):
    """A response that was deleted."""

    id: str = Field(examples=["resp_5d41402abc4b2a76b9719d911017c592"])
    object: Literal["response.deleted"]
    deleted: Literal[True]


class ResponseQuery(Query):
    stream: Literal["true", "false"] | None = Field(
        None, description="Only `false`: a stored response is not streamed."
    )


class ItemsQuery(Query):
    limit: Annotated[int, BeforeValidator(lambda text: int(text) if str(text).isdecimal() else text)] = Field(
        20, ge=1, le=MAX_ITEMS, description="Maximum number of items to return."
    )
    order: Literal["asc", "desc"] = Field("desc", description="`desc`: the last item first.")
    after: str | None = Field(None, description="`last_id` of the previous page.")


@endpoint(
    "GET",
    "/responses/{response_id}",
    "Read a stored response",
    success=responses.json_response("The response as it was sent.", models.Response.__name__),
)
async def get_response(admin: AdminServices, response_id: str, query: ResponseQuery, identity: Identity) -> Response:
    if query.stream == "true":
        raise errors.invalid_parameters(
            "stream: a stored response is not streamed. Leave stream out to get the whole response", param="stream"
        )
    return await _json((await _find(admin, identity, response_id)).response)


@endpoint("DELETE", "/responses/{response_id}", "Delete a stored response", success="The id of the deleted response.")
async def delete_response(admin: AdminServices, response_id: str, identity: Identity) -> DeletedResponse:
    """A deleted response can't be restored. Cancel a response that still runs first."""
    if not await admin.run(commands.DeleteResponse(identity.account_id, response_id)):
        await _find(admin, identity, response_id)
        raise errors.invalid_parameters("response_id: the response still runs. Cancel it first", param="response_id")
    return DeletedResponse(id=response_id, object="response.deleted", deleted=True)


@endpoint(
    "POST",
    "/responses/{response_id}/cancel",
    "Cancel a response that runs in the background",
    success=responses.json_response("The response: cancelled, or already ended.", models.Response.__name__),
)
async def cancel_response(admin: AdminServices, response_id: str, identity: Identity) -> Response:
    """Only for a response with `background: true`. The call waits up to 10 seconds for the response to end.

    A response that has already ended stays as it is.
    """
    found = await admin.run(commands.CancelResponse(identity.account_id, response_id))
    if found is None:
        raise _not_found(response_id)
    if found.beat_at is None and not (await asyncio.to_thread(decode_stored, found.body)).response["background"]:
        raise errors.invalid_parameters(
            "response_id: only a response with background: true can be cancelled. To cancel another request, close its "
            "connection",
            param="response_id",
        )
    shown = await _find(admin, identity, response_id)
    for _ in range(CANCEL_POLLS):  # a response that is still running after these polls ends a little later
        if shown.response["status"] not in RUNNING:
            break
        await asyncio.sleep(POLL_S)
        shown = await _find(admin, identity, response_id)
    return await _json(shown.response)


@endpoint(
    "GET",
    "/responses/{response_id}/input_items",
    "List the items of a stored response's input",
    success=responses.json_response("A page of items.", models.ResponseItemList.__name__),
)
async def list_input_items(admin: AdminServices, response_id: str, query: ItemsQuery, identity: Identity) -> Response:
    found = await _find(admin, identity, response_id)
    page = list_items(found.items, order=query.order, after=query.after, limit=query.limit)
    if page is None:
        raise errors.invalid_parameters(f"after: the response has no item {quote(query.after or '')}", param="after")
    return await _json(page)


async def _find(admin: AdminServices, identity: Identity, response_id: str) -> StoredConversation:
    """Returns a stored response of the account. Raises ApiError (404)."""
    found = await admin.run(commands.FindResponse(identity.account_id, response_id))
    if found is None:
        raise _not_found(response_id)
    stored = await asyncio.to_thread(decode_stored, found.body)
    if found.is_lost(admin.now()):
        error = {"code": "server_error", "message": "The gateway of this response was lost. Send the request again."}
        return replace(stored, response=stored.response | {"status": "failed", "error": error})
    return stored


def _not_found(response_id: str) -> errors.ApiError:
    return errors.not_found(
        f"the response {quote(response_id)} is not stored: it does not exist, was created with store: false, has been "
        "deleted, or has expired"
    )


async def _json(value: Any) -> Response:
    return Response(await asyncio.to_thread(encode_json, value), media_type="application/json")
