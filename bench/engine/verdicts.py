"""Promises of the engine, as ratios within one run."""

from __future__ import annotations

from collections.abc import Callable

from bench.engine.plan import CODE, DISTURBED, ON_VLLM, OURS, PLAIN, PREFIX, SHORT
from bench.harness.promises import Promise, Verdict
from bench.harness.results import Results, Spread, ratio, spread


def rate_against(peer: str, workload: str, clients: int) -> Callable[[Results], Spread | None]:
    """Ratio of our output tokens per second to the peer's."""
    return lambda results: ratio(results, OURS, peer, workload, clients, "tokens_per_s")


def on_vllm(clients: int, figure: str) -> Callable[[Results], Spread | None]:
    """Ratio of a figure of our service on vLLM to that of `vllm serve`."""
    return lambda results: ratio(results, ON_VLLM, "vllm", SHORT, clients, figure)


def own(workload: str, clients: int, figure: str) -> Callable[[Results], Spread | None]:
    """A figure of our service that is already a ratio."""
    return lambda results: spread(results, OURS, workload, clients, figure)


PROMISES = (
    Promise("1 client, against `transformers serve`", 3.0, rate_against("transformers", SHORT, 1), goal=5.0),
    Promise(
        "16 clients, against `transformers serve --continuous-batching`",
        4.0,
        rate_against("transformers-cb", SHORT, 16),
        goal=6.0,
    ),
    Promise("1 client, against vLLM's CPU build", 2.0, rate_against("vllm", SHORT, 1)),
    Promise("16 clients, against vLLM's CPU build", 3.0, rate_against("vllm", SHORT, 16)),
    Promise("16 clients, the service on vLLM against `vllm serve`", 0.9, on_vllm(16, "tokens_per_s")),
    Promise("64 clients, the service on vLLM against `vllm serve`", 0.9, on_vllm(64, "tokens_per_s")),
    Promise(
        "16 clients, first token, the service on vLLM against `vllm serve`",
        1.15,
        on_vllm(16, "ttft_p50_s"),
        at_most=True,
    ),
    Promise(
        "64 clients, first token, the service on vLLM against `vllm serve`",
        1.15,
        on_vllm(64, "ttft_p50_s"),
        at_most=True,
    ),
    Promise("1 client, against llama.cpp's server", 0.5, rate_against("llama-cpp", SHORT, 1), goal=1.0),
    Promise("4 clients, against llama.cpp's server", 1.2, rate_against("llama-cpp", SHORT, 4)),
    Promise("16 clients, against llama.cpp's server", 1.8, rate_against("llama-cpp", SHORT, 16)),
    Promise("1 client that edits code: speculation on, compared with off", 1.8, rate_against(PLAIN, CODE, 1)),
    Promise("1 client, no repeated text: speculation on, compared with off", 0.95, rate_against(PLAIN, SHORT, 1)),
    Promise(
        "time to first token of a second turn over 1,000 tokens, against the first turn's",
        0.2,
        own(PREFIX, 1, "second_to_first"),
        at_most=True,
    ),
    Promise("speed that 4 streams keep while 6,000 tokens are prefilled", 1 / 3, own(DISTURBED, 4, "kept")),
)


def verdicts(results: Results) -> list[Verdict]:
    """All promises, in the order of the table."""
    return [Verdict(promise, promise.measure(results)) for promise in PROMISES]
