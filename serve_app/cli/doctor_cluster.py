"""`serve-app doctor --cluster`: runs deployments/cluster_facts.py, which talks to Ray, and prints the checks."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import typer

from serve_app.cli.cluster_checks import Check, Facts, Known, flags_of, judge
from serve_app.cli.output import CommandError, Output

GATHER_S = 180
NO_CLUSTER = 3  # exit status of deployments/cluster_facts.py


def diagnose(out: Output, address: str | None, flags: Path, firewall: bool, grace_period: float | None) -> None:
    """Prints all checks. Raises CommandError if no cluster is found, and typer.Exit(1) if a check fails."""
    expected = dict(flags_of(flags.read_text())) if flags.is_file() else {}
    checks = judge(_gather(address), Known(expected, firewall, grace_period))
    ok = all(check.status != "fail" for check in checks)
    document = {"ok": ok, "checks": [asdict(check) for check in checks]}
    if not out.document(document, [check.name for check in checks]):
        _print(out, checks)
    if not ok:
        raise typer.Exit(1)


def _gather(address: str | None) -> Facts:
    command = [sys.executable, "-m", "deployments.cluster_facts", *(["--address", address] if address else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GATHER_S)
    except subprocess.TimeoutExpired:
        raise CommandError(f"the cluster did not answer within {GATHER_S} s", code="no_cluster") from None
    reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    if done.returncode == NO_CLUSTER:
        raise CommandError(
            f"no Ray cluster can be reached: {reason}; run this on a node of the cluster, with the environment of its "
            "`ray start` (RAY_AUTH_MODE, RAY_USE_TLS), or name the head with --address HOST:6379",
            code="no_cluster",
        )
    if done.returncode != 0:
        raise CommandError(f"the facts of the cluster can't be gathered: {reason}", code="no_facts")
    facts: Facts = json.loads(done.stdout.splitlines()[-1])
    return facts


def _print(out: Output, checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        out.line(f"{check.status.upper().ljust(4)}  {check.name.ljust(width)}  {check.detail}")
        if check.hint:
            out.line(f"      {' ' * width}  → {check.hint}")
