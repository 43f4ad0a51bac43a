"""Operators find accounts, limit and suspend them, and give credit: a large one only when a second agrees."""

from __future__ import annotations

from serve_app.console.live_pages import DRAWN
from serve_app.console.pressure import clock
from serve_app.console.request_history import Latest
from serve_app.contracts.books import Audit, Outcome, SettlementRejected
from serve_app.contracts.operators import SetOperatorRole
from serve_app.contracts.units import DAY_S
from tests.accounting.books import NOON, settlement

from .conftest import PASSWORD, House, cells, chart, operator, submit, words


def balance(house: House) -> int:
    return house.ledger.get_account(house.account_id).balance // 10**9


def test_an_account_is_found_by_name_and_id(house: House) -> None:
    for name in ("100% Ltd", "Under_score", "Plain"):
        house.ledger.create_account(name)
    browser, path = operator(house, "read-only", "ann@example.org"), "/console/operator/accounts"
    assert "<h1>Accounts</h1>" in browser.get(path).text
    house.ledger.set_active(house.account_id, False)
    for search, found in (
        ("ADA", "Ada&#39;s"),
        ("100%", "100% Ltd"),
        ("r_s", "Under_score"),
        (house.account_id, "Ada&#39;s"),
    ):
        page = browser.get(path, params={"search": search}).text
        assert page.count("<tr>") == 2, search
        assert found in page
    assert "No account found" in browser.get(path, params={"search": "nobody"}).text
    for query, number in (
        ({"state": "suspended"}, 1),
        ({"state": "active"}, 4),  # with the operator's staff account
        ({"below": "0.01"}, 4),
        ({"below": "5.01", "state": "suspended"}, 1),
        ({"spending": "yes"}, 0),
        ({"spending": "no"}, 5),
    ):
        assert browser.get(path, params=query).text.count("<code>acct_") == number, query
    page = browser.get(path, params={"below": "x"}).text
    assert "is not a valid amount" in page
    assert 'value="x"' in page


def test_limits_and_state_are_set_and_audited_under_the_operators_name(house: House) -> None:
    browser, path = operator(house, "support", "sue@example.org"), f"/console/operator/accounts/{house.account_id}"
    assert submit(browser, path, f"{path}/limits", rpm="3", weight="2").status_code == 303
    assert dict(house.ledger.get_account(house.account_id).limits) == {"rpm": 3, "weight": 2}
    assert submit(browser, path, f"{path}/limits", rpm="3").status_code == 303
    assert dict(house.ledger.get_account(house.account_id).limits) == {"rpm": 3}
    for wrong in ("x", "-1", "1.5", "٣"):
        assert submit(browser, path, f"{path}/limits", rpm=wrong).status_code == 422
    assert submit(browser, path, f"{path}/active", active="no").status_code == 303
    assert not house.ledger.get_account(house.account_id).active
    assert submit(browser, path, f"{path}/active", active="yes").status_code == 303
    assert house.ledger.get_account(house.account_id).active
    assert {one.actor for one in house.ledger.audit_log(house.account_id)[:3]} == {"sue@example.org"}
    assert submit(browser, path, f"{path}/credit", amount="1", kind="grant", memo="m").status_code == 403
    page = browser.get("/console/operator/audit", params={"account": house.account_id}).text
    assert "lowered" not in page
    assert "changed the weight in the queue of Ada&#39;s from 2 to the default" in page
    assert "reactivated the account Ada&#39;s" in page
    assert submit(browser, path, "/console/operator/accounts/acct_none/active", active="no").status_code == 422
    page = submit(browser, path, f"{path}/limits", rpm="1.5", tpm="77").text
    assert "Requests per minute must be a whole number." in page
    assert 'value="77"' in page  # the form keeps what was typed


def test_a_small_credit_is_given_once_however_often_its_form_is_sent(house: House) -> None:
    browser, path = operator(house, "finance", "fay@example.org"), f"/console/operator/accounts/{house.account_id}"
    for _ in range(2):
        fields = {"amount": "7", "kind": "grant", "memo": "sorry", "once": "0123"}
        assert submit(browser, path, f"{path}/credit", **fields).status_code == 303
    assert balance(house) == 12
    assert submit(browser, path, f"{path}/credit", amount="94", kind="grant", memo="more").headers["location"] == (
        "/console/operator/credits"  # with the 7 it would be more than one operator gives alone
    )
    assert balance(house) == 12
    for wrong in ({"memo": ""}, {"kind": "other"}, {"amount": "x"}, {"amount": "0"}):
        assert submit(browser, path, f"{path}/credit", **(fields | {"once": "4"} | wrong)).status_code == 422
    assert submit(browser, path, f"{path}/limits", rpm="3").status_code == 403


