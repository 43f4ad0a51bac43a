from __future__ import annotations

from docs.gpu_table import PATH, page


def test_the_table_of_cards_is_what_serve_app_size_computes() -> None:
    text = PATH.read_text(encoding="utf-8")
    assert text == page(text), "run `python -m docs.gpu_table`"
