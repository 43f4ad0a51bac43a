"""Runs the benchmark once: ordinary clients send all the time, while one attack follows another."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any, Final

import psutil

from bench.attack import smuggling, smuggling_cases
from bench.attack.customer import Customer
from bench.attack.figures import is_settled, judged, window
from bench.attack.hostile import ATTACKS
from bench.attack.ordinary import GIVEN_UP_S, Ordinary
from bench.attack.processes import Hostile, attacker, burner, cores
from bench.attack.service import Accounts, Attacked
from bench.harness.command import say

CUSTOMER: Final = "customer"
SMUGGLING: Final = "smuggling"
NAMES: Final = (*ATTACKS, CUSTOMER, SMUGGLING)
NEW_KEY_EVERY: Final = 20  # one ordinary request in 20 uses a new key
WARM_UP_S: Final = 8.0
LOOK_BACK_S: Final = 2.0  # seconds that must be calm before the next attack
MAX_RECOVERY_S: Final = 30.0
END_S: Final = 30.0  # maximum time for an attacker's process to close its connections and report


@dataclass(frozen=True, slots=True)
class Scope:
    """Settings of a measurement. Times are in seconds."""

    attacks: tuple[str, ...] = NAMES
    per_s: float = 10.0  # ordinary requests per second
    calm_s: float = 20.0
    attack_s: float = 20.0
    recovery_s: float = 5.0  # minimum time to observe after an attack
    control_s: float = 15.0  # 0: no control
    seed: int = 1

    def new_keys(self) -> int:
        """Returns how many new keys to create. If a run takes longer than planned, its last requests use known keys."""
        one = self.calm_s + self.attack_s + self.recovery_s + self.control_s + 10
        return 1 + int((WARM_UP_S + len(self.attacks) * one) * self.per_s / NEW_KEY_EVERY)


@dataclass(frozen=True, slots=True)
class Used:
    """Processor seconds used so far by the whole machine, the service, and this process."""

    at: float
    all: float
    service: float
    own: float

    def service_since(self, before: Used) -> float:
        """The service's share of the machine since `before`."""
        return max(0.0, self.service - before.service) / (self.at - before.at) / cores()

    def others_since(self, before: Used) -> float:
        """The share of the machine that all other processes used, attackers included."""
        others = (self.all - before.all) - (self.service - before.service) - (self.own - before.own)
        return max(0.0, others) / (self.at - before.at) / cores()


