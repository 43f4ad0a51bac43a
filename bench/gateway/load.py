"""Runs the load: wrk with a script that posts the request. Parses the figures that wrk prints."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.harness.stub_request import BODY, PATH

SCRIPT = Path(__file__).with_name("post.lua")
TIMEOUT_S = 20  # for one request
MARK = "figures "


class LoadError(Exception):
    """wrk is missing or failed. The message is one line."""


@dataclass(frozen=True, slots=True)
class Load:
    """The figures of wrk. `requests` counts replies of any status."""

    requests: int
    seconds: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    non_2xx: int
    broken: int  # connections that could not be made, written or read
    timeouts: int

    @property
    def requests_per_s(self) -> float:
        """Replies per second."""
        return self.requests / self.seconds if self.seconds > 0 else 0.0

    @property
    def problems(self) -> list[str]:
        """Reasons to leave out these figures; empty if there are none."""
        found = []
        if self.requests == 0:
            found.append("there was no reply")
        for count, what in ((self.non_2xx, "replies that were not 2xx"), (self.broken, "broken connections")):
            if count:
                found.append(f"{count} {what}")
        if self.timeouts:
            found.append(f"{self.timeouts} requests took longer than {TIMEOUT_S} s")
        return found


def check_wrk() -> None:
    """Raises LoadError when wrk is not installed."""
    if shutil.which("wrk") is None:
        raise LoadError("wrk is missing (on Debian: apt install wrk)")


def run(base_url: str, key: str, clients: int, seconds: int) -> tuple[Load, float]:
    """Opens `clients` connections for `seconds`. Each sends its next request after the reply to its previous one.

    Returns the figures and wrk's processor seconds. Raises LoadError.
    """
    command = ["wrk", "--threads", "1", "--connections", str(clients), "--duration", f"{seconds}s"]
    command += ["--timeout", f"{TIMEOUT_S}s", "--script", str(SCRIPT), base_url + PATH]
    before = _children_cpu_s()
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "BENCH_BODY": BODY, "BENCH_KEY": key},  # not as arguments, which every user can see
            capture_output=True,
            text=True,
            timeout=seconds + TIMEOUT_S + 10,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LoadError("wrk did not end") from None
    except OSError as error:
        raise LoadError(f"wrk does not start: {error.strerror}") from None
    if done.returncode != 0:
        raise LoadError(f"wrk failed: {(done.stderr or done.stdout).strip()[-300:]}")
    return parse(done.stdout), _children_cpu_s() - before


def parse(output: str) -> Load:
    """The figures in wrk's output. Raises LoadError when its script did not print them."""
    line = next((line for line in output.splitlines() if line.startswith(MARK)), None)
    if line is None:
        raise LoadError(f"wrk printed no figures: {output.strip()[-300:]}")
    return Load(**json.loads(line.removeprefix(MARK)))


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
