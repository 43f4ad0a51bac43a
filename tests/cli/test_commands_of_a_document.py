"""No command of a document that is run escapes: tests/service/test_guides.py counts on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.operating.document import INLINE, Command, left_over, sections

PAGE = """# Page

## First

`serve-app top` shows, `--once` once, and `config.yaml` is a file. `make serve`.

```
serve-app usage \\
    --from 2026-01-01      # since then
A=1 B=2 serve deploy config.yaml
```

### Second

```sql
ALTER ROLE a PASSWORD NULL;
GRANT b TO a;
```

```conf
wal_level = replica
```

```yaml
args: {}
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path / "page.md"


def test_each_command_is_found_in_its_section_and_in_order(page: Path) -> None:
    found = sections(page)
    assert {title: [(one.language, one.name) for one in part] for title, part in found.items()} == {
        "Page": [],
        "First": [
            (INLINE, "serve-app top"),
            (INLINE, "make serve"),
            ("", "serve-app usage      --from 2026-01-01"),
            ("", "serve deploy config.yaml"),
        ],
        "Second": [
            ("sql", "ALTER ROLE a PASSWORD NULL"),
            ("sql", "GRANT b TO a"),
            ("conf", "wal_level = replica\n"),
        ],
    }


def test_a_block_in_another_language_is_not_passed_over(page: Path) -> None:
    page.write_text(PAGE.replace("```yaml", "```python"))
    with pytest.raises(AssertionError, match="is a block of 'python' to be run"):
        sections(page)


def test_what_stands_in_brackets_is_run_without_and_with() -> None:
    assert Command("", "serve-app ledger check [--full] [--database URL]", "").variants() == [
        "serve-app ledger check",
        "serve-app ledger check --full",
        "serve-app ledger check --full --database URL",
    ]


def test_what_neither_ran_nor_is_listed_is_left_over_and_so_is_a_stale_entry(page: Path) -> None:
    ran = ["serve-app top --once", "serve deploy config.yaml", "ALTER ROLE a PASSWORD NULL", "wal_level = replica\n"]
    not_run, stale = left_over(sections(page), ran, {"make serve": "a reason", "make setup": "of an earlier page"})
    assert not_run == {"serve-app usage      --from 2026-01-01", "GRANT b TO a"}
    assert stale == {"make setup"}
