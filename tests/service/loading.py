"""A backend whose weights take as long to load as the test wants: until there is a file `loaded` in the home."""

import asyncio
from collections.abc import AsyncGenerator

from ray import serve
from ray.serve import Application

from deployments.reply_lines import ReplyTo, send_events
from serve_app.contracts.generation import BackendEvent, Delta, Finished, FinishReason, GenerateCall, Started
from serve_app.settings import home_dir


@serve.deployment(name="Loading", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=100)
class Loading:
    async def __init__(self) -> None:
        while not (home_dir() / "loaded").exists():
            await asyncio.sleep(0.2)

    async def reply(self, call: GenerateCall, to: ReplyTo) -> str | None:
        return await send_events(self._events(call), to)

    async def _events(self, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        yield Started(7, 0)
        yield Delta("loaded", 1)
        yield Finished(FinishReason.STOP, 7, 0, 1)


def app(_: dict[str, str]) -> Application:
    return Loading.bind()
