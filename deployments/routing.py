"""How the calls of a backend's handles are divided among its replicas."""

from __future__ import annotations

import asyncio

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from deployments.handles import ENTRANCE
from serve_app.contracts.generation import GenerateCall
from serve_app.gateway.conversations import conversation_key, replicas_for
from serve_app.settings import ModelArgs


class ConversationRouter(RequestRouter):
    """Sends the calls of a conversation to one replica (`serve_app/gateway/conversations.py`)."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas to ask, one after the other, until one is not full."""
        # Calls that were routed in this turn of the loop are sent, and counted, in the next one.
        await asyncio.sleep(0)
        call = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # before all of them are asked again
        if not isinstance(call, GenerateCall):
            return [candidate_replicas]
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        # Unknown is a replica that got no call from here for some seconds: it is asked, and known from then on.
        running = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in replicas.items()
        }
        beginning = conversation_key(call.bill.account_id, call.messages)
        return [[replicas[name]] for name in replicas_for(beginning, running)]


@serve.deployment(
    name=ENTRANCE,
    autoscaling_config={"min_replicas": 0, "initial_replicas": 0, "max_replicas": 1},
    ray_actor_options={"num_cpus": 0},
)
class Entrance:
    """The ingress of a backend whose Model has a router of its own. It has no replica and gets no call.

    With HAProxy Serve (ray 2.60) accepts no router at an ingress, because requests from outside pass it by. A backend
    has none of these.
    """

    def __init__(self, model: DeploymentHandle) -> None: ...


def routed(model: serve.Deployment, settings: ModelArgs) -> Application:
    """The application of a model deployment with the router of its settings."""
    return entered(model, settings, router_of(settings.routing))


def entered(model: serve.Deployment, settings: ModelArgs, router: RequestRouterConfig | None) -> Application:
    """With a router, behind an entrance; without one, Serve's own: the less busy of two random replicas."""
    if router is None:
        return model.bind(settings)
    return Entrance.bind(model.options(request_router_config=router).bind(settings))  # type: ignore[attr-defined]


def router_of(routing: str) -> RequestRouterConfig | None:
    """The router for a backend's setting `routing`."""
    if routing == "balanced":
        return None
    # By its name: Ray copies the module of a class into each process that has a handle.
    return RequestRouterConfig(request_router_class=f"{ConversationRouter.__module__}.{ConversationRouter.__name__}")
