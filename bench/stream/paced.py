"""An engine that emits tokens at a fixed rate, and two applications with it: our service, and bare Ray Serve.

Only the model is replaced. Each step gives one token to every running stream, like a step on a GPU, and events are
delivered as in our own engine.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve import Application

from bench.harness.stub_request import BACKEND
from deployments import model
from serve_app.contracts.generation import Delta, Event, Finished, FinishReason, SamplingParams, Started
from serve_app.engine.delivery import LoopSink, Outbox
from serve_app.engine.port import EngineStats, Promise, Sample
from serve_app.engine.request import GenerationRequest
from serve_app.settings import ModelArgs, parse

RATE: Final = "SERVE_APP_BENCH_RATE"  # tokens per second of each stream, in the environment
TOKEN: Final = "token "  # the text of every token
MAX_STREAMS: Final = 2048
CONTEXT: Final = 32768


class PacedChat:
    """Replaces the chat template and the tokenizer. Each byte of a prompt is a token."""

    template = None

    def text(
        self, messages: Sequence[dict[str, Any]], continue_final: bool = False, tools: Any = None, variables: Any = ()
    ) -> str:
        return "".join(message["content"] for message in messages)

    def literal(self, value: Any, spared: Any = ()) -> Any:
        return value

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())


class _Stream:
    def __init__(self, request: GenerationRequest, sink: LoopSink) -> None:
        self.request = request
        self.sink = sink
        self.made = -1  # tokens so far; -1: not started


class PacedEngine:
    """Implements EnginePort. `rate` is the number of steps per second."""

    chat = PacedChat()
    max_context = CONTEXT
    max_running = MAX_STREAMS
    lacks: frozenset[Promise] = frozenset()
    fingerprint = "0123456789ab"

    def __init__(self, rate: float) -> None:
        self._every_s = 1 / rate
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}
        self._outbox = Outbox(self._drop)
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        sink = LoopSink(asyncio.get_running_loop())
        with self._lock:
            self._streams[request.request_id] = _Stream(request, sink)
        finished = False
        try:
            while not finished:
                event = await sink.events.get()
                finished = isinstance(event, Finished)
                yield event
        finally:
            if not finished:
                self._drop(request.request_id)

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            due = max(due + self._every_s, time.monotonic() - self._every_s)
            time.sleep(max(0.0, due - time.monotonic()))
            with self._lock:
                running = list(self._streams.items())
            for request_id, stream in running:
                self._step(request_id, stream)
            self._outbox.deliver()

    def _step(self, request_id: str, stream: _Stream) -> None:
        prompt = len(stream.request.prompt_token_ids)
        stream.made += 1
        if stream.made == 0:
            self._outbox.put(request_id, stream.sink, Started(prompt, 0))
            return
        self._outbox.put(request_id, stream.sink, Delta(TOKEN, stream.made))
        if stream.made >= stream.request.sampling.max_tokens:
            self._drop(request_id)
            self._outbox.put(request_id, stream.sink, Finished(FinishReason.LENGTH, prompt, 0, stream.made))

    def _drop(self, request_id: str) -> None:
        with self._lock:
            self._streams.pop(request_id, None)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._streams),
            waiting=0,
            kv_blocks_total=1,
            kv_blocks_used=0,
            oldest_wait_s=0.0,
            queued_prefill_tokens=0,
            steps=0,
            tokens_produced=0,
            preemptions=0,
            kv_blocks_cached=0,
            prefix_hit_tokens=0,
        )

    def samples(self) -> tuple[Sample, ...]:
        return ()

    def fingerprint_of(self, adapter: str) -> str:
        return self.fingerprint

    def set_adapters(self, adapters: Mapping[str, str]) -> None: ...

    def check_health(self) -> None: ...

    def close(self) -> None: ...


def paced_engine() -> PacedEngine:
    """Returns an engine with the rate from the environment."""
    return PacedEngine(float(os.environ[RATE]))


class Paced(model.Model.func_or_class):  # type: ignore[misc, name-defined]
    """Our model replica with this engine."""

    async def __init__(self, settings: ModelArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        model.start_engine = lambda _: paced_engine()  # type: ignore[assignment, return-value]  # in this process only
        await super().__init__(settings)


def app(_: dict[str, Any]) -> Application:
    """Builds our model's application."""
    settings = parse(ModelArgs, {"model": "paced", "max_running": MAX_STREAMS, "max_waiting": 0}, "args")
    options = {"max_ongoing_requests": MAX_STREAMS, "ray_actor_options": {"num_cpus": 0}}
    return model.Model.options(func_or_class=Paced, **options).bind(settings)  # type: ignore[no-any-return]


@serve.deployment(name="BareModel", max_ongoing_requests=MAX_STREAMS, ray_actor_options={"num_cpus": 0})
class BareModel:
    """A model that streams a generator of texts, as in Serve's guides."""

    def __init__(self) -> None:
        self._engine = paced_engine()
        self._numbers = itertools.count()

    async def generate(self, max_tokens: int) -> AsyncIterator[str]:
        request = GenerationRequest(str(next(self._numbers)), (1,), SamplingParams(max_tokens), "bare")
        async for event in self._engine.generate(request):
            if isinstance(event, Delta):
                yield event.text


def build_app() -> FastAPI:
    """Returns an app with a plain route for chat completions, and two routes that the launcher calls at the start."""
    app = FastAPI(openapi_url=None)
    handle = serve.get_app_handle(BACKEND).options(method_name="generate", stream=True)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> StreamingResponse:
        body = await request.json()

        async def events() -> AsyncIterator[str]:
            async for text in handle.remote(body["max_tokens"]):
                yield f'data: {{"choices":[{{"index":0,"delta":{{"content":"{text}"}}}}]}}\n\n'
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.get("/ready")
    @app.get("/models")
    async def ready() -> Response:
        return Response()

    return app


@serve.deployment(name="Bare", max_ongoing_requests=MAX_STREAMS, ray_actor_options={"num_cpus": 0})
@serve.ingress()
class Bare:
    """A FastAPI ingress that forwards the generator, without keys, limits and accounting."""

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called once by Serve, after the constructor."""
        return build_app()


def bare_model(_: dict[str, Any]) -> Application:
    """Builds bare Serve's model."""
    return BareModel.bind()  # type: ignore[attr-defined, no-any-return]


def bare(_: dict[str, Any]) -> Application:
    """Builds bare Serve's ingress."""
    return Bare.bind()  # type: ignore[attr-defined, no-any-return]
