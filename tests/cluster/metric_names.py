"""Which metrics there are, and which ones the boards and the rules name. The service tests import both.

A service that has handled requests exports all `own_metrics()`. Boards and rules use `dashboard_metrics()`.
"""

from __future__ import annotations

from dashboards import boards, rules
from dashboards.exported import OF_GPUS, series
from dashboards.expressions import all_expressions, names
from dashboards.rules.serving import CERTIFICATE_EXPIRES
from serve_app.contracts import metrics

# Only machines with GPUs export these, and cert-manager.
ELSEWHERE = {name for metric in OF_GPUS for name in series(metric)} | {CERTIFICATE_EXPIRES}


def own_metrics() -> set[str]:
    """Every exported name of the service's own metrics."""
    return {name for metric in metrics.ALL for name in series(metric)}


def dashboard_metrics() -> set[str]:
    """Every metric that a board, a board's variable or a rule names, and that a service on one machine exports."""
    expressions = [rule.expr for group in rules.GROUPS for rule in group.rules]
    expressions += [expression for board in boards.documents() for expression in all_expressions(board)]
    named = {name for expression in expressions for name in names(expression)}
    return named - ELSEWHERE - {rule.name for rule in rules.RECORDINGS}
