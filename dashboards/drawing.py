"""Draws a board as one picture, with the panels' layout, units and threshold colours."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from dashboards.panels import GAP_MS
from dashboards.query import Series
from dashboards.units import shown

WIDTH_IN, COLUMNS = 13.0, 24
LINE_IN: Final = 0.31  # height of one unit of a board's grid
HEAD_IN, TAIL_IN = 0.5, 0.1
EDGE: Final = 0.008  # gap between two panels, as a share of the width
COLOURS: Final = {"green": "#56a64b", "yellow": "#e0b400", "red": "#d64545"}
EMPTY: Final = "#8e8e8e"
MAX_NAMED: Final = 6  # lines in a legend: those with the largest values

Panel = dict[str, Any]
Answers = Mapping[int, Sequence[tuple[str, Series]]]


def draw(title: str, panels: Sequence[Panel], answers: Answers, time: tuple[float, float], path: Path) -> None:
    """Writes the picture of the panels. `answers`: by panel id. `time`: the range in Unix seconds. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = path.stem  # equal answers give equal files
    import matplotlib.pyplot as plt

    lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    height = lines * LINE_IN + HEAD_IN + TAIL_IN
    picture = plt.figure(figsize=(WIDTH_IN, height), facecolor="white")
    began, ended = (datetime.fromtimestamp(moment, UTC) for moment in time)
    picture.text(0.008, 1 - 0.3 / height, title, fontsize=14, weight="bold")
    note = f"drawn from the board's queries, {began:%H:%M} to {ended:%H:%M} UTC"
    picture.text(0.992, 1 - 0.3 / height, note, fontsize=8, color="#666666", ha="right")
    for panel in panels:
        place = panel["gridPos"]
        left, wide = place["x"] / COLUMNS, place["w"] / COLUMNS
        top, high = 1 - (HEAD_IN + place["y"] * LINE_IN) / height, place["h"] * LINE_IN / height
        if panel["type"] == "row":
            picture.text(left + EDGE, top - high / 2, panel["title"], fontsize=10, weight="bold", va="center")
        elif panel["type"] == "stat":
            room = (left + EDGE / 2, top - high + 0.06 / height, wide - EDGE, high - 0.1 / height)
            _single(picture.add_axes(room), panel, answers[panel["id"]])
        else:
            room = (left + 0.042, top - high + 0.66 / height, wide - 0.058, high - 0.99 / height)
            axis = picture.add_axes(room)
            _graph(axis, panel, answers[panel["id"]], time)
            picture.text(left + EDGE, top - 0.24 / height, panel["title"], fontsize=8.5, weight="bold")
            _name(axis, answers[panel["id"]], (left + EDGE, top - high + 0.36 / height))
    picture.savefig(path, dpi=90, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(picture)


def colour(steps: Sequence[Mapping[str, Any]], value: float) -> str:
    """Returns the colour of the last threshold that a number has reached."""
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return COLOURS.get(reached[-1], EMPTY)


def _single(axis: Any, panel: Panel, found: Sequence[tuple[str, Series]]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    value = found[0][1].points[-1][1] if found else math.nan
    if math.isnan(value):
        text, back = defaults.get("noValue", "no data"), EMPTY
    else:
        named = {key: entry for one in defaults.get("mappings", []) for key, entry in one["options"].items()}
        text = named.get(f"{value:g}", {}).get("text") or shown(value, defaults["unit"])
        back = colour(defaults["thresholds"]["steps"], value)
    axis.set_axis_off()
    axis.add_patch(_box(axis, back))
    wide = int(panel["gridPos"]["w"] * 8.5)
    axis.text(
        0.5, 0.92, textwrap.fill(panel["title"], wide), transform=axis.transAxes, ha="center", va="top", fontsize=7.5,
        color="white",
    )  # fmt: skip
    axis.text(
        0.5, 0.26, text, transform=axis.transAxes, ha="center", va="center", fontsize=15, weight="bold", color="white"
    )


def _box(axis: Any, back: str) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch((0, 0), 1, 1, boxstyle="square,pad=0", transform=axis.transAxes, color=back, linewidth=0)


def _graph(axis: Any, panel: Panel, found: Sequence[tuple[str, Series]], time: tuple[float, float]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    defaults = panel["fieldConfig"]["defaults"]
    axis.set_xlim(*time)
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda moment, _: f"{datetime.fromtimestamp(moment, UTC):%H:%M}"))
    axis.yaxis.set_major_locator(MaxNLocator(4))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, defaults["unit"])))
    axis.tick_params(labelsize=7, length=2)
    axis.grid(alpha=0.3, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    shown_lines = [(legend, _with_gaps(one.points)) for legend, one in _with_values(found)]
    if not shown_lines:
        axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", va="center", color=EMPTY)
    elif (defaults.get("custom", {}).get("stacking") or {}).get("mode") == "normal":
        moments = sorted({moment for _, points in shown_lines for moment, _ in points})
        heights = [[_value(points, moment) for moment in moments] for _, points in shown_lines]
        axis.stackplot(moments, heights, labels=[legend for legend, _ in shown_lines], alpha=0.6, linewidth=0)
    else:
        for legend, points in shown_lines:
            axis.plot([moment for moment, _ in points], [value for _, value in points], label=legend, linewidth=1.2)
    values = [value for _, points in shown_lines for _, value in points if not math.isnan(value)]
    if min(values, default=0.0) >= 0:  # the axis begins at 0, as `axis_soft_min(0)` makes it in Grafana
        axis.set_ylim(bottom=0, top=None if max(values, default=0.0) > 0 else 1)


def _name(axis: Any, found: Sequence[tuple[str, Series]], place: tuple[float, float]) -> None:
    """Draws the legend: names of the largest lines, and the number of the others. `place`: fractions of the picture."""
    shown_lines = _with_values(found)
    handles, labels = axis.get_legend_handles_labels()
    if not any(labels):
        return
    order = sorted(range(len(labels)), key=lambda number: -_largest(shown_lines[number][1].points))[:MAX_NAMED]
    names = [textwrap.shorten(labels[number], 40, placeholder="…") for number in order]
    if len(shown_lines) > MAX_NAMED:
        names[-1] += f"   + {len(shown_lines) - MAX_NAMED} more"
    axis.legend(
        [handles[number] for number in order], names, loc="upper left", ncols=3, frameon=False, fontsize=6.5,
        bbox_to_anchor=place, bbox_transform=axis.figure.transFigure, borderaxespad=0, borderpad=0,
        handlelength=1.2, columnspacing=1.0, labelspacing=0.3,
    )  # fmt: skip


def _with_values(found: Sequence[tuple[str, Series]]) -> list[tuple[str, Series]]:
    return [(legend, one) for legend, one in found if _largest(one.points) > -math.inf]


def _with_gaps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points with NaN in gaps longer than GAP_MS. This interrupts the line as on the board."""
    found: list[tuple[float, float]] = []
    for moment, value in points:
        if found and moment - found[-1][0] > GAP_MS / 1000:
            found.append((moment, math.nan))
        found.append((moment, value))
    return found


def _largest(points: Sequence[tuple[float, float]]) -> float:
    return max((value for _, value in points if not math.isnan(value)), default=-math.inf)


def _value(points: Sequence[tuple[float, float]], moment: float) -> float:
    found = dict(points).get(moment, 0.0)
    return 0.0 if math.isnan(found) else found
