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


def test_both_pages_show_the_same_last_minutes_and_the_charts_of_the_last_hour(house: House) -> None:
    house.answers["minutes"] = answer(minute(NOON - 120, 4, failed=1), minute(NOON - 60, 0, rejected=3))
    browser = operator(house, "read-only", "ann@example.org")
    for path in ("/console/operator", "/console/operator/live"):
        page = browser.get(path).text
        assert "Last 5 minutes: 10 requests, 1 failed. 2 more were rejected (4xx)." in words(page)
        assert "First token, p95 250 ms median 100 ms, last 5 minutes" in words(page)
        shown = chart(page, "requests")
        assert shown["labels"] == ["11:58", "11:59"]
        counts = {one["name"]: one["values"] for one in shown["series"]}
        assert counts == {"Completed": [4, 0], "Rejected (4xx)": [0, 3], "Failed (5xx)": [1, 0]}
        assert [one["values"] for one in chart(page, "first-token")["series"]] == [[100.0, None], [250.0, None]]
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
    found = [None if one is None else (at, one["completed"]) for at, one in history.minutes()]
    assert found == [(NOON - 60, 3), None, (NOON + 60, 4)]  # the oldest minute is forgotten, one is not known
    del house.answers["minutes"]
    house.clock.now += FRESH_S
    await history.look()
    assert history.latest is None
    assert history.minutes()


def test_without_a_gateway_the_pages_say_that_the_log_cannot_be_read(house: House) -> None:
    browser = operator(house, "read-only", "ann@example.org")
    for path in ("/console/operator", "/console/operator/live"):
        page = browser.get(path)
        assert page.status_code == 200
        assert "The request log can&#39;t be read right now" in page.text
        assert "First token, p95 –" in words(page.text)
