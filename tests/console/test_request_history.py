"""The console keeps the last hour of a gateway's request log, for the charts of its operators."""

from __future__ import annotations

from typing import Any

from serve_app.console.request_history import FRESH_S, Latest
from tests.accounting.books import NOON

from .conftest import House, chart, operator, words


def minute(at: float, completed: int, **more: Any) -> dict[str, Any]:
    times = {"p50": 100.0, "p95": 250.0} if completed else None
    counts = {"completed": completed, "rejected": 0, "failed": 0, "cancelled": 0}
    return {"at": at, **counts, "first_token_ms": times} | more


def answer(*minutes: dict[str, Any]) -> dict[str, Any]:
    return {"minutes": list(minutes), "latest": minute(0, 9, rejected=2, failed=1) | {"seconds": 300.0}}


def test_both_pages_show_the_same_last_minutes_and_live_the_charts_of_the_last_hour(house: House) -> None:
    house.answers["minutes"] = answer(
        minute(NOON - 180, 0), minute(NOON - 120, 4, failed=1), minute(NOON - 60, 0, rejected=3)
    )
    browser = operator(house, "read-only", "ann@example.org")
    for path in ("/console/operator", "/console/operator/live"):
        page = browser.get(path).text
        assert "Last 5 minutes: 10 requests, 1 failed. Not among these: 2 rejected (4xx)." in words(page)
    assert "First token, p95 250 ms median 100 ms, last 5 minutes" in words(page)
    shown = chart(page, "requests")
    assert shown["labels"] == [f"11:{minute:02}" for minute in range(1, 60)] + ["12:00"]
    counts = {one["name"]: one["values"][-4:] for one in shown["series"]}
    assert counts == {
        "Completed": [0, 4, 0, None], "Rejected (4xx)": [0, 0, 3, None], "Failed (5xx)": [0, 1, 0, None],
    }  # fmt: skip
    assert shown["empty"] == {"until": 56, "text": "Log begins 11:57"}
    assert ". Log begins 11:57</caption>" in page
    shown = chart(page, "first-token")
    assert [one["values"][-3:] for one in shown["series"]] == [[100.0, None, None], [250.0, None, None]]
    assert [one for one in house.asked if one[0] == "minutes"] == [("minutes", {"since": NOON - 3600}, "")]
    page = browser.get("/console/operator", params={"days": "30"}).text
    assert "Served and failed requests by day" in page


async def test_the_log_is_read_from_the_last_known_minute_on_and_an_hour_is_kept(house: House) -> None:
    history = house.console.pressure.history
    house.answers["minutes"] = answer(minute(NOON - 3540, 1), minute(NOON - 60, 2))
    await history.look()
    assert history.latest == Latest(10, 1, 5.0, 2, {"p50": 100.0, "p95": 250.0})
    house.clock.now = NOON + 240
    house.answers["minutes"] = answer(minute(NOON - 60, 3), minute(NOON + 60, 4))
    await history.look()
    assert house.asked[-1][1] == {"since": NOON - 360}
    found = history.minutes()
    assert [at for at, _ in found] == [NOON + 60 * minute for minute in range(-55, 5)]
    known = {at: one["completed"] for at, one in found if one is not None}
    assert known == {NOON - 60: 3, NOON + 60: 4}  # the oldest minute is forgotten
    del house.answers["minutes"]
    house.clock.now += FRESH_S
    await history.look()
    assert history.latest is None
    assert history.minutes()


def test_without_a_gateway_the_pages_say_that_the_log_cannot_be_read(house: House) -> None:
    browser = operator(house, "read-only", "ann@example.org")
    assert browser.get("/console/operator").status_code == 200
    page = browser.get("/console/operator/live")
    assert page.status_code == 200
    assert "The request log can&#39;t be read right now" in page.text
    assert "First token, p95 –" in words(page.text)


def test_a_chart_says_why_its_first_part_is_empty(house: House) -> None:
    browser = operator(house, "read-only", "ann@example.org")

    def empty(*busy: int) -> str:
        house.clock.now += FRESH_S
        house.answers["minutes"] = answer(*(minute(NOON - 60 * ago, int(ago in busy)) for ago in range(59, 0, -1)))
        shown = chart(browser.get("/console/operator/live").text, "requests")
        return str(shown.get("empty", {}).get("text", ""))

    assert empty() == "No requests in the last hour"
    assert empty(4, 2) == "No requests in this log before 11:56"
    assert empty(59) == ""
