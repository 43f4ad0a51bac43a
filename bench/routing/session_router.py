"""Adapts Serve's session router, which expects Serve's own request type, to our requests."""

from __future__ import annotations

from ray.serve._private.request_router.common import PendingRequest
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from serve_app.gateway.conversations import conversation_key


class SessionRouter(ConsistentHashRouter):
    """Uses a ring of hashes. A session is a conversation."""

    def _routing_key(self, pending_request: PendingRequest | None) -> str | None:
        if pending_request is None or not pending_request.args:
            key: str | None = super()._routing_key(pending_request)
            return key
        call = pending_request.args[0]
        return conversation_key(call.bill.account_id, call.messages).hex()
