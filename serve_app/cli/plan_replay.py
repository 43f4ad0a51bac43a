"""What `serve-app plan` does: reads its options and the usage, replays it, and prints a line for each policy."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from serve_app.cli.command import Session
from serve_app.cli.output import CommandError, UsageError
from serve_app.cli.values import parse_day
from serve_app.contracts.errors import InvalidAmount
from serve_app.contracts.limits import Contract
from serve_app.contracts.money import NANO_PER_UNIT, Price, price_per_million
from serve_app.scaling.replay import BadUsage, arrivals
from serve_app.scaling.scaling_settings import ScalingSettings
from serve_app.scaling.simulation.cluster import Arrival, Cluster, Fleet, Policy
from serve_app.scaling.simulation.outcome import Outcome, percentile
from serve_app.scaling.simulation.policies import Fixed, Rule
from serve_app.scaling.simulation.replica import Device

PAGE_SIZE = 1000
DEVICE = {"slots": "slots", "waiting": "max_waiting", "kv": "kv_tokens", "prefill": "prefill_per_s"}


def replay(
    session: Session,
    *,
    source: str,
    since: str | None,
    until: str | None,
    backend: str | None,
    replicas: str,
    policy: list[str] | None,
    setting: list[str] | None,
    limit: list[str] | None,
    price: str | None,
    replica_price: float,
    device: str,
    start: float,
) -> None:
    """As the options of `plan` say. Raises UsageError, CommandError."""
    least, most = _bounds(replicas)
    fleet = Fleet(_device(device), least=least, most=most, start_s=start, price_per_hour=replica_price)
    policies = [_policy(name, setting or []) for name in policy or ["rule"]]
    contract = _contract(limit or [])
    rows = _rows(session, source, since, until)
    if backend is not None:
        rows = (row for row in rows if row.get("backend") == backend)
    try:
        requests, began_at = arrivals(rows, None if price is None else _price(price))
    except BadUsage as error:
        raise CommandError(f"{source}: {error}", code="bad_usage") from None
    if not requests:
        raise CommandError("there is no usage to replay: choose other days, or another backend", code="no_usage")
    names = policy or ["rule"]
    found = [_replay(one, replace(fleet, began_at=began_at), requests, contract) for one in policies]
    session.out.table(
        {"requests": len(requests), "policies": [_document(*one) for one in zip(names, found, strict=True)]},
        ("policy", "queue p50", "p95", "first token p95", "refused", "given up", "replicas", "most", "revenue", "cost"),
        [_line(*one) for one in zip(names, found, strict=True)],
        empty="",
        footer=f"{len(requests):,} requests in {found[0].seconds / 3600:,.1f} hours. "
        "What was refused at the time is not in the records.",
    )


def _replay(policy: Policy | Fixed, fleet: Fleet, requests: list[Arrival], contract: Contract | None) -> Outcome:
    replicas = None
    if isinstance(policy, Fixed):
        fleet = replace(fleet, least=policy.replicas, most=policy.replicas)
        replicas = policy.replicas
    accounts = {one.account_id for one in requests}
    cluster = Cluster(fleet, policy, sorted(accounts), contract=contract, replicas=replicas)
    return cluster.run(requests, requests[-1].at + 600.0)


def _document(name: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "policy": name,
        "queue_p50_s": round(percentile(outcome.queued_s, 0.5), 3),
        "queue_p95_s": round(outcome.queued_p95_s, 3),
        "first_token_p95_s": round(outcome.first_p95_s, 3),
        "refused": outcome.refused + outcome.late,
        "given_up": outcome.given_up + outcome.late,
        "mean_replicas": round(sum(outcome.paid) / max(1, len(outcome.paid)), 3),
        "most_replicas": max(outcome.paid, default=0),
        "revenue": f"{outcome.revenue / NANO_PER_UNIT:.2f}",
        "cost": f"{outcome.cost:.2f}",
    }


def _line(name: str, outcome: Outcome) -> list[object]:
    shown = _document(name, outcome)
    for field in ("queue_p50_s", "queue_p95_s", "first_token_p95_s"):
        shown[field] = f"{shown[field]:.1f} s"
    return list(shown.values())


def _rows(session: Session, source: str, since: str | None, until: str | None) -> Iterable[Mapping[str, Any]]:
    first, last = parse_day("--since", since), parse_day("--until", until)
    if source == "usage":
        query = {"from": first, "to": last}
        return chain.from_iterable(session.client.pages("usage", "requests", page_size=PAGE_SIZE, query=query))
    try:
        text = Path(source).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{source} can't be read: {error}", code="no_file") from None
    rows = json.loads(text) if text.lstrip().startswith("[") else list(csv.DictReader(text.splitlines()))
    days = ((row, str(row.get("started_at", ""))[:10]) for row in rows)
    return [row for row, day in days if (first is None or day >= first) and (last is None or day <= last)]


def _bounds(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not (least.isdigit() and most.isdigit()) or int(most) < max(1, int(least)):
        raise UsageError(f"--replicas {text}: write it like 1:4")
    return int(least), int(most)


def _policy(name: str, settings: list[str]) -> Policy | Fixed:
    kind, _, number = name.partition(":")
    if kind == "fixed" and number.isdigit() and int(number) > 0:
        return Fixed(int(number))
    if name != "rule":
        raise UsageError(f"--policy {name}: must be rule or fixed:N")
    try:
        return Rule(ScalingSettings.model_validate(_pairs("--setting", settings)))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise UsageError(f"--setting {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None


def _contract(limits: list[str]) -> Contract | None:
    if not limits:
        return None
    try:
        return TypeAdapter(Contract).validate_python(_pairs("--limit", limits))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise UsageError(f"--limit {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None


def _price(text: str) -> Price:
    try:
        return Price(*map(price_per_million, text.split("/")))
    except (InvalidAmount, TypeError):
        raise UsageError(f"--price {text}: write it like 0.27/0.07/1.10") from None


def _device(text: str) -> Device:
    changes: dict[str, float] = {}
    for name, value in _pairs("--device", [pair for pair in text.split(",") if pair]).items():
        try:
            if name in ("step_ms", "row_ms"):
                changes[f"{name.removesuffix('_ms')}_s"] = float(value) / 1000.0
            elif DEVICE[name] in ("slots", "max_waiting", "kv_tokens"):
                changes[DEVICE[name]] = int(value)
            else:
                changes[DEVICE[name]] = float(value)
        except (KeyError, ValueError):
            raise UsageError(
                f"--device {name}={value}: must be a number of {', '.join(DEVICE)}, step_ms, row_ms"
            ) from None
    if any(value <= 0 for value in changes.values()):
        raise UsageError(f"--device {text}: all figures are above 0")
    assert changes.keys() <= {field.name for field in fields(Device)}
    return replace(Device(), **changes)  # type: ignore[arg-type]


def _pairs(option: str, pairs: list[str]) -> dict[str, str]:
    split = [pair.partition("=") for pair in pairs]
    for name, sign, _ in split:
        if not sign:
            raise UsageError(f"{option} {name}: write it like NAME=VALUE")
    return {name.strip(): value.strip() for name, _, value in split}
