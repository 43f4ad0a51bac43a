"""Panels: each is a question, with the unit of its answer and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from string import ascii_uppercase
from typing import Final

from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard

TAG: Final = "serve-app"
DATASOURCE: Final = dashboard.DataSourceRef("prometheus", "${datasource}")
GAP_MS: Final = 90_000  # a line continues over shorter gaps, such as a failed scrape
Panel = stat.Panel | timeseries.Panel
Thresholds = Sequence[tuple[float | None, str]]


class Board(Enum):
    USERS = "User health"
    CAPACITY = "Capacity and autoscaling"
    ENGINE = "Engine"
    MONEY = "Limits and money"
    CLUSTER = "Cluster"

    @property
    def uid(self) -> str:
        return f"{TAG}-{self.name.lower()}"


def bad_from(value: float) -> Thresholds:
    return ((None, "green"), (value, "red"))


def high_is_bad(yellow: float, red: float) -> Thresholds:
    return ((None, "green"), (yellow, "yellow"), (red, "red"))


def low_is_bad(yellow: float, green: float) -> Thresholds:
    return ((None, "red"), (yellow, "yellow"), (green, "green"))


def single(
    title: str,
    expression: str,
    unit: str,
    thresholds: Thresholds,
    *,
    good: str,
    otherwise: str,
    then: Board,
    empty: str = "no data",
    names: Mapping[int, str] | None = None,
) -> stat.Panel:
    """Builds a panel with the current value, or `empty` without a value. `names`: texts to show instead of numbers."""
    panel = stat.Panel().title(title).description(_advice(good, otherwise)).unit(unit).links([_next(then)])
    steps = [dashboard.Threshold(value, color) for value, color in thresholds]
    panel.thresholds(build.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps))
    panel.color_scheme(build.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS))
    panel.color_mode(options.BigValueColorMode.BACKGROUND).graph_mode(options.BigValueGraphMode.NONE)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)).no_value(empty)
    if names:
        texts = {str(value): dashboard.ValueMappingResult(text=text) for value, text in names.items()}
        panel.mappings([dashboard.ValueMap(texts)])
    # An instant query: the last value of a range would still be shown after its process has ended.
    query = prometheus.Dataquery().expr(expression).ref_id("A").datasource(DATASOURCE).instant()
    return panel.datasource(DATASOURCE).height(4).with_target(query)


def graph(
    title: str,
    lines: Mapping[str, str],
    unit: str,
    *,
    good: str,
    otherwise: str,
    then: Board,
    stacked: bool = False,
) -> timeseries.Panel:
    """Builds a panel with lines. `lines` has their expressions by legend."""
    panel = timeseries.Panel().title(title).description(_advice(good, otherwise)).unit(unit).links([_next(then)])
    panel.color_scheme(build.FieldColor().mode(dashboard.FieldColorModeId.PALETTE_CLASSIC))
    panel.fill_opacity(40 if stacked else 8).axis_soft_min(0).span_nulls(GAP_MS)
    if stacked:
        panel.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL).group("A"))
    panel.tooltip(common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI).sort(options.SortOrder.DESCENDING))
    panel.legend(
        common.VizLegendOptions()
        .display_mode(options.LegendDisplayMode.LIST)
        .placement(options.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    for letter, (legend, expression) in zip(ascii_uppercase, lines.items(), strict=False):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(letter).datasource(DATASOURCE)
        panel.with_target(query.range())
    return panel.datasource(DATASOURCE).height(8)


def _advice(good: str, otherwise: str) -> str:
    return f"**Good:** {good}\n\n**Otherwise:** {otherwise}"


def _next(then: Board) -> build.DashboardLink:
    """Returns a link to the board to look at next, with the same time range and variables."""
    url = f"/d/{then.uid}?${{__url_time_range}}&${{__all_variables}}"
    return build.DashboardLink(f"Next: {then.value}").type(dashboard.DashboardLinkType.LINK).url(url)