def test_a_large_credit_needs_a_second_operator(house: House) -> None:
    path, credits = f"/console/operator/accounts/{house.account_id}", "/console/operator/credits"
    fay, fred = (operator(house, "finance", f"{name}@example.org") for name in ("fay", "fred"))
    reader = operator(house, "read-only", "ray@example.org")
    fields = {"amount": "100.000000001", "kind": "top_up", "memo": "<b>invoice 7</b>"}
    assert submit(fay, path, f"{path}/credit", **fields).headers["location"] == credits
    page = fred.get(credits).text
    assert "&lt;b&gt;invoice 7&lt;/b&gt;" in page
    assert "by fay@example.org" in page
    assert "No credits yet." in page
    assert balance(house) == 5
    [approve] = {part for part in page.split('"') if part.endswith("/approve")}
    assert approve not in fay.get(credits).text
    assert submit(fay, credits, approve).status_code == 422
    assert submit(reader, credits, approve).status_code == 403
    assert balance(house) == 5
    assert submit(fred, credits, approve).status_code == 303
    assert balance(house) == 105
    assert submit(fred, credits, approve).status_code == 409
    assert balance(house) == 105
    actions = [(one.actor, one.action) for one in house.ledger.audit_log(house.account_id)[:3]]
    assert sorted(actions) == [
        ("fay@example.org", "ask_credit"), ("fred@example.org", "credit"), ("fred@example.org", "decide_credit"),
    ]  # fmt: skip
    assert submit(fay, path, f"{path}/credit", **fields).status_code == 303
    [reject] = {part for part in fay.get(credits).text.split('"') if part.endswith("/reject")}
    assert submit(fay, credits, reject).status_code == 303
    page = fay.get(credits).text
    assert "No credit is waiting for approval" in page
    row = cells(page, "Ada&#39;s")
    assert (row[0], row[1], row[3:]) == ("100.00", "Payment", ["fred@example.org", "–", "just now"])
    assert "Approved by fred@example.org" in page
    assert "Withdrawn by fay@example.org" in page
    assert balance(house) == 105
    assert house.ledger.check().ok


def test_credits_of_commands_are_listed_and_payments_of_a_provider_are_not(house: House) -> None:
    for actor, memo in (("make serve key:f6e1909ec1f5", "Opening credit"), ("stripe", "stripe pi_1")):
        more = {"kind": "grant" if actor != "stripe" else "top_up", "memo": memo, "audit": Audit(actor)}
        house.ledger.credit(house.account_id, 5 * 10**9, **more)
    for number in range(100):
        more = {"kind": "top_up", "memo": f"stripe pi_2{number}", "audit": Audit("stripe")}
        house.ledger.credit(house.account_id, 10**9, **more)
    page = operator(house, "read-only", "ray@example.org").get("/console/operator/credits").text
    found = ["5.00", "Credit", "Opening credit", "Setup", "Never", "just now"]
    assert cells(page, "Ada&#39;s") == found
    assert "pi_1" not in page


def test_the_books_are_shown(house: House) -> None:
    browser = operator(house, "admin", "ann@example.org")
    key = house.ledger.create_key(house.account_id, "k", "0" * 64, "sk-…")
    house.ledger.settle([settlement("r1", house.account_id, key.key_id)])
    assert "No difference found." in browser.get("/console/operator/books").text
    with house.ledger._database.transaction() as transaction:
        transaction.connection.exec_driver_sql("UPDATE accounts SET topped_up = topped_up + 1")
    assert "No difference found." not in browser.get("/console/operator/books").text


