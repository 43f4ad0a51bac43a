"""docs/settings.md has each setting with the type, default and description of its declaration."""

from __future__ import annotations

from docs.settings_page import PATH, page


def test_the_page_is_generated_from_the_settings() -> None:
    assert PATH.read_text(encoding="utf-8") == page(), "run `python -m docs.settings_page`"
