"""Builds a board from its panels: variables, links to the other boards, rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Final

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import stat
from grafana_foundation_sdk.models import dashboard

from dashboards.exported import REPLICA_HEALTHY
from dashboards.panels import DATASOURCE, TAG, Board, Panel
from serve_app.contracts import metrics

WIDTH: Final = 24


def board(
    which: Board, description: str, variables: Sequence[str], rows: Mapping[str, Sequence[Panel]]
) -> dashboard.Dashboard:
    """Builds a board with data source, cluster, namespace and `variables` ("identifier", "backend") to choose."""
    made = build.Dashboard(which.value).uid(which.uid).description(description).tags([TAG]).editable()
    made.timezone("browser").refresh("30s").time("now-3h", "now").tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
    made.link(
        build.DashboardLink("Boards")
        .type(dashboard.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .include_vars(True)
        .keep_time(True)
    )
    made.with_variable(build.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    for name in ("cluster", "namespace", *variables):
        made.with_variable(_variable(name))
    ids = count(1)
    for title, panels in rows.items():
        made.with_row(build.Row(title).id(next(ids)))
        columns = 2 if len(panels) in (2, 4) else 3
        for panel in panels:
            width = WIDTH // (len(panels) if isinstance(panel, stat.Panel) else columns)
            made.with_panel(panel.id(next(ids)).span(width))
    return made.build()


_SERVICE: Final = 'cluster=~"$cluster", namespace=~"$namespace"'
_VALUES: Final = {
    "cluster": ("Cluster", REPLICA_HEALTHY.exported, "cluster"),
    "namespace": ("Namespace", f'{REPLICA_HEALTHY.exported}{{cluster=~"$cluster"}}', "namespace"),
    "identifier": ("Identifier", f"{metrics.BACKEND_WEIGHT.exported}{{{_SERVICE}}}", "model"),
    "backend": ("Backend", f"{metrics.RUNNING.exported}{{{_SERVICE}}}", "application"),
}


def _variable(name: str) -> build.QueryVariable:
    title, selector, label = _VALUES[name]
    return (
        build.QueryVariable(name)
        .label(title)
        .query({"query": f"label_values({selector}, {label})", "refId": name})
        .datasource(DATASOURCE)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(dashboard.VariableOption(True, ["All"], ["$__all"]))
    )
