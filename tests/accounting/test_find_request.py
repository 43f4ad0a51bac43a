"""One request is found by its id, as it was billed."""

from __future__ import annotations

from serve_app.contracts.books import Outcome
from serve_app.contracts.commands import FindRequest

from .books import COST, PRICE, Books


def test_a_request_is_found_as_the_export_has_it(books: Books) -> None:
    books.ledger.settle(
        [
            books.settlement("chatcmpl-1"),
            books.settlement("chatcmpl-2", outcome=Outcome.CANCELLED),
            books.settlement("chatcmpl-3", outcome=Outcome.FAILED),
        ]
    )
    for row in books.ledger.export_usage().rows:
        assert books.ledger.run(FindRequest(row.request_id)) == row
    found = books.ledger.run(FindRequest("chatcmpl-2"))
    assert found is not None
    assert (found.outcome, found.charged, found.price) == (Outcome.CANCELLED, COST, PRICE)


def test_an_unknown_request_is_none(books: Books) -> None:
    books.ledger.settle([books.settlement("chatcmpl-1")])
    for unknown in ("chatcmpl-", "chatcmpl-11", "CHATCMPL-1", "", "a\0b", "\ud800"):
        assert books.ledger.run(FindRequest(unknown)) is None
