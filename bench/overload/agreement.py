"""Compares waits in the simulator and in the service under the same load: `python -m bench.overload.agreement`.

The service runs the bundled model with four sequences at once. Short loads measure its speed: one client with short and
then with longer prompts, and four clients that always have a request. Then requests arrive at random, near its
capacity. The simulator gets the same requests at the same times, and the times to the first token are compared. Run
nothing else on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any
from urllib.error import URLError

from bench.harness.command import PEERS, completed, say
from bench.harness.servers import ServerError
from bench.overload.__main__ import Overloaded
from bench.overload.figures import Sent
from bench.overload.traffic import REPLY_TOKENS, Caller, Traffic
from bench.simulation.cluster import Arrival, Cluster, Fleet
from bench.simulation.outcome import percentile
from bench.simulation.policies import Fixed
from bench.simulation.replica import Device, Job, Replica

SLOTS = 4
LONGER = 160  # words of the longer prompts, which show how fast prompts are computed
LOAD = 0.85  # rate of the requests, as a share of the rate that four clients reached
MAX_DIFFERENCE = 0.2  # maximum relative difference between simulated and measured figures


class Small(Overloaded):
    """One replica that computes four sequences at once."""

    name = "agreement"

    def config(self) -> dict[str, Any]:
        config = super().config()
        [backend] = [one for one in config["applications"] if one["name"] == "smollm2"]
        backend["args"] |= {"max_running": SLOTS, "speculation_rows": 0, "prefix_reuse": False}
        return config


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 if the waits agree, else 1."""
    parser = argparse.ArgumentParser(prog="python -m bench.overload.agreement", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--seconds", type=float, default=90.0, help="seconds of the compared load; default: 90")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all results to OUT")
    options = parser.parse_args(arguments)
    results = completed(lambda: _measure(options), (ServerError, URLError))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    for name in ("mean", "p95"):
        real, simulated = results["service"][name], results["simulator"][name]
        print(f"first token, {name}: service {real:.2f} s, simulator {simulated:.2f} s, {simulated / real - 1:+.0%}")
    off = max(abs(results["simulator"][name] / results["service"][name] - 1.0) for name in ("mean", "p95"))
    return 0 if off <= MAX_DIFFERENCE else 1


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    server = Small(PEERS)
    try:
        server.start()
        return asyncio.run(_run(server, options))
    finally:
        server.stop()


async def _run(server: Small, options: argparse.Namespace) -> dict[str, Any]:
    _, key = server.new_account("agreement", "1000", rpm=10**6, concurrency=512)
    caller, traffic = Caller("agreement", key), Traffic(server.port, options.seed)
    await traffic.full(caller, SLOTS, 5.0)
    traffic.take()
    await traffic.full(caller, 1, 10.0)
    alone = _complete(traffic.take())
    await traffic.full(caller, 1, 10.0, LONGER)
    longer = _complete(traffic.take())
    await traffic.full(caller, SLOTS, 20.0)
    full = _complete(traffic.take())
    service = fitted(alone, longer, cycle_s=fmean(one.ended_at - one.sent_at for one in full))
    per_s = LOAD * SLOTS / fmean(one.ended_at - one.sent_at for one in full)
    say(f"a replica completes {per_s / LOAD:.2f} requests per second: {service}")
    await traffic.arrive([caller], per_s, options.seconds)
    sent = _complete(traffic.take())
    real = [one.first_at - one.sent_at for one in sent if one.first_at is not None]
    simulated = first_tokens(service, [one.sent_at for one in sent])
    return {
        "requests": len(real),
        "per_s": per_s,
        "service": {"mean": fmean(real), "p95": percentile(real, 0.95)},
        "simulator": {"mean": fmean(simulated), "p95": percentile(simulated, 0.95)},
    }


def _complete(sent: list[Sent]) -> list[Sent]:
    return sorted((one for one in sent if one.tokens and one.first_at is not None), key=lambda one: one.sent_at)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A replica as measured, and the time that a request spends elsewhere."""

    device: Device
    prompt: int  # tokens
    elsewhere_s: float  # time of a request in gateway, limiter and network


def fitted(alone: list[Sent], longer: list[Sent], cycle_s: float) -> Fitted:
    """Returns a replica on which one request alone, and four at a time, take as long as measured."""
    step_s = median((one.ended_at - one.first_at) / (REPLY_TOKENS - 1) for one in alone if one.first_at is not None)
    (first_s, prompt), (longer_s, longer_prompt) = _first(alone), _first(longer)
    prompt_s = (longer_s - first_s) / (longer_prompt - prompt) * prompt
    low, high = 0.0, 4.0 * step_s
    for _ in range(30):
        row_s = (low + high) / 2.0
        # One step computes a whole short prompt, and a token of each other sequence.
        share = prompt_s / (prompt_s + step_s + (SLOTS - 1) * row_s)
        device = Device(SLOTS, 64, 10**6, prompt / prompt_s, max(1e-4, step_s - row_s), row_s, share)
        found = Fitted(device, round(prompt), max(0.0, first_s - prompt_s))
        low, high = (row_s, high) if closed_loop(found) < cycle_s else (low, row_s)
    return found


def _first(requests: list[Sent]) -> tuple[float, float]:
    """Returns the median time to the first token, in seconds, and the mean tokens of a prompt."""
    first = median(one.first_at - one.sent_at for one in requests if one.first_at is not None)
    return first, fmean(one.prompt_tokens for one in requests)


def closed_loop(service: Fitted, requests: int = 200) -> float:
    """Returns the mean seconds per request while each of four clients always has a request open."""
    replica = Replica("r", service.device, 0.0)
    due = [0.0] * SLOTS  # times at which the clients' next requests reach the replica, ascending
    ended: list[float] = []

    def end(kind: str, at: float) -> None:
        ended.append(at)
        due.append(at + service.elsewhere_s)

    number = 0
    while len(ended) < requests:
        now = min(due[0] if due else inf, replica.next_event())
        if due and due[0] <= now:
            due.pop(0)
            number += 1
            replica.add(Job(f"r{number}", "a", 1.0, service.prompt, REPLY_TOKENS, number, now, inf, end), now)
        replica.run_until(now)
    return SLOTS * ended[-1] / len(ended)


def first_tokens(service: Fitted, times: list[float]) -> list[float]:
    """Seconds to the first token of requests that are sent at these times."""
    arrivals = [Arrival(at - times[0], "a", service.prompt, REPLY_TOKENS, REPLY_TOKENS) for at in times]
    cluster = Cluster(replace(Fleet(), device=service.device, most=1), Fixed(1), "a")
    waits = cluster.run(arrivals, arrivals[-1].at + 300.0).first_s
    return [service.elsewhere_s + wait for wait in waits]


if __name__ == "__main__":
    sys.exit(main())
