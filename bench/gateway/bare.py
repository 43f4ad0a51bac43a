"""The bare path: the same ingress, model call and reply as the service, without keys, limits and accounting.

It replies to every caller and counts nothing.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from fastapi import FastAPI, Request, Response
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from bench.harness.stub_request import BACKEND, MODEL
from deployments.handles import PICKLED, BackendHandles
from serve_app.api.chat_reply import Choice, Usage, complete_reply
from serve_app.api.chat_request import parse_chat_request
from serve_app.contracts.generation import Bill, Delta, Finished, GenerateCall, SamplingParams
from serve_app.contracts.money import Price

SERVED = {MODEL: (32768, 4096)}  # tokens of context and of output
FREE = Bill("nobody", "none", MODEL, BACKEND, Price(0, 0, 0))


def build_app() -> FastAPI:
    """Returns an app with a plain route for chat completions, and two routes that the launcher calls at the start."""
    app = FastAPI(openapi_url=None)
    backends = BackendHandles()
    model: DeploymentHandle | None = None

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        chat = parse_chat_request(await request.body(), SERVED)
        request_id, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        sampling = SamplingParams(max_tokens=chat.max_tokens or 4096, temperature=chat.temperature)
        text, finished = "", None
        nonlocal model
        if model is None:
            model = (await asyncio.to_thread(serve.get_app_handle, BACKEND)).options(
                method_name="generate", stream=True, **PICKLED
            )
        async for event in model.remote(GenerateCall(request_id, chat.messages, sampling, 0, FREE)):
            if isinstance(event, Delta):
                text += event.text
            elif isinstance(event, Finished):
                finished = event
        assert finished is not None
        body = complete_reply(
            id=request_id,
            created=created,
            model=chat.model,
            fingerprint=f"fp_{BACKEND}",
            choices=[Choice(text, finished.reason.value)],
            usage=Usage(finished.prompt_tokens, finished.completion_tokens, finished.cached_tokens),
        )
        return Response(body, media_type="application/json")

    @app.get("/ready")
    async def ready() -> Response:
        status = await backends.status()
        return Response(status_code=200 if status.get(BACKEND, {}).get("replicas") else 503)

    @app.get("/models")
    async def models() -> Response:
        return Response()

    return app


@serve.deployment(name="Bare", max_ongoing_requests=2000, ray_actor_options={"num_cpus": 0})
@serve.ingress()
class Bare:
    """The ingress process, deployed in the same way as the gateway."""

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called once by Serve, after the constructor."""
        return build_app()


def app(_: dict[str, Any]) -> Application:
    """Builds the application. The configuration names this function."""
    application: Application = Bare.bind()  # type: ignore[attr-defined]
    return application
