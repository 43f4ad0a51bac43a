"""Adapts Serve's prefix router, which expects Serve's own request type, to our requests."""

from __future__ import annotations

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve._private.request_router.common import PendingRequest


class PrefixRouter(PrefixCacheAffinityRouter):
    """Uses a tree of prompts in an actor. A prompt is prefixed with its account."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        call = pending_request.args[0]
        return call.bill.account_id + str(self._normalize_prompt_to_string(list(call.messages)))
