"""A canary is compared with the stable backend; each change goes through the admin API under the operator's name."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.console.operator_model_pages import comparison, verdict

from .conftest import House, cells, operator, submit, words

PATH = "/console/operator/models/svc-chat"
NOW_TEXT = "2026-06-01T12:00:00Z"


def backend(name: str, share: float) -> dict[str, Any]:
    found = {"name": name, "weight": round(100 * share), "share": share, "status": "RUNNING", "replicas": 1}
    return found | {"healthy": True, "ejected": False}


def figures(name: str, first: float, *, requests: int = 100, failed: int = 0) -> dict[str, Any]:
    times = {"p50": first, "p95": 2 * first}
    return {"backend": name, "requests": requests, "failed": failed} | dict.fromkeys(
        ("first_token_ms", "per_token_ms", "total_ms"), times
    )


TRAFFIC = {"version": 7, "weights": {"stable": 95, "new": 5}, "changed_at": NOW_TEXT, "actor": "ann@example.org"}
MODEL: dict[str, Any] = {
    "id": "svc-chat",
    "source": "config.yaml",
    "context_length": 8192,
    "max_output": 1024,
    "backends": [backend("new", 0.05), backend("stable", 0.95)],
    "fallback": None,
    "aliases": [],
    "price": {"input": "1.00", "cached_input": "0.50", "output": "3.00"},
    "traffic": TRAFFIC | {"reason": "<b>try", "before": 3, "undoes": None},
    "rollback": {"stable": 100},
    "first_token_target_s": 5.0,
    "output_token_target_s": 0.2,
    "history": [TRAFFIC | {"reason": "<b>try", "before": 3, "undoes": None}],
    "prices": [{"input": "2.00", "cached_input": "1.00", "output": "6.00", "version": 9, "effective_at": NOW_TEXT}],
}


@pytest.fixture
def served(house: House) -> House:
    house.answers["model"] = MODEL
    house.answers["models"] = {"models": [MODEL], "backends": []}
    compared = [figures("new", 150, failed=3), figures("stable", 100)]
    house.answers["comparison"] = {"backends": compared, "seconds": 900.0, "is_complete": True}
    return house


def test_the_canary_is_compared_with_the_backend_of_most_traffic() -> None:
    compared = {"backends": [figures("new", 150, failed=3), figures("stable", 100)]}
    stable, new = comparison(MODEL, compared)
    assert (stable["name"], stable["is_stable"], stable["changes"]) == ("stable", True, {})
    assert (new["error_rate"], new["is_enough"]) == (0.03, True)
    assert new["changes"]["first_token_ms", "p95"] == 0.5
    _, few = comparison(MODEL, {"backends": [figures("new", 150, requests=29), figures("stable", 100)]})
    assert few["is_enough"] is False
    for none in (None, {"backends": []}, {"backends": [figures("new", 1)]}):
        assert [row["changes"] for row in comparison(MODEL, none)] == [{}, {}]
    three = MODEL | {"backends": [*MODEL["backends"], backend("newer", 0.01)]}
    rows = comparison(three, {"backends": [figures("new", 100), figures("newer", 150)]})
    assert [row["changes"] for row in rows] == [{}, {}, {}], "a canary is not compared with another one"


def test_the_page_shows_the_difference_and_refreshes_it(served: House) -> None:
    page = operator(served, "read-only", "ray@example.org").get(PATH).text
    assert cells(page, "First token, p95") == ["200 ms", "300 ms", "50% slower"]
    assert '<span class="num text-red">50% slower</span>' in page
    assert cells(page, "Error rate") == ["0.00%", "3.00%", "3.00 points higher"]
    assert cells(page, "Requests")[1] == "100"
    assert f'hx-get="{PATH}" hx-select="#comparison"' in page
    assert "&lt;b&gt;try" in page
    assert "Shift traffic" not in page  # a reader changes nothing
    assert "Set price" not in page
    assert "svc-chat" in operator(served, "read-only", "rob@example.org").get("/console/operator/models").text
    del served.answers["comparison"]
    assert "No gateway answers, so there are no figures." in operator(served, "admin", "a@example.org").get(PATH).text


def test_a_single_backend_is_compared_with_nothing(served: House) -> None:
    served.answers["model"] = MODEL | {"backends": [backend("stable", 1.0)]}
    page = operator(served, "admin", "ann@example.org").get(PATH).text
    assert "Start a canary" in page
    assert "p95 200 ms" in words(page)
    assert "too few to judge" not in page
    assert "1 Jun 2026 Current $1.00" not in words(page)  # the latest price of the ledger is another one
    assert "A canary is a second backend" in page
    assert "Differences are relative" not in page


@pytest.mark.parametrize(
    ("requests", "failed", "first", "stable_failed", "says"),
    [
        (
            29,
            9,
            100,
            0,
            "new: too few requests to judge (29 of the 30 needed on each backend)."
            " So far: first token about as fast at the median, about as fast at p95.",
        ),
        (64, 0, 100, 3, "new: 0 of 64 requests failed; first token about as fast at the median, about as fast at p95."),
        (
            64,
            1,
            87,
            3,
            "new: 1 of 64 requests failed, too few to judge; first token 13% faster at the median, 13% faster at p95.",
        ),
        (
            64,
            1,
            150,
            20,
            "new: 1 of 64 requests failed, no more than on the stable backend;"
            " first token 50% slower at the median, 50% slower at p95.",
        ),
        (
            64,
            3,
            100,
            3,
            "new: 3 of 64 requests failed, more than on the stable backend;"
            " first token about as fast at the median, about as fast at p95.",
        ),
    ],
)
def test_one_sentence_says_what_the_figures_mean(
    requests: int, failed: int, first: float, stable_failed: int, says: str
) -> None:
    stable = figures("stable", 100, requests=1240, failed=stable_failed)
    rows = comparison(MODEL, {"backends": [figures("new", first, requests=requests, failed=failed), stable]})
    assert [verdict(row) for row in rows] == ["", says]
    assert [row["fails_more"] for row in rows] == [False, "more than" in says and "no more" not in says]


def test_a_canary_with_few_requests_can_be_promoted_early(served: House) -> None:
    browser = operator(served, "admin", "ann@example.org")
    few = figures("new", 159, requests=19) | {"first_token_ms": {"p50": 159.0, "p95": 182.0}}
    served.answers["comparison"] = {"backends": [few, figures("stable", 100)], "seconds": 900.0, "is_complete": True}
    assert "text-red" not in browser.get(PATH).text, "differences are grey"
    page = words(browser.get(PATH).text)
    assert "So far: first token 59% slower at the median, 9% faster at p95." in page
    assert "Promote early? There are too few requests to judge new yet. new gets all requests of svc-chat." in page
    served.answers["comparison"]["backends"] = [figures("new", 100), figures("stable", 100)]
    assert "Promote early" not in browser.get(PATH).text


def test_only_more_failures_than_on_the_stable_backend_are_red(served: House) -> None:
    browser = operator(served, "read-only", "ray@example.org")
    for failed, is_red in ((1, False), (30, True)):
        compared = [figures("new", 100, failed=failed), figures("stable", 100, requests=1240, failed=12)]
        served.answers["comparison"] = {"backends": compared, "seconds": 900.0, "is_complete": True}
        page = browser.get(PATH).text
        assert ('<span class="text-red">' in page) == is_red
        assert "same" in page


def test_prices_name_their_currency(served: House) -> None:
    browser = operator(served, "admin", "ann@example.org")
    page = browser.get(PATH).text
    for text in ("Prices in USD per million tokens", "New price in USD per million tokens", "Cached input (USD)"):
        assert text in page
    assert "prices in USD per million tokens" in browser.get("/console/operator/models").text


def test_each_change_names_its_operator_and_the_traffic_that_the_page_showed(served: House) -> None:
    browser = operator(served, "support", "sue@example.org")
    served.answers |= {name: {} for name in ("canary", "promote", "rollback")}
    sent = {"backend": "new", "share": "12.5%", "reason": "better", "expected": "7"}
    assert submit(browser, PATH, f"{PATH}/canary", **sent).status_code == 303
    assert served.asked[-1] == (
        "canary",
        {"id": "svc-chat", "body": {"backend": "new", "share": 12.5, "reason": "better", "expected": 7}},
        "sue@example.org",
    )
    assert submit(browser, PATH, f"{PATH}/promote", backend="new", expected="7").status_code == 303
    assert served.asked[-1][1]["body"] == {"backend": "new", "expected": 7}
    assert submit(browser, PATH, f"{PATH}/rollback", expected="7").status_code == 303
    assert served.asked[-1][:2] == ("rollback", {"id": "svc-chat", "body": {"expected": 7}})


def test_a_refused_change_is_explained_in_its_form(served: House) -> None:
    browser = operator(served, "support", "sue@example.org")
    served.answers["canary"] = {"refused": {"status": 422, "message": "new is not ready", "param": "backend"}}
    answer = submit(browser, PATH, f"{PATH}/canary", backend="new", share="20", reason="kept text")
    assert answer.status_code == 422
    assert "new is not ready" in answer.text
    assert 'value="kept text"' in answer.text
    asked = len(served.asked)
    answer = submit(browser, PATH, f"{PATH}/canary", backend="new", share="many")
    assert "Give the share as a percentage from 0 to 100." in answer.text
    assert "canary" not in [operation for operation, _, _ in served.asked[asked:]]
    served.answers["model"] = {"refused": {"status": 404, "message": "the model 'x' does not exist", "param": None}}
    assert browser.get("/console/operator/models/x").status_code == 404


def test_a_price_may_begin_later(served: House) -> None:
    browser = operator(served, "finance", "fay@example.org")
    served.answers["price"] = {}
    sent = {"input": "2", "cached_input": "1", "output": "6"}
    assert submit(browser, PATH, f"{PATH}/price", **sent, effective_at="2026-07-01T00:00").status_code == 303
    body = sent | {"effective_at": "2026-07-01T00:00:00Z"}
    assert served.asked[-1] == ("price", {"id": "svc-chat", "body": body}, "fay@example.org")
    assert submit(browser, PATH, f"{PATH}/price", **sent).status_code == 303
    assert served.asked[-1][1]["body"] == sent
    answer = submit(browser, PATH, f"{PATH}/price", **sent, effective_at="tomorrow")
    assert answer.status_code == 422
    assert "Give the time as YYYY-MM-DDTHH:MM, in UTC." in answer.text
    served.answers["price"] = {"refused": {"status": 422, "message": "output: 'x' is no amount", "param": "output"}}
    assert "is no amount" in submit(browser, PATH, f"{PATH}/price", **sent).text
