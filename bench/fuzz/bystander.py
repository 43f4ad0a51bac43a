"""A second account, whose process alternates between a streamed reply and a request with a cached prompt."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import httpx

from bench.harness.servers import ServerError


def beside(base_url: str, key: str, work: Callable[[], None]) -> tuple[list[tuple[float, float]], list[int]]:
    """Runs `work` while the other account streams in a separate process.

    Returns the gaps between the pieces of its streams, and the uncached prompt tokens of each request with the cached
    prompt. A gap is a pair: its end on the monotonic clock and its length, both in seconds.
    """
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_bystander, args=(theirs, base_url, key), daemon=True)
    process.start()
    theirs.close()
    try:
        pipe.recv()
        work()
        pipe.send("stop")
        found: tuple[list[tuple[float, float]], list[int]] = pipe.recv()
        return found
    except EOFError:
        raise ServerError("the other account's client has ended; its error is above") from None
    finally:
        process.kill()
        process.join(5)


def _bystander(pipe: Connection, base_url: str, key: str) -> None:
    """Alternates between the two requests until `pipe` has a message. Then sends the gaps and the uncached tokens."""
    gaps: list[tuple[float, float]] = []
    uncached: list[int] = []
    head = {"authorization": f"Bearer {key}"}
    stable = "You know these words by heart: " + " ".join(str(number) for number in range(400))
    talk = {"stream": True, "max_tokens": 200, "ignore_eos": True, "messages": [{"role": "user", "content": "Talk."}]}
    asked = [{"role": "system", "content": stable}, {"role": "user", "content": "Yes?"}]
    with httpx.Client(base_url=base_url, timeout=180, trust_env=False, headers=head) as http:
        pipe.send("ready")
        while not pipe.poll():
            body = {"model": "svc-chat", "messages": asked, "max_tokens": 1}
            usage = http.post("/v1/chat/completions", json=body).json()["usage"]
            uncached.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
            with http.stream("POST", "/v1/chat/completions", json={"model": "svc-chat", **talk}) as reply:
                last = None
                for line in reply.iter_lines():
                    now = time.monotonic()
                    if '"content"' in line:
                        if last is not None:
                            gaps.append((now, now - last))
                        last = now
    pipe.send((gaps, uncached))