def test_what_waits_for_the_ledger_is_shown_with_the_books(house: House) -> None:
    browser, path = operator(house, "read-only", "ann@example.org"), "/console/operator/books"
    spool = {"settlements": 3, "bytes": 900, "age_s": 12.53, "ledger_away": True}
    assert house.live is not None
    house.live["gateways"] = [
        {"holder": "gateway-1", "open_requests": 7, "spool": spool},
        {"holder": "gateway-2", "open_requests": 0, "spool": None},
        {"holder": "gateway-3", "open_requests": 0, "spool": dict.fromkeys(spool, 0)},
    ]
    page = browser.get(path).text
    assert cells(page, "gateway-1") == ["7", "3", "900 bytes", "12.5 s", "Unavailable"]
    assert cells(page, "gateway-2") == ["0", "Not reported yet"]
    assert cells(page, "gateway-3") == ["0", "0", "0 bytes", "–", "Available"]
    assert "Checked 12:00:00 UTC" in page
    stray = settlement("r9", "acct_none", "key_none")
    [answer] = house.ledger.settle([stray])
    assert isinstance(answer, SettlementRejected)
    house.ledger.keep_stuck([(stray, answer)])
    page = browser.get(path).text
    assert "<code>r9</code>" in page
    assert "acct_none</a></td>" in page
    house.live = None
    page = browser.get(path).text
    assert "the pending charges are not known right now" in page
    assert "No difference found." in page


def test_a_role_that_is_taken_away_ends_the_sessions(house: House) -> None:
    browser = operator(house, "admin", "ann@example.org")
    assert browser.get("/console/operator/accounts").status_code == 200
    house.ledger.run(SetOperatorRole("ann@example.org", None))
    assert browser.get("/console/operator/accounts").status_code == 303
    again = house.browser()
    submit(again, "/console/sign-in", "/console/sign-in", email="ann@example.org", password=PASSWORD)
    assert again.get("/console/operator/accounts").status_code == 403


async def test_what_goes_on_now_is_shown_and_refreshes_itself(house: House) -> None:
    load = {"running": 3, "waiting": 1, "queue_age_s": 0.25, "kv_used": 0.125, "tokens_per_s": 1299.6}
    backend = {
        "name": "smollm2",
        "status": "RUNNING",
        "replicas": 2,
        "load": load | {"effective_share": 0.5, "pressure": 0.0},
    }
    assert house.live is not None
    house.live["backends"] = [backend, {"name": "other", "status": None, "replicas": None, "load": None}]
    house.live["models"] = [{"id": "svc-chat", "backends": [{"name": "smollm2", "share": 1.0}]}]
    house.live["accounts"] = [
        {"id": "acct_1", "name": "<b>Ada", "open_requests": 2, "held": "0.50", "tokens_used": 7, "tokens_limit": 9}
    ]
    pressure = house.console.pressure
    browser = operator(house, "read-only", "ann@example.org")
    levels = [0.5, 0.5, 0.25, 0.75, 1.5]
    for minute, level in enumerate(levels):
        assert "data-chart" not in browser.get("/console/operator/live").text  # a few points say nothing
        house.clock.now = NOON + 60 * minute
        backend["load"] = load | {"effective_share": 0.5, "pressure": level}
        await pressure.look()
    page = browser.get("/console/operator/live").text
    shown = ["Operational", "2", "3", "1", "0.25 s", "12.5%", "1,300", "1.5", "Reduced to 50%"]
    assert cells(page, "smollm2") == shown
    assert "No replica has reported yet" in page
    assert "&lt;b&gt;Ada" in page
    assert cells(page, "&lt;b&gt;Ada")[-1] == "78%"
    assert 'hx-get="/console/operator/live" hx-select="#now"' in page
    assert "smollm2 is overloaded: the limits of its users are lowered to 50%." in page
    assert 'id="requests-data"' not in page  # four rates between five samples
    assert chart(page, "pressure") == {
        "labels": (labels := [clock(NOON + 60 * minute) for minute in range(-55, 5)]),
        "series": [{"name": "smollm2", "values": [None] * 55 + levels}],
        "type": "line",
        "empty": {"until": 55, "text": "Measured since 12:00"},
    }  # fmt: skip
    assert chart(page, "speed")["labels"] == labels
    page = browser.get("/console/operator/live", params={"load": "day"}).text
    assert 'hx-get="/console/operator/live?load=day" hx-select="#charts"' in page
    shown = chart(page, "pressure")
    assert (len(shown["labels"]), shown["labels"][0]) == (144, "12:10")  # of the day before
    assert shown["series"][0]["values"][-1] == max(levels)
    house.live = None
    page = browser.get("/console/operator/live")
    assert page.status_code == 200
    assert "No limiter answers, so no request is admitted." in page.text


