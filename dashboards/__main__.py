"""`python -m dashboards`: writes boards, rules and docs/metrics.md to their files.

With `--check`, it reports problems instead.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dashboards import boards, metrics_page, rules
from dashboards.lint import dead_metrics, problems

ROOT = Path(__file__).parents[1]


def check(root: Path = ROOT) -> list[str]:
    documents = boards.documents()
    found = [problem for board in documents for problem in problems(board)]
    found += dead_metrics(documents, (rule.expr for group in rules.GROUPS for rule in group.rules))
    for path, text in files().items():
        file = root / path
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            found.append(f"{path} is out of date: run `python -m dashboards`")
    extra = {path.name for path in (root / boards.FOLDER).glob("*.json")} - {path.name for path in files()}
    return found + [f"{boards.FOLDER / name} is no longer generated: delete it" for name in sorted(extra)]


def files() -> dict[Path, str]:
    return boards.files() | rules.files() | metrics_page.files()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is wrong")
    if parser.parse_args().check:
        found = check()
        print("\n".join(found), file=sys.stderr, end="\n" if found else "")
        sys.exit(1 if found else 0)
    for path, text in files().items():
        (ROOT / path).write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
