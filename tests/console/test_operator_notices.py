"""A notice is a banner on the pages of the customers that it is for, while it lasts, and nowhere else."""

from __future__ import annotations

from serve_app.console.notices import KEPT_S

from .conftest import House, operator, submit

PATH = "/console/operator/notices"


def test_a_notice_is_shown_to_its_customers_while_it_lasts(house: House) -> None:
    other = house.ledger.create_account("Bob's").account_id
    ada, bob = house.member("ada@example.org"), house.member("bob@example.org", account_id=other)
    mine, theirs = f"/console/accounts/{house.account_id}", f"/console/accounts/{other}"
    sue = operator(house, "support", "sue@example.org")
    for fields in ({"text": "<b>for all</b>", "hours": "4"}, {"text": "for Ada", "account": house.account_id}):
        assert submit(sue, PATH, PATH, level="warning", **fields).status_code == 303
    submit(sue, PATH, PATH, text="tomorrow", level="info", starts_at="2026-06-02T00:00")
    page = ada.get(mine).text
    assert 'class="alert alert-warning" role="status"' in page
    assert "&lt;b&gt;for all&lt;/b&gt;" in page
    assert "for Ada" in page
    assert "tomorrow" not in page
    page = bob.get(theirs).text
    assert "for all" in page
    assert "for Ada" not in page
    refused = bob.get(mine)
    assert refused.status_code == 403
    assert "for Ada" not in refused.text
    assert "for all" not in sue.get("/console/operator").text
    assert "for all" not in house.browser().get("/console/sign-in").text
    house.clock.now += 4 * 3600
    page = ada.get(mine).text
    assert "for all" not in page
    assert "for Ada" in page
    [end] = [part for part in sue.get(PATH).text.split('"') if part.endswith("/end") and "notice_" in part][:1]
    assert submit(sue, PATH, end).status_code == 303
    house.clock.now += KEPT_S
    shown = sue.get(PATH).text
    assert "Ended" in shown


def test_a_notice_that_can_not_be_is_explained_in_its_form(house: House) -> None:
    sue, ray = operator(house, "support", "sue@example.org"), operator(house, "read-only", "ray@example.org")
    for fields, text in (
        ({"text": ""}, "a notice has 1 to 1000 printable characters"),
        ({"text": "kept text", "level": "loud"}, "use one of info, warning, danger"),
        ({"text": "kept text", "starts_at": "soon"}, "Give the start as YYYY-MM-DDTHH:MM, in UTC."),
        ({"text": "kept text", "account": "acct_none"}, "acct_none"),
    ):
        answer = submit(sue, PATH, PATH, **({"level": "info"} | fields))
        assert answer.status_code == 422
        assert text in answer.text
        assert fields["text"] in answer.text
    assert submit(ray, PATH, PATH, text="x", level="info").status_code == 403
    assert "Publish a notice" not in ray.get(PATH).text


def test_pages_are_shown_while_notices_can_not_be_read(house: House) -> None:
    ada = house.member("ada@example.org")
    sue = operator(house, "support", "sue@example.org")
    submit(sue, PATH, PATH, text="still here", level="info", hours="")
    assert "still here" in ada.get(f"/console/accounts/{house.account_id}").text
