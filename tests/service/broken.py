"""A backend that takes every call and fails: the injected fault of the service tests."""

from collections.abc import AsyncGenerator

from ray import serve
from ray.serve import Application

from deployments.reply_lines import ReplyTo, send_events
from serve_app.contracts.generation import BackendEvent, Delta, GenerateCall, Started
from tests.service.replies import SECRET


@serve.deployment(name="Broken", ray_actor_options={"num_cpus": 0})
class Broken:
    async def reply(self, call: GenerateCall, to: ReplyTo) -> str | None:
        return await send_events(self._events(call), to)

    async def _events(self, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        yield Started(7, 0)
        if "late" in call.messages[-1]["content"]:
            yield Delta("half a ", 2)
        raise RuntimeError(SECRET)


def app(_: dict[str, str]) -> Application:
    return Broken.bind()