async def test_the_live_view_counts_the_requests_of_the_last_minutes(house: House) -> None:
    key = house.ledger.create_key(house.account_id, "k", "1" * 64, "sk-…").key_id

    def serve(number: int, outcome: Outcome = Outcome.COMPLETED) -> None:
        more = {"outcome": outcome, "finished_at": house.clock.now}
        house.ledger.settle([settlement(f"r{number}", house.account_id, key, **more)])

    pressure = house.console.pressure
    assert await pressure.recent() is None
    serve(0, Outcome.FAILED)
    await pressure.look()
    for minute in range(1, 5):
        house.clock.now = NOON + 60 * minute
        serve(minute, Outcome.FAILED if minute == 4 else Outcome.COMPLETED)
        await pressure.look()
    assert pressure.rates() == [(NOON + 60 * minute, 1.0) for minute in range(1, 5)]
    assert await pressure.recent() == Latest(requests=4, failed=1, minutes=4.0)
    browser = operator(house, "read-only", "ann@example.org")
    for path in ("/console/operator/live", "/console/operator"):
        assert "Last 4 minutes: 4 requests, 1 failed." in browser.get(path).text
    page = words(browser.get("/console/operator/live").text)
    assert "Requests per minute 1.0" in page
    assert "Error rate 25.00% 1 of 4 failed" in page
    house.clock.now = NOON + DAY_S  # another day begins with none
    assert await pressure.recent() is None


async def test_the_pressure_of_a_day_is_kept_and_no_more(house: House) -> None:
    pressure = house.console.pressure
    pressure.seen.extend((NOON - 60 * minute, {}) for minute in range(24 * 60, 0, -1))
    pressure.served.extend((at, 0) for at, _ in [*pressure.seen])
    await pressure.look()
    assert len(pressure.seen) == len(pressure.served) == len(pressure.seen_of("pressure")) == 24 * 60
    assert (pressure.seen[0][0], pressure.seen[-1][0]) == (NOON - 60 * (24 * 60 - 1), NOON)


async def test_a_chart_draws_the_backends_with_the_highest_load_and_says_how_many_it_leaves_out(house: House) -> None:
    load = {"running": 0, "waiting": 0, "queue_age_s": 0.0, "kv_used": 0.0, "tokens_per_s": 1.0, "effective_share": 1.0}
    assert house.live is not None
    house.live["backends"] = [
        {"name": f"b{number}", "status": "RUNNING", "replicas": 1, "load": load | {"pressure": 0.1 * (9 - number)}}
        for number in range(DRAWN + 2)
    ]
    for minute in range(5):
        house.clock.now = NOON + 60 * minute
        await house.console.pressure.look()
    page = operator(house, "read-only", "ann@example.org").get("/console/operator/live").text
    assert [one["name"] for one in chart(page, "pressure")["series"]] == [f"b{number}" for number in range(DRAWN)]
    assert "The 2 backends with the lowest values are not drawn." in page
    assert chart(page, "pressure")["empty"]["text"] == "Measured since 12:00"


def test_the_account_half_of_the_navigation_folds_for_operators_on_their_pages(house: House) -> None:
    browser = operator(house, "read-only", "ann@example.org")
    assert '<details class="nav-fold"><summary>' in browser.get("/console/operator").text
    assert '<details class="nav-fold" open><summary>' in browser.get("/console/profile").text
    assert "nav-fold" not in house.member("eve@example.org").get("/console/profile").text


def test_operators_find_their_reference_in_the_navigation_in_the_consoles_look(house: House) -> None:
    page = operator(house, "read-only", "ann@example.org").get("/console/operator/api").text
    assert 'href="/console/operator/api" aria-current="page"' in page
    assert "<title>Operators' API reference" in page or "<title>Operators&#39; API reference" in page
    assert 'href="/docs">' in page


def test_the_audit_log_folds_equal_records_and_shows_what_was_read_when_asked(house: House) -> None:
    browser, path = operator(house, "read-only", "ann@example.org"), "/console/operator/audit"
    for _ in range(3):
        browser.get("/console/operator/people")
    page = words(browser.get(path).text)
    assert "read the people of all accounts" not in page
    page = browser.get(path, params={"reads": "1"}).text
    assert page.count("read the people of all accounts") == 1
    assert "read the people of all accounts (3 times)" in words(page)
    assert "read the people" in browser.get(path, params={"action": "read_people"}).text  # asked for by name
