"""Measures one cell, a workload on a running server, and returns a flat record of figures."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench.engine import workloads
from bench.engine.figures import CountTokens, load_figures, longest_pause, stream_rate, tokens_of
from bench.engine.plan import CODE, DISTURBED, LONG, PREFIX, SHORT, Cell
from bench.engine.servers import EngineServer
from bench.harness import client
from bench.harness.replies import Reply, read
from bench.harness.results import percentile

ASKS = {SHORT: workloads.short, LONG: workloads.long, CODE: workloads.code_edit}
CONVERSATIONS = 3
#: Part of each prompt's seed, so that prompts differ between runs.
Salt = str


async def measure(server: EngineServer, cell: Cell, count: CountTokens, salt: Salt) -> dict[str, Any]:
    """Figures of one cell; `problems` lists what went wrong."""
    seed = f"{salt}/{cell.workload}/{cell.round}/{cell.clients}"
    if cell.workload in ASKS:
        return await _load(server, cell, count, seed)
    if cell.workload == PREFIX:
        return await _prefix(server, cell, seed)
    assert cell.workload == DISTURBED
    return await _disturbed(server, cell, count, seed)


async def warm_up(server: EngineServer, salt: Salt, parallel: int) -> list[str]:
    """Sends a few requests at once, one of them long. Returns their problems."""
    asks = [workloads.short(f"{salt}/warm/{number}") for number in range(parallel)]
    asks[0] = workloads.long(f"{salt}/warm/long")

    def call(number: int, repeat: int) -> client.Call:
        return server.call(workloads.Ask(asks[number].messages, 16))

    window = await client.closed_loop(parallel, call, 0.0, 60.0)
    return sorted({problem for raw in window.replies if (problem := read(raw).problem) is not None})


async def _load(server: EngineServer, cell: Cell, count: CountTokens, seed: str) -> dict[str, Any]:
    def call(number: int, repeat: int) -> client.Call:
        return server.call(ASKS[cell.workload](f"{seed}/{number}/{repeat}"))

    window = await client.closed_loop(cell.clients, call, cell.least_s, cell.most_s)
    replies = [read(raw) for raw in window.replies]
    load = load_figures(replies, window.began_at, window.ended_at, count)
    record = asdict(load)
    # The record has percentiles instead of one figure per request.
    waits, per_token = record.pop("ttft_s"), record.pop("token_s")
    prompts = [reply.prompt_tokens for reply in replies if reply.prompt_tokens is not None]
    return {
        **record,
        "problems": list(load.problems),
        "ttft_p50_s": percentile(waits, 0.5),
        "ttft_p95_s": percentile(waits, 0.95),
        "token_p50_s": percentile(per_token, 0.5),
        "token_p95_s": percentile(per_token, 0.95),
        "prompt_tokens": percentile(prompts, 0.5),
        "client_cpu": window.client_cpu,
    }


async def _prefix(server: EngineServer, cell: Cell, seed: str) -> dict[str, Any]:
    """Runs conversations one after another. Each has two turns; the second prompt begins with the first turn."""
    first, second, cached, problems = [], [], [], set()
    for number in range(CONVERSATIONS):
        ask = workloads.first_turn(f"{seed}/{number}")
        opening = read(await client.one(server.call(ask), cell.most_s))
        reply = read(await client.one(server.call(workloads.second_turn(ask, opening.text)), cell.most_s))
        problems |= {each.problem for each in (opening, reply) if each.problem is not None}
        if (one := _ttft(opening)) is not None and (two := _ttft(reply)) is not None:
            first.append(one)
            second.append(two)
            cached.append(reply.cached_tokens or 0)
    return {
        "ttft_first_s": percentile(first, 0.5),
        "ttft_second_s": percentile(second, 0.5),
        "second_to_first": percentile([b / a for a, b in zip(first, second, strict=True)], 0.5),
        "cached_tokens": percentile(cached, 0.5),
        "problems": sorted(problems),
    }


async def _disturbed(server: EngineServer, cell: Cell, count: CountTokens, seed: str) -> dict[str, Any]:
    """Measures the speed of running streams before a long prompt is sent, and then until its first token."""
    streams = [server.call(workloads.steady(f"{seed}/{number}")) for number in range(cell.clients)]
    result = await client.disturbed(streams, server.call(workloads.intruder(seed)), cell.least_s, cell.most_s)
    replies, intruder = [read(raw) for raw in result.streams], read(result.intruder)
    prefilled_at = intruder.first_at or result.ended_at
    calm = stream_rate(replies, result.calm_from, result.calm_until, count)
    rate = stream_rate(replies, result.calm_until, prefilled_at, count)
    return {
        "calm_tokens_per_s": calm,
        "disturbed_tokens_per_s": rate,
        "kept": rate / calm if calm > 0 else None,
        "longest_pause_s": max(
            (longest_pause(each, result.calm_until, prefilled_at) for each in replies), default=None
        ),
        "intruder_ttft_s": prefilled_at - intruder.sent_at,
        "intruder_answered": intruder.first_at is not None,
        "intruder_prompt_tokens": intruder.prompt_tokens,
        "streams_ended_early": sum(tokens_of(reply, count) < 1500 and reply.ended_at is not None for reply in replies),
        "problems": sorted({each.problem for each in [*replies, intruder] if each.problem is not None}),
    }


def _ttft(reply: Reply) -> float | None:
    return None if reply.first_at is None else reply.first_at - reply.sent_at
