"""Formats the rules as a file for Prometheus, and as a manifest for the Prometheus operator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import yaml

from dashboards.rules.rule import Group

MADE: Final = "# Made by `python -m dashboards` from dashboards/rules: change the rules there.\n"
FOR_OPERATOR: Final = f"""\
# The alert rules for the Prometheus operator. `release` is the label by which kube-prometheus-stack finds them: the
# name of its Helm release.
{MADE}"""
METADATA: Final = {
    "name": "serve-app",
    "namespace": "serve-app",
    "labels": {"app.kubernetes.io/name": "serve-app", "release": "prometheus"},
}


class _Dumper(yaml.SafeDumper):
    """Writes multi-line expressions as blocks."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(str, _Dumper.represent_text)


def rules_text(groups: Iterable[Group]) -> str:
    return MADE + _text(_spec(groups))


def manifest_text(groups: Iterable[Group]) -> str:
    return FOR_OPERATOR + _text(
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": METADATA,
            "spec": _spec(groups),
        }
    )


def _spec(groups: Iterable[Group]) -> dict[str, Any]:
    return {"groups": [group.document() for group in groups]}


def _text(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
