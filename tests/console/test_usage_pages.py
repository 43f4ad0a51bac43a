"""Usage, billing and members: the figures are the ledger's, and each page is of its account alone."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

import pytest

from serve_app.api.doors import DOORS
from serve_app.console.chart import HEIGHT, OTHERS, stacked
from serve_app.contracts.books import Outcome
from serve_app.contracts.key_format import digest
from serve_app.contracts.people import FindPerson
from tests.accounting.books import COST, NOON, settlement

from .conftest import PASSWORD, House, submit

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
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    return [[re.sub(r"<[^>]+>", "", one) for one in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


def test_usage_is_shown_by_model_by_key_and_by_day(house: House) -> None:
    use(house, "r1", "r2")
    use(house, "r3", at=NOON - DAY, model="svc-coder")
    use(house, "old", at=NOON - 40 * DAY)
    path = f"/console/accounts/{house.account_id}/usage"
    browser = house.member()
    rows = cells(browser.get(path).text)
    assert ["svc-chat", "2", "20", "4", "8", "0.000000092"] in rows
    assert ["svc-coder", "1", "10", "2", "4", "0.000000046"] in rows
    assert rows.index([TODAY, "2", "28", "0.000000092"]) < rows.index([YESTERDAY, "1", "14", "0.000000046"])
    by_key = browser.get(path, params={"by": "key", "of": "requests", "span": "90 days"}).text
    assert ["key of old", "1", "10", "2", "4", "0.000000046"] in cells(by_key)
    assert by_key.count("<rect class") == 3 + 3  # bars, and the legend
    assert "The highest bar is 2 requests" in by_key
    for wrong in ("8", "-1", "", "<script>", "30' --"):
        assert browser.get(path, params={"span": wrong, "by": wrong, "of": wrong}).status_code == 200


@pytest.mark.parametrize("span", ["30 days", "24 hours"])
def test_usage_by_tag_counts_a_key_in_each_and_days_count_it_once(house: House, span: str) -> None:
    house.ledger.update_key(use(house, "r1", "r2"), tags=["a", "b"])
    house.ledger.update_key(use(house, "r3"), tags=["b"])
    use(house, "r4")
    path, browser = f"/console/accounts/{house.account_id}/usage", house.member()
    page = browser.get(path, params={"span": span, "by": "tag", "of": "requests"}).text
    rows = cells(page)
    for name, requests in {"a": 2, "b": 3, "no tag": 1}.items():
        assert [row[1] for row in rows if row[0] == name] == [str(requests)], name
    moment = f"{TODAY} 11:00" if span == "24 hours" else TODAY
    assert [moment, "4", "56", "0.000000184"] in rows
    assert "The highest bar is 6 requests" in page
    assert page.count("<title>2026-06-01") == 3
    assert ", no tag</title>" in page
    assert "counts in each of them" in page
    assert "counts in each of them" not in browser.get(path).text


def test_the_last_day_is_shown_by_hour(house: House) -> None:
    use(house, "r1", "r2")
    use(house, "r3", at=NOON - 3600, model="svc-coder")  # the first moment of its hour
    use(house, "r4", at=NOON - 23 * 3600)
    use(house, "r5", at=NOON - 24 * 3600)
    path, browser = f"/console/accounts/{house.account_id}/usage", house.member()
    page = browser.get(path, params={"span": "24 hours", "of": "requests"}).text
    rows = cells(page)
    assert [row for row in rows if ":00" in row[0]] == [
        [f"{TODAY} 11:00", "3", "42", "0.000000138"],
        [f"{YESTERDAY} 13:00", "1", "14", "0.000000046"],
    ]
    assert ["svc-chat", "3", "30", "6", "12", "0.000000138"] in rows
    assert f'/requests?day={YESTERDAY}">' in page
    assert "for each hour of 24" in page
    by_key = cells(browser.get(path, params={"span": "24 hours", "by": "key"}).text)
    assert ["key of r3", "1", "10", "2", "4", "0.000000046"] in by_key


def test_single_requests_of_a_day_go_page_by_page(house: House) -> None:
    use(house, *[f"r{number:03d}" for number in range(150)])
    use(house, "failed", outcome=Outcome.FAILED, completion_tokens=0, at=NOON - DAY)
    path, browser = f"/console/accounts/{house.account_id}/requests", house.member(role="billing")
    first = browser.get(path, params={"day": TODAY}).text
    rows = cells(first)[1:]
    assert len(rows) == 100
    assert rows[0] == [
        "11:59:00",
        "",
        "svc-chat",
        "key of r000",
        "10",
        "2",
        "4",
        "2.5",
        "completed",
        "0.000000046",
        "r000",
    ]
    later = re.search(r'href="(\?day=[^"]+)"', first)
    assert later is not None
    rest = browser.get(path + later[1].replace("&amp;", "&")).text
    assert [row[-1] for row in cells(rest)[1:]] == [f"r{number:03d}" for number in range(100, 150)]
    assert "failed" in browser.get(path, params={"day": YESTERDAY}).text
    use(house, *(f"{door.id_prefix}1" for door in DOORS), at=NOON - DAY)
    shown = {row[-1]: row[1] for row in cells(browser.get(path, params={"day": YESTERDAY}).text)[1:]}
    assert shown == {"failed": ""} | {f"{door.id_prefix}1": door.path for door in DOORS}
    assert browser.get(path, params={"day": TODAY, "after": "nowhere"}).status_code == 422
    for wrong in ("2026-06-31", "2026-6-1", "9999-12-31", "today", "2026-06-01T00:00"):
        assert browser.get(path, params={"day": wrong}).status_code == 404, wrong


def test_a_month_is_a_file_of_all_its_requests(house: House) -> None:
    use(house, *[f"r{number:04d}" for number in range(1_001)])
    use(house, "may", at=NOON - DAY)
    house.ledger.create_account("Bob's")
    path, browser = f"/console/accounts/{house.account_id}/usage", house.member()
    answer = browser.get(f"{path}/2026-06.csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["request_id"] for row in rows] == [f"r{number:04d}" for number in range(1_001)]
    assert {row["charged"] for row in rows} == {"0.000000046"}
    assert 'filename="usage-2026-06.csv"' in answer.headers["content-disposition"]
    assert answer.headers["content-type"].startswith("text/csv")
    assert len(browser.get(f"{path}/2026-05.csv").text.splitlines()) == 2
    assert browser.get(f"{path}/2026-13.csv").status_code == 404


def test_a_statement_adds_up_and_billing_shows_what_was_given(house: House) -> None:
    house.ledger.credit(house.account_id, 10**9, kind="grant", memo="<b>welcome</b>", expires_at=NOON + 5 * DAY)
    use(house, "r1", "r2")
    path, browser = f"/console/accounts/{house.account_id}", house.member(role="billing")
    billing = browser.get(f"{path}/billing").text
    assert "&lt;b&gt;welcome&lt;/b&gt;" in billing
    assert "0.999999908 of 1.00 is left, expires 2026-06-06 12:00 UTC" in billing
    assert f'href="{path}/statements/2026-06"' in billing
    rows = cells(browser.get(f"{path}/statements/2026-06").text)
    assert rows[0] == ["Balance before", "", "0.00"]
    assert [row[0] for row in rows[1:-1]] == ["Payment", "Credit given", "Usage of svc-chat"]
    assert rows[-2][2] == "-0.000000092"
    assert rows[-1] == ["Balance after", "", "5.999999908"]
    assert 2 * COST == 92
    assert browser.get(f"{path}/statements/2026-00").status_code == 404


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
    sections = re.findall(rf'href="{path}([^"]*)">(\w+)<', browser.get(path).text)
    expected = {"": "Overview", "/playground": "Playground", "/keys": "Keys", "/usage": "Usage", "/docs": "Docs"}
    assert dict(sections) == expected
    assert "bob@example.org, member, without one-time codes" in owner.get(f"{path}/members").text
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


@pytest.mark.parametrize("count", [1, 5, 6, 40])
def test_a_chart_stacks_all_values_of_a_day_and_joins_the_smallest(count: int) -> None:
    values = {("d2", f"m{number}"): number + 1 for number in range(count)} | {("d0", "m0"): 99}
    chart = stacked(["d1", "d2"], values)
    assert len(chart.names) == min(count, 6)
    assert (OTHERS in chart.names) == (count > 5)
    assert sum(bar.height for bar in chart.bars) == pytest.approx(HEIGHT)
    assert chart.most == sum(range(1, count + 1))
    assert min(bar.y for bar in chart.bars) == pytest.approx(0)
