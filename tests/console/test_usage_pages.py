"""Usage, billing and members: the figures are the ledger's, and each page is of its account alone."""

from __future__ import annotations

import csv
import io
import json
import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import httpx
import pytest

from serve_app.console.date_range import chosen_range, preset
from serve_app.console.usage_report import MAX_SERIES, OTHERS, Report, Sums
from serve_app.contracts.books import Audit, Outcome
from serve_app.contracts.commands import CreateKey
from serve_app.contracts.key_format import digest
from serve_app.contracts.limiting import AccountStatus
from serve_app.contracts.limits import Contract
from serve_app.contracts.money import MINUS
from serve_app.contracts.people import FindPerson
from tests.accounting.books import COST, NOON, settlement

from .conftest import PASSWORD, House, submit, words

DAY = 86400.0
TODAY, YESTERDAY = "2026-06-01", "2026-05-31"


def use(house: House, *requests: str, at: float = NOON - 60, **changed: Any) -> str:
    """Settles requests with a key of their own; returns its id."""
    made = house.ledger.create_key(house.account_id, f"key of {requests[0]}", digest(requests[0]), "sk-…")
    fields = {"started_at": at - 2.5, "finished_at": at, **changed}
    settlements = [settlement(one, house.account_id, made.key_id, **fields) for one in requests]
    for first in range(0, len(settlements), 1000):
        house.ledger.settle(settlements[first : first + 1000])
    return made.key_id


