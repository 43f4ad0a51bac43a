"""Prometheus' recording and alert rules. `python -m dashboards` writes the files that Prometheus reads.

To change a rule, edit it here, run `python -m dashboards`, then `pytest tests/dashboards`. Each alert has a section in
`docs/runbooks.md` and cases in `tests/dashboards/rule_tests`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dashboards.rules import limiter, money, serving, slo
from dashboards.rules.rule import RUNBOOKS, Alert, Group, Recording
from dashboards.rules.rule_files import manifest_text, rules_text

__all__ = ["ALERTS", "GROUPS", "RECORDINGS", "RUNBOOKS", "Alert", "Group", "Recording", "files"]

GROUPS: Final[tuple[Group, ...]] = (*slo.GROUPS, *serving.GROUPS, *money.GROUPS, *limiter.GROUPS)
ALERTS: Final = tuple(rule for group in GROUPS for rule in group.rules if isinstance(rule, Alert))
RECORDINGS: Final = tuple(rule for group in GROUPS for rule in group.rules if isinstance(rule, Recording))


def files() -> dict[Path, str]:
    """Returns the contents of the files, by their paths in the repository."""
    return {
        Path("serve_app/boards/rules.yaml"): rules_text(GROUPS),
        Path("cluster/kubernetes/components/monitoring/prometheus-rules.yaml"): manifest_text(GROUPS),
    }