class Session:
    """The running service and what was measured so far."""

    def __init__(self, server: Attacked, accounts: Accounts, scope: Scope) -> None:
        self._server, self._accounts, self._scope = server, accounts, scope
        self._ordinary = Ordinary(server.port, accounts.keys, accounts.new_keys, scope.per_s, NEW_KEY_EVERY, scope.seed)
        self._marks: dict[str, dict[str, tuple[float, float]]] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._customer: list[dict[str, Any]] = []
        self._smuggled: list[dict[str, Any]] = []

    async def run(self) -> dict[str, Any]:
        """Runs all attacks and returns the results. Raises ServerError if an attacker's process fails."""
        traffic = asyncio.create_task(self._ordinary.run())
        began, cpu = time.perf_counter(), time.process_time()
        try:
            await asyncio.sleep(WARM_UP_S)
            for name in self._scope.attacks:
                if name == SMUGGLING:
                    await self._smuggle()
                elif name == CUSTOMER:
                    await self._be_a_customer()
                else:
                    await self._attack(name)
        finally:
            client_cpu = (time.process_time() - cpu) / (time.perf_counter() - began) / cores()
            if traffic.done():
                traffic.result()  # the traffic ends early only by an error, which this raises
            traffic.cancel()
            await asyncio.gather(traffic, return_exceptions=True)
        await self._ordinary.finish()
        sent, probes = self._ordinary.sent, self._ordinary.probes
        return {
            "client_cpu": client_cpu,
            "given_up_s": GIVEN_UP_S,
            "records": {
                name: {**self._facts[name], **judged(sent, probes, marks, GIVEN_UP_S)}
                for name, marks in self._marks.items()
            },
            "customer": self._customer,
            "smuggling": self._smuggled,
        }

    async def _attack(self, name: str) -> None:
        scope, marks = self._scope, {}
        say(f"{ATTACKS[name].title}: {ATTACKS[name].what}")
        async with _ended(attacker(name, self._accounts.target)) as process:
            await process.ready()
            start = await self._used()
            await asyncio.sleep(scope.calm_s)
            calm = await self._used()
            marks["calm"] = (start.at, calm.at)
            process.begin(scope.attack_s)
            await asyncio.sleep(scope.attack_s)
            attack = await self._used()
            marks["attack"] = (calm.at, attack.at)
            ran = await process.ran(END_S)
        calm_p99 = self._window(marks["calm"])["p99"]
        await asyncio.sleep(scope.recovery_s)
        await self._settle(calm_p99)
        marks["recovery"] = (attack.at, time.perf_counter())
        control = None
        if scope.control_s:
            async with _ended(burner(ran.share)) as process:
                await process.ready()
                await self._settle(calm_p99)
                since = time.perf_counter()
                process.begin(scope.control_s)
                await asyncio.sleep(scope.control_s)
                marks["control"] = (since, time.perf_counter())
                control = (await process.ran(END_S)).share
        self._marks[name] = marks
        self._facts[name] = {
            "title": ATTACKS[name].title,
            "what": ATTACKS[name].what,
            "attacker": {"share": ran.share, "seconds": ran.seconds, **ran.tally},
            "control_share": control,
            "service_share": attack.service_since(calm),
            "others_share": {
                "calm": calm.others_since(start),
                "attack": max(0.0, attack.others_since(calm) - ran.share),
            },
        }
        say(self._line(name))

    async def _be_a_customer(self) -> None:
        say("a customer that hangs up, or has a few refused requests")
        self._customer = await Customer(self._server.port, self._accounts.customer).run()
        for row in self._customer:
            calm, after = row["calm"], row["after"]
            say(
                f"  {row['case']}: p99 {_ms(calm['p99'])} calm, {_ms(after['p99'])} after; "
                f"factor {row['factor'] or 0:.1f}, failed {after['failed']}"
            )

    async def _smuggle(self) -> None:
        say("request smuggling through HAProxy")
        operator = (self._server.home / "secrets" / "operator-key").read_text().strip()
        cases = list(smuggling_cases.cases(operator))
        seen: list[tuple[bytes, bool, Any]] = []
        for number, case in enumerate(cases):
            reply, closed = await smuggling.send(self._server.port, case)
            seen.append((reply, closed, await smuggling.neighbours(self._server.port, number)))
        effects = smuggling.effects(await asyncio.to_thread(self._server.account_names))
        self._smuggled = [
            smuggling.verdict(number, case, smuggling.Seen(*seen[number], number in effects))
            for number, case in enumerate(cases)
        ]
        wrong = sum(bool(row["problems"]) for row in self._smuggled)
        say(f"  {len(cases)} cases, {wrong} of them with problems")

    async def _settle(self, calm_p99: float | None) -> None:
        """Waits until recent requests are as fast as in the calm window, at most `MAX_RECOVERY_S`."""
        until = time.perf_counter() + MAX_RECOVERY_S
        while time.perf_counter() < until:
            # `sent` has only requests that have ended. If the service hangs, none of them is recent, and this waits on.
            if is_settled(self._ordinary.sent, time.perf_counter() - LOOK_BACK_S, calm_p99):
                return
            await asyncio.sleep(0.5)

    async def _used(self) -> Used:
        assert self._server.tree is not None
        service = await asyncio.to_thread(self._server.tree.cpu_s)
        times = psutil.cpu_times()
        busy = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
        return Used(time.perf_counter(), busy, service, time.process_time())

    def _window(self, mark: tuple[float, float]) -> dict[str, Any]:
        return window(self._ordinary.sent, *mark, GIVEN_UP_S)

    def _line(self, name: str) -> str:
        """The figures of one attack as a line of progress."""
        found = judged(self._ordinary.sent, self._ordinary.probes, self._marks[name], GIVEN_UP_S)
        facts, calm, attack = self._facts[name], found["windows"]["calm"], found["windows"]["attack"]
        parts = [
            f"p99 {_ms(calm['p99'])} calm, {_ms(attack['p99'])} under attack ({attack['samples']} samples)",
            f"factor {found['factor'] or 0:.1f}, control {found['control_factor'] or 0:.1f}",
            f"failed {attack['failed']}",
            f"flaps {found['health']['attack']['flaps']}",
            f"attacker {facts['attacker']['share']:.0%} of the machine, service {facts['service_share']:.0%}, "
            f"other programs {facts['others_share']['calm']:.0%} calm and "
            f"{facts['others_share']['attack']:.0%} under attack",
            f"recovered after {found['recovered_s']:.1f} s",
            f"got {facts['attacker']['statuses']}, {facts['attacker']['most_open']} connections",
        ]
        return "  " + "; ".join(parts)


def _ms(seconds: float | None) -> str:
    return "none" if seconds is None else f"{1000 * seconds:.0f} ms"


@contextlib.asynccontextmanager
async def _ended(process: Hostile) -> Any:
    try:
        yield process
    finally:
        process.stop()
