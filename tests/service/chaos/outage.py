"""The database away for a while under load: usage goes to the spool, and clients get 503 when that is full."""

from __future__ import annotations

import asyncio
import time

from tests.service.chaos.report import Report
from tests.service.chaos.session import Session, crash_database

BEFORE_S = 8.0
AFTER_S = 12.0


class Outage:
    """Kills the PostgreSQL server once, for `seconds`, in the middle of the load."""

    def __init__(self, seconds: float, before_s: float = BEFORE_S, after_s: float = AFTER_S) -> None:
        self.seconds = seconds
        self._before_s, self._after_s = before_s, after_s
        self._away: tuple[float, float] = (0.0, 0.0)
        self._received_at: list[float] = []

    async def __call__(self, session: Session) -> None:
        """The disturbance."""
        self._received_at = session.tally.received_at
        await asyncio.sleep(self._before_s)
        began = time.monotonic()
        await crash_database(session, self.seconds)
        self._away = (began, began + self.seconds)
        session.say("database: back")
        await asyncio.sleep(self._after_s)

    def judge(self, report: Report, *, low_bound: bool) -> None:
        """Adds the problems in what the clients saw; with `low_bound` the spool had to run full."""
        began, ended = self._away
        meanwhile = sum(began < at < ended for at in self._received_at)
        report.figures["usages received while the database was away"] = meanwhile
        report.figures["usages received afterwards"] = sum(at >= ended for at in self._received_at)
        known = {"200", "402", "hung up"}
        if low_bound:
            known |= {"503", "error event overloaded_error"}
            if not report.answers.get("503"):
                report.problems.append("the spool was bound low and no client got a 503")
        elif not meanwhile:
            report.problems.append("no client got a usage while the database was away: the spool was not used")
        if strange := {name: count for name, count in report.answers.items() if name not in known}:
            report.problems.append(f"clients got what an outage of the database does not explain: {strange}")
        if not report.figures["usages received afterwards"]:
            report.problems.append("no client got a usage after the database was back")
