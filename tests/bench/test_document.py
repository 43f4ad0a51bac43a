"""Programs renew their own parts of one document and leave each other's alone."""

from __future__ import annotations

import pytest

from bench.harness import document


def test_only_what_stands_between_the_marks_is_renewed() -> None:
    text = document.renewed("before\n<a>\nold\n</a>\nafter\n", "<a>", "</a>", "new\n")
    assert text == "before\n<a>\n\nnew\n\n</a>\nafter\n"
    assert document.renewed(text, "<a>", "</a>", "new\n") == text


@pytest.mark.parametrize("text", ["", "<a>", "</a> <a>"])
def test_a_document_without_both_marks_in_order_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="needs the lines"):
        document.renewed(text, "<a>", "</a>", "new")
