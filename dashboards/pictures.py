"""`python -m dashboards.pictures`: draws boards from the answers that a Prometheus gives to their queries.

It shows the boards without a Grafana. The pictures are drawings, not screenshots.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import httpx

from dashboards import boards, drawing
from dashboards.query import Prometheus, Series, filled

POINTS: Final = 120  # per line
MIN_STEP_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Time:
    """The time range that a board shows, in Unix seconds."""

    began: float
    ended: float

    @property
    def step_s(self) -> float:
        return max(MIN_STEP_S, (self.ended - self.began) / POINTS)


def first_rows(board: dict[str, Any], rows: int) -> list[dict[str, Any]]:
    """Returns the board's first `rows` rows: their titles and panels."""
    begun = 0

    def is_shown(panel: dict[str, Any]) -> bool:
        nonlocal begun
        begun += panel["type"] == "row"
        return begun <= rows

    return list(takewhile(is_shown, board["panels"]))


def answer(
    prometheus: Prometheus, panel: dict[str, Any], shown: Time, chosen: Mapping[str, str]
) -> list[tuple[str, Series]]:
    """Returns the series of a panel with their legends, in the order of its queries."""
    found: list[tuple[str, Series]] = []
    for target in panel.get("targets", []):
        expression = filled(target["expr"], chosen, shown=f"{shown.ended - shown.began:.0f}s")
        if target.get("instant"):
            series = prometheus.ask(expression, shown.ended)
        else:
            series = prometheus.ask_range(expression, shown.began, shown.ended, shown.step_s)
        found += [(one.legend(target.get("legendFormat", "")), one) for one in series]
    return found


def draw(
    prometheus: Prometheus, uid: str, path: Path, shown: Time, chosen: Mapping[str, str], *, rows: int = 99
) -> None:
    """Writes the board's picture, in the format of the suffix of `path`. Raises the errors of `Prometheus`."""
    [board] = [one for one in boards.documents() if one["uid"] == uid]
    panels = first_rows(board, rows)
    answers = {panel["id"]: answer(prometheus, panel, shown, chosen) for panel in panels}
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.draw(board["title"], panels, answers, (shown.began, shown.ended), path)


def main(arguments: Sequence[str] | None = None) -> int:
    names = [board["uid"].partition("-app-")[2] for board in boards.documents()]
    parser = argparse.ArgumentParser(prog="python -m dashboards.pictures", description=__doc__)
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="output folder: one file per board")
    parser.add_argument("--boards", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--rows", type=int, default=99, help="number of rows to draw of each board; default: all")
    parser.add_argument("--minutes", type=float, default=10.0, help="time range, up to now; default: 10")
    parser.add_argument("--cluster", default=".*", help="regular expression for the label; default: all")
    parser.add_argument("--format", choices=("png", "svg"), default="png", help="default: png")
    options = parser.parse_args(arguments)
    prometheus = Prometheus(options.prometheus)
    now = time.time()
    shown = Time(now - 60 * options.minutes, now)
    for name in options.boards:
        path = options.out / f"{name}.{options.format}"
        try:
            draw(prometheus, f"serve-app-{name}", path, shown, {"cluster": options.cluster}, rows=options.rows)
        except (httpx.HTTPError, ValueError) as error:
            print(f"{options.prometheus} does not answer {name}: {error}", file=sys.stderr)
            return 1
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
