"""Requests: search, file and one request; each page is of its account alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.doors import DOORS
from serve_app.console.request_pages import SEARCHES_PER_MINUTE, output_speed, timeline
from serve_app.contracts.books import Outcome
from serve_app.contracts.operators import SetOperatorRole
from serve_app.storage.request_log import Found
from tests.accounting.books import NOON, settlement

from .conftest import PASSWORD, House, submit, words
from .test_usage_pages import DAY, TODAY, YESTERDAY, rows_of, use

PHASE_NAMES = ["Admission", "Queue", "Prompt", "Generation"]
ID = re.compile(r'/requests/([^"/?]+)"')


def listed(page: str) -> list[str]:
    return ID.findall(page)


def line_of(house: House, request_id: str, **more: Any) -> dict[str, Any]:
    return {
        "event": "request",
        "request_id": request_id,
        "account": house.account_id,
        "trace_id": "a" * 32,
        "finish_reason": "length",
        "status": 200,
        "stream": True,
        "admit_ms": 1.25,
        "queue_ms": 0.0,
        "prefill_ms": 250.0,
        "decode_ms": 1000.0,
        "settle_ms": None,
        "messages": [{"role": "user", "content": "a secret"}],
        "reply": "a secret",
    } | more


def test_requests_are_listed_newest_first_page_by_page(house: House) -> None:
    use(house, *[f"r{number:03d}" for number in range(70)])
    use(house, "older", at=NOON - DAY)
    path, browser = f"/console/accounts/{house.account_id}/requests", house.member(role="billing")
    first = browser.get(path).text
    assert listed(first) == [f"r{number:03d}" for number in range(69, 19, -1)]
    assert "1–50 of 71 requests" in words(first)
    link = re.search(r'rel="next" href="([^"]+)"', first)
    assert link is not None
    second = browser.get(link[1].replace("&amp;", "&")).text
    assert listed(second) == [*(f"r{number:03d}" for number in range(19, -1, -1)), "older"]
    assert "51–71 of 71 requests" in words(second)
    for wrong in ("9" * 99, "-1", "x"):
        assert "1–50 of 71 requests" in words(browser.get(path, params={"earlier": wrong}).text)
    assert 'rel="next"' not in second
    assert browser.get(path, params={"after": "nowhere"}).status_code == 422


def test_filters_stand_in_the_address_and_in_the_file(house: House) -> None:
    key_id = use(house, "r1", "r2", model="svc-coder")
    house.ledger.update_key(use(house, "r3", outcome=Outcome.FAILED), tags=["ci"])
    use(house, "r4", at=NOON - DAY)
    use(house, "old", at=NOON - 20 * DAY)
    path, browser = f"/console/accounts/{house.account_id}/requests", house.member()
    for query, expected in [
        ({}, ["r4", "r3", "r2", "r1"]),
        ({"model": "svc-coder"}, ["r2", "r1"]),
        ({"key": key_id}, ["r2", "r1"]),
        ({"status": "failed"}, ["r3"]),
        ({"tag": "ci"}, ["r3"]),
        ({"tag": "-", "model": "svc-chat"}, ["r4"]),
        ({"range": "custom", "from": YESTERDAY, "to": YESTERDAY}, ["r4"]),
        ({"range": "30d", "model": "svc-chat"}, ["old", "r4", "r3"]),
        ({"key": "key_none"}, []),
        ({"status": "<script>", "model": "<script>"}, []),
    ]:
        page = browser.get(path, params=query).text
        assert sorted(listed(page)) == sorted(expected), query
        link = re.search(r'href="(/console[^"]*requests\.csv[^"]*)"', page)
        assert link is not None
        found = rows_of(browser.get(link[1].replace("&amp;", "&")))
        assert sorted(row["request_id"] for row in found) == sorted(expected), query
        for value in query.values():
            assert f'value="{value}"' in page or value in ("<script>", "key_none")
    assert "Remove the filters" in page


def test_a_file_has_all_requests_of_its_range_across_pages(house: House) -> None:
    use(house, *[f"r{number:04d}" for number in range(1_001)])
    use(house, "yesterday", at=NOON - DAY)
    path, browser = f"/console/accounts/{house.account_id}/requests.csv", house.member()
    answer = browser.get(path, params={"range": "month"})
    rows = rows_of(answer)
    assert [row["request_id"] for row in rows] == [f"r{number:04d}" for number in range(1_000, -1, -1)]
    assert {row["charged"] for row in rows} == {"0.000000046"}
    assert f'filename="requests-{TODAY}-{TODAY}.csv"' in answer.headers["content-disposition"]
    assert answer.headers["content-type"].startswith("text/csv")


def test_a_request_shows_its_price_line_by_line_and_its_endpoint(house: House) -> None:
    ids = [f"{door.id_prefix}{number:032x}" for number, door in enumerate(DOORS)]
    use(house, *ids)
    use(house, "failed", outcome=Outcome.FAILED)
    path, browser = f"/console/accounts/{house.account_id}/requests", house.member(role="billing")
    for request_id, door in zip(ids, DOORS, strict=True):
        page = browser.get(f"{path}/{request_id}")
        assert page.status_code == 200
        assert f"<code>/v1{door.path}</code>" in page.text
        found = browser.get(path, params={"id": f" {request_id} "})
        assert (found.status_code, found.headers["location"]) == (303, f"{path}/{request_id}")
    by_trace = browser.get(path, params={"id": f"{1:032x}"})
    assert by_trace.headers["location"] == f"{path}/{ids[1]}"
    text = re.sub(r"<[^>]+>|\s+", " ", page.text)
    for part in (
        "Input tokens, not cached 8 0.003 0.000000024",
        "Cached input tokens 2 0.001 0.000000002",
        "Output tokens 4 0.005 0.00000002",
        "Charged 0.000000046",
        "key of",
        "the phases of this request are not available",
    ):
        assert part.lower() in re.sub(" +", " ", text).lower(), part
    failed = re.sub(r"(<[^>]+>|\s)+", " ", browser.get(f"{path}/failed").text)
    assert "Not charged, because the request failed −0.000000046 Charged 0.00" in failed


def test_a_request_of_another_account_is_not_found(house: House) -> None:
    use(house, "chatcmpl-1")
    other = house.ledger.create_account("Bob's").account_id
    stranger = house.member("bob@example.org", account_id=other)
    path = f"/console/accounts/{other}/requests"
    assert stranger.get(f"{path}/chatcmpl-1").status_code == 404
    answer = stranger.get(path, params={"id": "chatcmpl-1"})
    assert (answer.status_code, "No request with ID “chatcmpl-1”" in answer.text) == (200, True)


@pytest.mark.parametrize(
    ("seconds", "names", "first"),
    [
        (1.2512, PHASE_NAMES, 251.2),
        (1.3, [*PHASE_NAMES, "Other"], 251.2),
        (0.9, PHASE_NAMES, 251.2),
        (0.1, PHASE_NAMES, 100.0),
    ],
)
def test_the_phases_up_to_the_replys_end_add_up_to_the_duration(seconds: float, names: list[str], first: float) -> None:
    line = {"admit_ms": 1.24, "queue_ms": 0.0, "prefill_ms": 250.0, "decode_ms": 1000.0, "settle_ms": 14.3}
    made = timeline(line, seconds)
    assert made is not None
    assert [one.name for one in made.bars] == names
    assert sum(round(one.ms * 10) for one in made.bars) == round(made.total_ms * 10) == round(seconds * 10_000)
    assert made.first_token_ms == pytest.approx(first)
    assert made.after is not None
    assert (made.after.name, made.after.ms, made.after.begins) == ("Settlement", 14.3, made.ends)
    assert made.after.begins + made.after.width == pytest.approx(100)


def test_the_output_speed_counts_the_tokens_after_the_first() -> None:
    line = {"decode_ms": 500.0}
    assert output_speed(line, 52) == 102.0
    assert [output_speed(line, 1), output_speed({"decode_ms": 0.0}, 52), output_speed({}, 52)] == [None] * 3
    assert output_speed(line | {"reruns": 1}, 52) is None, "the tokens of several runs, the time of the last"


def test_a_request_shows_its_phases_from_the_log_and_never_its_texts(house: House) -> None:
    use(house, "chatcmpl-1")
    asked: list[Any] = []

    def find(request_id: str, **bounds: Any) -> Found:
        asked.append((request_id, bounds["ended_at"]))
        theirs = line_of(house, request_id, account="acct_other", admit_ms=77.0)
        return Found([line_of(house, request_id), theirs])

    house.console.find_lines = find
    path = f"/console/accounts/{house.account_id}/requests/chatcmpl-1"
    page = house.member().get(path).text
    assert asked == [("chatcmpl-1", NOON - 60)]
    text = re.sub(r"(<[^>]+>|\s)+", " ", page)
    for part in (
        "Admission",
        "1.2 ms",
        "Prompt",
        "250.0 ms",
        "Generation",
        "1,000.0 ms",
        "length",
        "a" * 32,
        "3.0 tokens/s after",
    ):
        assert part in text, part
    assert "Settlement" not in text, "its duration is not known"
    assert "Other" in text, "the phases do not cover the whole duration"
    assert "First token after 251.2 ms" in text
    assert "77.0" not in text
    assert "a secret" not in page


@pytest.mark.parametrize("role", [None, "read-only"])
def test_a_trace_is_linked_for_operators_alone(house: House, role: str | None) -> None:
    use(house, f"chatcmpl-{1:032x}")
    house.console.trace_url = "https://traces.example.com/trace/{trace_id}"
    browser = house.member()
    if role is not None:
        house.ledger.run(SetOperatorRole("ada@example.org", role, house.account_id))
        submit(browser, "/console/sign-in", "/console/sign-in", email="ada@example.org", password=PASSWORD)
    page = browser.get(f"/console/accounts/{house.account_id}/requests/chatcmpl-{1:032x}").text
    assert f"{1:032x}</code>" in page
    assert (f'href="https://traces.example.com/trace/{1:032x}"' in page) == (role is not None)


def test_a_log_that_can_not_be_read_leaves_the_rest_of_the_page(house: House, tmp_path: Path) -> None:
    use(house, "chatcmpl-1")
    house.console.find_lines = lambda *_, **__: Found([{"request_id": "chatcmpl-1", "account": house.account_id}])
    page = house.member().get(f"/console/accounts/{house.account_id}/requests/chatcmpl-1")
    assert (page.status_code, "phases of this request are not available" in page.text) == (200, True)


def test_a_persons_searches_of_the_log_are_few_so_that_others_find_theirs(house: House, tmp_path: Path) -> None:
    searched: list[str] = []

    def find(request_id: str, **_: Any) -> Found:
        searched.append(request_id)
        return Found([])

    use(house, "chatcmpl-1")
    house.console.find_lines = find
    browser, path = house.member(), f"/console/accounts/{house.account_id}/requests/chatcmpl-1"
    assert {browser.get(path).status_code for _ in range(SEARCHES_PER_MINUTE + 2)} == {200}
    assert len(searched) == SEARCHES_PER_MINUTE


def test_a_persons_playground_keys_are_one_in_filters_and_a_name_alone_hides_no_key(house: House) -> None:
    browser, path = house.member(), f"/console/accounts/{house.account_id}"
    for _ in range(2):
        submit(browser, f"{path}/playground", f"{path}/playground/key")
    named = house.ledger.create_key(house.account_id, "Playground of ada@example.org", "d" * 64, "sk-…").key_id
    ours = [key.key_id for key in house.ledger.list_keys(house.account_id) if key.key_id != named]
    for request_id, key_id in zip(("r0", "r1", "r2"), (*ours, named), strict=True):
        made = settlement(request_id, house.account_id, key_id, started_at=NOON - 5, finished_at=NOON - 1)
        house.ledger.settle([made])
    page = browser.get(f"{path}/requests", params={"key": "playground:Playground of ada@example.org"}).text
    assert sorted(listed(page)) == ["r0", "r1"]
    assert page.count(">Playground of ada@example.org</option>") == 2
    assert f'<option value="{named}"' in page
    keys = browser.get(f"{path}/keys?revoked=1").text
    assert [one in keys for one in (named, *ours)] == [True, False, False]
    usage = browser.get(f"{path}/usage", params={"by": "key", "of": "requests"}).text
    assert usage.count('"Playground of ada@example.org"') == 2, "one series of the page, one of the key"
