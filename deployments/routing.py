"""Chooses the replica for each call to a backend."""

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
from serve_app.scaling.signals import QUEUED
from serve_app.settings import ModelArgs

TOKENS_PER_REQUEST = 2048  # number of waiting prompt tokens that counts as one request
STATS_S = 1.0  # between two reports of a replica's waiting prompt tokens to Serve's controller


class ConversationRouter(RequestRouter):
    """Sends the calls of a conversation to one replica (`serve_app/gateway/conversations.py`)."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replicas to try in order, until one is not full."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # wait before all replicas are tried again
        if len(candidate_replicas) < 2:
            return [candidate_replicas]
        # Waits one iteration of the event loop, in which the calls routed before this one are sent and counted.
        await asyncio.sleep(0)
        call = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(call, GenerateCall):
            return [candidate_replicas]
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        # Each call to a replica returns its load. After some seconds without a call from this process, the load is
        # unknown and counts as 0, so the replica is tried.
        load = {
            name: (self.replica_queue_len_cache.get(replica.replica_id) or 0) + _waiting(replica)
            for name, replica in replicas.items()
        }
        beginning = conversation_key(call.bill.account_id, call.beginning)
        return [[replicas[name]] for name in replicas_for(beginning, load)]


def _waiting(replica: RunningReplica) -> int:
    """Returns the prompt tokens that wait in the replica's engine, as a number of requests."""
    return int(replica.routing_stats.get(QUEUED, 0)) // TOKENS_PER_REQUEST


@serve.deployment(
    name=ENTRANCE,
    autoscaling_config={"min_replicas": 0, "initial_replicas": 0, "max_replicas": 1},
    ray_actor_options={"num_cpus": 0},
)
class Entrance:
    """The ingress of a backend whose Model has a custom router. It has no replica and gets no calls.

    With HAProxy, Serve (ray 2.60) rejects a custom router at an ingress, because HTTP requests would bypass it.
    Backends receive no HTTP requests.
    """

    def __init__(self, model: DeploymentHandle) -> None: ...


def routed(model: serve.Deployment, settings: ModelArgs) -> Application:
    """Returns the application of a model deployment, with the router from its settings."""
    return entered(model, settings, router_of(settings.routing))


def entered(model: serve.Deployment, settings: ModelArgs, router: RequestRouterConfig | None) -> Application:
    """Returns the application of a model deployment, behind an entrance if there is a router.

    Without a router, Serve's default applies: the less busy of two random replicas.
    """
    if router is None:
        return model.bind(settings)
    return Entrance.bind(model.options(request_router_config=router).bind(settings))  # type: ignore[attr-defined]


def router_of(routing: str) -> RequestRouterConfig | None:
    """Returns the router for a backend's setting `routing`; None for Serve's default."""
    if routing == "balanced":
        return None
    # Passed by name. If it were a class, Ray would copy its module into each process that has a handle.
    return RequestRouterConfig(
        request_router_class=f"{ConversationRouter.__module__}.{ConversationRouter.__name__}",
        request_routing_stats_period_s=STATS_S,
    )
