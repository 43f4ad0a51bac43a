"""A backend without a model, whose replies stand still until the test lets them go on.

Only the engine is replaced: its replicas are those of `deployments.model`. A token of a prompt is a byte, and token
number i of a reply is the text `w<i> `. A reply ends at `max_tokens`. One whose last message is `hold NAME after N`
stands still after N tokens until there is a file `go` in the folder `held/NAME` of the state folder, where it leaves a
file under its request's id when it gets there.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray.serve import Application

from deployments import model
from serve_app.contracts.generation import Delta, Event, Finished, FinishReason, Started
from serve_app.engine.errors import QueueFull
from serve_app.engine.port import EngineStats, Promise, Sample
from serve_app.engine.request import GenerationRequest
from serve_app.settings import ModelArgs, home_dir, parse
from tests.service.replies import PLACES, prompt_text, reply

CONTEXT = 8192
PIECE = 4  # tokens of one delta
LOOK_S = 0.02


class HeldChat:
    """In the place of a chat template and a tokenizer."""

    template = None

    def text(
        self, messages: Sequence[dict[str, Any]], continue_final: bool = False, tools: Any = None, variables: Any = ()
    ) -> str:
        return prompt_text(messages)

    def literal(self, value: Any, spared: Any = ()) -> Any:
        return value

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())


class HeldEngine:
    """An EnginePort."""

    chat = HeldChat()
    max_context = CONTEXT
    max_running = PLACES
    lacks: frozenset[Promise] = frozenset()
    fingerprint = "0123456789ab"

    def __init__(self) -> None:
        self._running = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        if self._running >= PLACES:
            raise QueueFull(self._running)
        self._running += 1
        try:
            said, wanted, sampling = len(request.said), request.sampling.max_tokens, request.sampling
            prompt = bytes(request.prompt_token_ids).decode()
            hold = re.search(r"hold (\S+) after (\d+)$", prompt)
            after = int(hold[2]) if hold else wanted
            made = said
            yield Started(len(request.prompt_token_ids), 0, said=said, said_text=reply(said))
            while made < wanted:
                if hold and made == after:
                    await _stand_still(hold[1], request.request_id)
                piece = min(PIECE, wanted - made, after - made if made < after else PIECE)
                ids = tuple(range(made + 1, made + piece + 1)) if sampling.token_ids else ()
                text = reply(made + piece, made)
                made += piece
                yield Delta(text, made, token_ids=ids, is_last=sampling.token_ids and made == wanted)
                await asyncio.sleep(0)
            yield Finished(FinishReason.LENGTH, len(request.prompt_token_ids), 0, made)
        finally:
            self._running -= 1

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._running,
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

    def set_adapters(self, adapters: dict[str, str]) -> None: ...

    def check_health(self) -> None: ...

    def close(self) -> None: ...


async def _stand_still(name: str, request_id: str) -> None:
    folder = home_dir() / "held" / name
    (folder / request_id).touch()
    while not (folder / "go").exists():
        await asyncio.sleep(LOOK_S)


class Held(model.Model.func_or_class):  # type: ignore[misc, name-defined]
    """A replica of a model around this engine."""

    async def __init__(self, settings: ModelArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        model.start_engine = lambda _: HeldEngine()  # type: ignore[assignment, return-value]  # of this process alone
        await super().__init__(settings)


def app(_: dict[str, Any]) -> Application:
    """The builder that the configuration imports."""
    settings = parse(ModelArgs, {"model": "held", "max_running": PLACES, "max_waiting": 0}, "args")
    deployment = model.Model.options(func_or_class=Held, max_ongoing_requests=128, ray_actor_options={"num_cpus": 0})
    return deployment.bind(settings)  # type: ignore[no-any-return]
