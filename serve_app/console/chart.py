"""A chart of stacked bars, one per day, as shapes for a template; it needs no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

SERIES: Final = 5  # with separate colours; the remaining series are combined
OTHERS: Final = "others"
WIDTH, HEIGHT = 720, 200


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of a day's bar, in the units of a picture of WIDTH × HEIGHT."""

    series: int
    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """The bars, and the `names` of their series, largest first. `most` is the value of a bar of full height."""

    bars: Sequence[Bar]
    names: Sequence[str]
    most: int


def stacked(
    days: Sequence[str], values: Mapping[tuple[str, str], int], labels: Mapping[str, str] = MappingProxyType({})
) -> Chart:
    """Stacks values by day and series. `labels` name series for display. Days that are not in `days` are left out."""
    sums: dict[str, int] = {}
    for (day, name), value in values.items():
        if day in days:
            sums[name] = sums.get(name, 0) + value
    largest = sorted(sums, key=lambda name: (-sums[name], name))[:SERIES]
    names = [*largest, *([OTHERS] if len(sums) > SERIES else [])]
    stacks = [[0] * len(names) for _ in days]
    for (day, name), value in values.items():
        if day in days:
            stacks[days.index(day)][largest.index(name) if name in largest else SERIES] += value
    most = max([1, *(sum(stack) for stack in stacks)])
    step, bars = WIDTH / len(days), []
    for number, (day, stack) in enumerate(zip(days, stacks, strict=True)):
        top = float(HEIGHT)
        for series, value in enumerate(stack):
            height = HEIGHT * value / most
            top -= height
            if value:
                title = f"{day}, {labels.get(names[series], names[series])}"
                bars.append(Bar(series, step * number + step * 0.1, top, step * 0.8, height, title))
    return Chart(bars, names, most)