def cells(page: str) -> list[list[str]]:
    """The rows of a page's tables, as text."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.DOTALL)
    return [[re.sub(r"<[^>]+>|\s+$", "", one) for one in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


def chart(page: str) -> dict[str, Any]:
    found = re.search(r'id="usage-chart-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def rejected(seconds: float, **changed: Any) -> dict[str, Any]:
    """A line of the request log."""
    at = datetime.fromtimestamp(NOON - seconds, UTC).isoformat()
    return {"time": at, "status": 429, "code": "requests", "model": "svc-chat", "key": "k1", **changed}


def rows_of(answer: httpx.Response) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(answer.text)))


def test_usage_is_shown_by_model_by_key_and_by_day(house: House) -> None:
    use(house, "r1", "r2")
    use(house, "r3", at=NOON - DAY, model="svc-coder")
    use(house, "old", at=NOON - 40 * DAY)
    path, browser = f"/console/accounts/{house.account_id}/usage", house.member()
    page = browser.get(path).text
    rows = cells(page)
    assert ["svc-chat", "2", "20", "4", "8", "0.000000092"] in rows
    assert ["svc-coder", "1", "10", "2", "4", "0.000000046"] in rows
    assert ["Total", "3", "30", "6", "12", "0.000000138"] in rows
    first, second = ["1 Jun 2026", "2"], ["31 May 2026", "1"]
    assert [row[:2] for row in rows if row[0].endswith(" 2026")][-2:] == [first, second], "the newest day first"
    assert f'/requests?range=custom&amp;from={YESTERDAY}&amp;to={YESTERDAY}"' in page
    by_key = browser.get(path, params={"by": "key", "of": "requests", "range": "90d"}).text
    assert ["key of old", "1", "10", "2", "4", "0.000000046"] in cells(by_key)
    data = chart(by_key)
    assert (len(data["labels"]), data["unit"], data["stacked"]) == (90, "requests", True)
    assert {one["name"]: sum(one["values"]) for one in data["series"]} == {
        "key of r1": 2,
        "key of r3": 1,
        "key of old": 1,
    }
    for wrong in ("8", "-1", "", "<script>", "30' --"):
        assert browser.get(path, params={"range": wrong, "by": wrong, "of": wrong}).status_code == 200


@pytest.mark.parametrize("span", ["30d", "24h"])
def test_usage_by_tag_counts_a_key_in_each_and_the_total_counts_it_once(house: House, span: str) -> None:
    house.ledger.update_key(use(house, "r1", "r2"), tags=["a", "b"])
    house.ledger.update_key(use(house, "r3"), tags=["b"])
    use(house, "r4")
    path, browser = f"/console/accounts/{house.account_id}/usage", house.member()
    page = browser.get(path, params={"range": span, "by": "tag", "of": "requests"}).text
    rows = cells(page)
    for name, requests in {"a": 2, "b": 3, "No tag": 1, "Total": 4}.items():
        assert [row[1] for row in rows if row[0] == name] == [str(requests)], name
    moment = "1 Jun 2026, 11:00" if span == "24h" else "1 Jun 2026"
    assert [row[1] for row in rows if row[0] == moment][-1] == "4"
    assert {one["name"]: sum(one["values"]) for one in chart(page)["series"]} == {"a": 2, "b": 3, "No tag": 1}
    assert "counts in each of them" in page
    assert "counts in each of them" not in browser.get(path).text


def test_short_ranges_are_shown_by_hour_with_failures_and_durations(house: House) -> None:
    use(house, "r1", "r2")
    use(house, "r3", at=NOON - 3600, model="svc-coder", outcome=Outcome.FAILED)  # the first moment of its hour
    use(house, "r4", at=NOON - 23 * 3600)
    use(house, "r5", at=NOON - 24 * 3600)
    path, browser = f"/console/accounts/{house.account_id}/usage", house.member()
    page = browser.get(path, params={"range": "24h", "of": "errors"}).text
    assert ["svc-chat", "3", "0", "2.50", "30", "6", "12", "0.000000138"] in cells(page)
    assert ["svc-coder", "1", "1", "2.50", "10", "2", "4", "0.00"] in cells(page)
    hours = [row[:3] for row in cells(page) if row[0].endswith(":00") and len(row) == 8]
    assert hours == [["1 Jun 2026, 11:00", "3", "1"], ["31 May 2026, 13:00", "1", "0"]]
    labels = chart(page)["labels"]
    assert (len(labels), labels[0], labels[-1]) == (24, "31 May, 13:00", "1 Jun, 12:00")
    custom = {"range": "custom", "from": YESTERDAY, "to": TODAY, "by": "status", "of": "latency"}
    page = browser.get(path, params=custom).text
    data = chart(page)
    assert (len(data["labels"]), data["type"], data["stacked"]) == (48, "line", False)
    values = {one["name"]: set(one["values"]) for one in data["series"]}
    assert values == {"Completed": {None, 2.5}, "Failed": {None, 2.5}}


@pytest.mark.parametrize(("last", "is_over"), [(TODAY, True), ("2026-06-05", True), ("", False)])
def test_the_last_moment_is_marked_only_while_it_runs(house: House, last: str, is_over: bool) -> None:
    """A range of dates can end later than now: at the last hour of today, or on a later day."""
    use(house, "r1")
    query = {"range": "custom", "from": TODAY, "to": last} if last else {"range": "7d"}
    page = house.member().get(f"/console/accounts/{house.account_id}/usage", params=query).text
    assert chart(page)["so_far"] is not is_over
    assert ("is not over" in page) is not is_over


def test_usage_by_member_counts_for_the_member_who_created_the_key(house: House) -> None:
    owner, path = house.member(), f"/console/accounts/{house.account_id}"
    submit(owner, f"{path}/keys", f"{path}/keys", name="laptop")
    [made] = house.ledger.list_keys(house.account_id)
    house.ledger.settle([settlement("r1", house.account_id, made.key_id, started_at=NOON - 5, finished_at=NOON - 1)])
    use(house, "r2")
    create = CreateKey(house.account_id, "theirs", "d" * 64, "sk-…", audit=Audit("operator@example.com"))
    key_id = house.ledger.run(create).key_id
    house.ledger.settle([settlement("r3", house.account_id, key_id, started_at=NOON - 5, finished_at=NOON - 1)])
    page = owner.get(f"{path}/usage", params={"by": "member"}).text
    assert {row[0] for row in cells(page) if row[1] == "1"} >= {"ada@example.org", "Unknown", "Former members"}
    assert "operator@example.com" not in page


@pytest.mark.parametrize(
    ("first", "last", "problem"),
    [
        ("2026-06-02", "2026-06-01", "after the last"),
        ("2024-01-01", "2026-06-01", "longer than 366 days"),
        ("2026-06-31", "2026-06-01", "not a date"),
        ("<script>", "", "YYYY-MM-DD"),
    ],
)
def test_wrong_dates_are_told_at_their_fields_which_keep_them(
    house: House, first: str, last: str, problem: str
) -> None:
    browser, path = house.member(), f"/console/accounts/{house.account_id}"
    for page in ("usage", "requests"):
        query = {"range": "custom", "from": first, "to": last}
        answer = browser.get(f"{path}/{page}", params=query)
        assert (answer.status_code, problem in answer.text) == (200, True)
        assert f'value="{first}"' in answer.text or "&lt;script&gt;" in answer.text
        assert browser.get(f"{path}/{page}.csv", params=query).status_code == 422


def test_a_range_with_too_many_requests_is_told_at_its_field(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.accounting.usage.MAX_SUMMED", 1)
    use(house, "r1", "r2")
    path, browser = f"/console/accounts/{house.account_id}/usage", house.member()
    for query, is_told in ({"range": "24h"}, True), ({"of": "errors"}, True), ({}, False):
        page = browser.get(path, params=query)
        assert (page.status_code, "choose a shorter range." in page.text) == (200, is_told), query
        assert browser.get(f"{path}.csv", params=query).status_code == (422 if is_told else 200)


@pytest.mark.parametrize("query", [{"by": "key"}, {"by": "tag", "range": "24h"}, {"by": "status", "of": "errors"}])
def test_the_file_of_usage_has_what_the_page_shows(house: House, query: dict[str, str]) -> None:
    use(house, "r1", "r2")
    use(house, "r3", at=NOON - 3700, model="svc-coder")
    path, browser = f"/console/accounts/{house.account_id}/usage", house.member()
    page = browser.get(path, params=query).text
    link = re.search(r'href="(/console[^"]*usage\.csv[^"]*)"', page)
    assert link is not None
    answer = browser.get(link[1].replace("&amp;", "&"))
    assert answer.headers["content-type"].startswith("text/csv")
    assert f"-by-{query['by']}.csv" in answer.headers["content-disposition"]
    found = rows_of(answer)
    sums: dict[str, int] = {}
    for row in found:
        sums[row[query["by"]]] = sums.get(row[query["by"]], 0) + int(row["requests"])
    assert sums == {row[0]: int(row[1]) for row in cells(page) if row[0] in sums}
    assert sum(sums.values()) == 3
    assert {row["charged"] for row in found} <= {"0.000000092", "0.000000046", "0.000000138"}


@pytest.mark.parametrize("count", [1, 7, 8, 9, 40])
def test_a_chart_stacks_all_values_of_a_day_and_joins_the_smallest(count: int) -> None:
    when = preset("7d", NOON)
    found = {(TODAY, f"m{number:02d}"): Sums(requests=number + 1) for number in range(count)}
    made = Report(when, "model", "requests", found, {TODAY: Sums(requests=1)}, {}, False)
    names = [name for name, _ in made.series]
    assert names[0] == f"m{count - 1:02d}", "the largest first"
    assert len(names) == min(count, MAX_SERIES + 1)
    assert (OTHERS in names) == (count > MAX_SERIES + 1)
    assert sum(values[-1] or 0 for _, values in made.series) == sum(range(1, count + 1))


@pytest.mark.parametrize(
    ("name", "first", "last", "unit"),
    [
        ("7d", "2026-05-26", TODAY, "day"),
        ("24h", f"{YESTERDAY}T13", f"{TODAY}T12", "hour"),
        ("month", TODAY, TODAY, "day"),
        ("last-month", "2026-05-01", "2026-05-31", "day"),
    ],
)
def test_a_preset_ends_now_or_with_its_month(name: str, first: str, last: str, unit: str) -> None:
    when = chosen_range({"range": name}, NOON)
    assert (when.moments[0], when.moments[-1], when.unit) == (first, last, unit)
    assert when.begins < when.ends
    assert when.query == {"range": name}


def test_a_statement_adds_up_and_billing_shows_what_was_given(house: House) -> None:
    house.ledger.credit(house.account_id, 10**9, kind="grant", memo="<b>welcome</b>", expires_at=NOON + 5 * DAY)
    use(house, "r1", "r2")
    path, browser = f"/console/accounts/{house.account_id}", house.member(role="billing")
    billing = browser.get(f"{path}/billing").text
    assert "&lt;b&gt;welcome&lt;/b&gt;" in billing
    for exact in ("0.999999908 USD", "0.999999908", "1.00", "0.000000092"):
        assert f'title="{exact}"' in billing
    assert ">6 Jun 2026, 12:00:00 UTC</time>" in billing
    assert f'href="{path}/statements/2026-06"' in billing
    statement = browser.get(f"{path}/statements/2026-06").text
    rows = cells(statement)
    assert rows.pop(0) == ["Entry", "Details", "Amount (USD)"]
    assert rows[0] == ["Opening balance", "", "0.0000000"]
    assert [row[0] for row in rows[1:-1]] == ["Payment", "Credit given", "Usage of svc-chat"]
    assert rows[-2][2] == "−0.0000001"
    assert rows[-1] == ["Balance so far", "", "5.9999999"]
    assert sum(Decimal(row[2].replace(MINUS, "-")) for row in rows[:-1]) == Decimal(rows[-1][2])
    assert ['title="0.00"' in statement, 'title="5.999999908"' in statement] == [True, True]
    assert 2 * COST == 92
    assert "In progress" in statement
    assert browser.get(f"{path}/statements/2026-00").status_code == 404
    house.clock.now += 31 * DAY
    closed = house.member("late@example.org").get(f"{path}/statements/2026-06").text
    assert ["Final" in closed, "In progress" in closed, "Closing balance" in closed] == [True, False, True]


def test_the_overview_counts_failed_and_rejected_requests_of_the_last_day_and_leads_to_them(house: House) -> None:
    use(house, "r1", "r2", "r3", at=NOON - 3 * DAY)
    use(house, "r4")
    use(house, "bad", outcome=Outcome.FAILED)
    use(house, "before", at=NOON - DAY + 1800, outcome=Outcome.FAILED)  # before the first of the 24 hours in the list
    path, browser = f"/console/accounts/{house.account_id}", house.member()
    house.answers["refusals"] = {"lines": [rejected(60), rejected(30), rejected(10, status=503)]}
    page = browser.get(path).text
    shown = "Reliability, last 24 hours Failed (5xx) 1 of 2 (50.0%) Rejected (4xx) 2 Duration, median 2.50 s"
    assert shown in words(page)
    assert house.asked[-1][1] == {"account_id": house.account_id, "since": NOON - DAY, "until": NOON}
    assert ">1</a> of 2" in page
    assert f'<a href="{path}/errors">2</a>' in page
    link = re.search(r'href="([^"]*status=failed[^"]*)"', page)
    assert link is not None
    listed = browser.get(link[1].replace("&amp;", "&")).text
    assert ["/requests/bad" in listed, "/requests/r1" in listed, "/requests/r4" in listed] == [True, False, False]


def test_an_owner_invites_a_member_who_then_sees_what_members_see(house: House) -> None:
    owner, path = house.member(), f"/console/accounts/{house.account_id}"
    made = submit(owner, f"{path}/members", f"{path}/members", email="bob@example.org", role="member")
    assert made.status_code == 201
    link = re.search(r'id="link">https?://[^/]+(/[^<]+)<', made.text)
    assert link is not None
    assert link[1].rpartition("/")[2] not in owner.get(f"{path}/members").text
    browser = house.browser()
    assert submit(browser, link[1], link[1], name="Bob", new_password=PASSWORD).status_code == 303
    person = house.ledger.run(FindPerson("bob@example.org"))
    assert person is not None
    assert dict(person.roles) == {house.account_id: "member"}
    entry = rf'class="nav-link" href="{path}([^"]*)".*?class="nav-link-title">([^<]+)<'
    expected = {"": "Overview", "/playground": "Playground", "/keys": "API keys", "/usage": "Usage"}
    assert dict(re.findall(entry, browser.get(path).text)) == expected | {"/requests": "Requests"}
    assert "bob@example.org Member Off" in words(owner.get(f"{path}/members").text)
    assert submit(owner, f"{path}/members", f"{path}/members", email="bob@example.org", role="owner").status_code == 422
    assert submit(owner, f"{path}/members", f"{path}/members", email="c@example.org", role="king").status_code == 422


def test_an_invitation_is_revoked_by_its_own_account_alone(house: House) -> None:
    owner, path = house.member(), f"/console/accounts/{house.account_id}/members"
    other = house.ledger.create_account("Bob's").account_id
    link = house.invite("carl@example.org")
    found = re.search(r"/invitations/(\w+)/revoke", owner.get(path).text)
    assert found is not None
    theirs = f"/console/accounts/{other}/members"
    stranger = house.member("bob@example.org", account_id=other)
    assert submit(stranger, theirs, f"{theirs}/invitations/{found[1]}/revoke").status_code == 404
    assert house.browser().get(link).status_code == 200
    assert submit(owner, path, f"{path}/invitations/{found[1]}/revoke").status_code == 303
    assert house.browser().get(link).status_code == 404


def test_the_overview_covers_the_time_of_which_it_knows_all_requests(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.console.overview_pages.SAMPLE", 2)
    use(house, "bad", at=NOON - 4 * 3600, outcome=Outcome.FAILED)
    use(house, "r1", at=NOON - 2.5 * 3600)
    use(house, "r2")
    browser, path = house.member(), f"/console/accounts/{house.account_id}"
    house.answers["refusals"] = {"lines": [rejected(60)]}
    page = words(browser.get(path).text)
    assert "Reliability, last 2 hours Failed (5xx) 0 of 1 Rejected (4xx) 1 Duration" in page
    assert house.asked[-1][1] == {"account_id": house.account_id, "since": NOON - 7200, "until": NOON}
    use(house, "r3", at=NOON - 10)
    use(house, "r4", at=NOON - 5)
    assert "Reliability, last 9 seconds Failed (5xx) 0 of 1" in words(browser.get(path).text)


def test_the_costs_of_a_table_add_up_to_its_total(house: House) -> None:
    for model in ("svc-chat", "svc-coder"):
        tokens = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 200_800_000}  # 1.004 at 5 nano-units
        use(house, f"of {model}", model=model, **tokens)
    page = house.member().get(f"/console/accounts/{house.account_id}/usage?by=model").text
    costs = {row[0]: row[-1] for row in cells(page) if row and row[0] in ("svc-chat", "svc-coder", "Total")}
    assert costs == {"svc-chat": "1.004", "svc-coder": "1.004", "Total": "2.008"}


def test_the_number_of_rejected_requests_is_exact_or_said_to_be_a_minimum(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.console.error_pages.SEARCHES_PER_MINUTE", 5)
    monkeypatch.setattr("serve_app.console.overview_pages.REJECTED_S", 0)
    use(house, "r1")
    browser, path = house.member(), f"/console/accounts/{house.account_id}"
    for answer, shown in (
        ({"lines": []}, "Rejected (4xx) 0 Duration"),
        ({"lines": [rejected(60)], "is_complete": False}, "Rejected (4xx) at least 1 Duration"),
        ({"lines": [rejected(60)] * 200}, "Rejected (4xx) at least 200 Duration"),
        ({"lines": [], "is_complete": False}, "Find rejected requests"),
        ({"refused": {"status": 503, "message": "busy"}}, "Find rejected requests"),
    ):
        house.answers["refusals"] = answer
        page = words(browser.get(path).text)
        assert (shown in page, "Rejected" in page) == (True, not shown.startswith("Find")), shown
    house.answers["refusals"] = {"lines": []}
    number = len(house.asked)
    assert "Find rejected requests" in words(browser.get(path).text)
    assert len(house.asked) == number, "a visitor can't cause any number of searches"


def test_the_log_is_searched_for_rejected_requests_at_most_once_a_minute(house: House) -> None:
    use(house, "r1")
    house.answers["refusals"] = {"lines": []}
    browser, path = house.member(), f"/console/accounts/{house.account_id}"
    for seconds, searches in ((0, 1), (59, 1), (2, 2)):
        house.clock.now += seconds
        assert "Rejected (4xx) 0 Duration" in words(browser.get(path).text)
        assert [operation for operation, *_ in house.asked].count("refusals") == searches


@pytest.mark.parametrize(("seconds", "peak"), [(0.0, 3), (59.0, 3), (60.0, 1)])
def test_the_peak_of_the_hour_stays_until_its_minute_is_over_an_hour_old(
    house: House, seconds: float, peak: int
) -> None:
    house.status = AccountStatus(house.account_id, 0, 0, Contract(rpm=10, tpm=1000, concurrency=1))
    for number, at in enumerate((0, 1, 58)):
        use(house, f"r{number}", at=NOON - 3600 + at)
    use(house, "late", at=NOON - 60)
    house.clock.now = NOON + seconds
    page = words(house.member().get(f"/console/accounts/{house.account_id}").text)
    assert f"Requests per minute {peak} of 10 Requests per minute in use Peak in the last hour" in page
