"""What a push would change in a Grafana: a pure comparison of what is there with what is shipped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from serve_app.cli.grafana.differences import Difference, differences
from serve_app.cli.grafana.rules import grafana_rules, intervals, is_ours
from serve_app.cli.grafana.shipped import UID_PREFIX, Json, Shipped, seconds, with_source
from serve_app.cli.output import CommandError

DEFAULT_SOURCE = "serve-app Prometheus"

Kind = Literal["folder", "data source", "dashboard", "alert rule", "rule group"]
Action = Literal["create", "change", "remove", "unchanged"]


@dataclass(frozen=True)
class Wish:
    """What the operator asks for; `datasource` and `prometheus` are names and addresses that may be left out."""

    folder: str
    datasource: str | None = None
    prometheus: str | None = None
    alerts: bool = True


@dataclass(frozen=True)
class Found:
    """What the Grafana has, in the form of its API.

    `dashboards` has the responses for the uids that are shipped, `own_dashboards` the titles of all that are marked as
    ours, `intervals` the seconds of the rule groups in the folder.
    """

    folder_uid: str | None
    sources: list[Json] = field(default_factory=list)
    dashboards: dict[str, Json] = field(default_factory=dict)
    own_dashboards: dict[str, str] = field(default_factory=dict)
    rules: list[Json] = field(default_factory=list)
    intervals: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """One thing of Grafana. `body` is what is sent, without the folder, whose uid may not exist yet."""

    kind: Kind
    action: Action
    name: str
    uid: str = ""
    body: Json = field(default_factory=dict)
    differences: tuple[Difference, ...] = ()


def plan(found: Found, shipped: Shipped, wish: Wish) -> list[Change]:
    """In the order in which to apply: what is removed first, because its titles may be used again."""
    changes = [Change("folder", "create" if found.folder_uid is None else "unchanged", wish.folder)]
    source = _data_source(found.sources, wish)
    changes.append(source)
    boards = [with_source(board, source.uid, source.name) for board in shipped.boards]
    rules = grafana_rules(shipped.groups, source.uid) if wish.alerts else []
    changes += _removals(found, {board["uid"] for board in boards}, {rule["uid"] for rule in rules}, wish.alerts)
    changes += (_dashboard(board, found, wish.folder) for board in boards)
    if wish.alerts:
        changes += _rules(rules, found, wish.folder)
        changes += _groups(intervals(shipped.groups), found)
    return changes


def source_uid(name: str) -> str:
    """Of a data source that we make: rules name it before it exists."""
    return UID_PREFIX + hashlib.sha256(name.encode()).hexdigest()[:16]


def source_body(name: str, prometheus: str) -> Json:
    return {
        "name": name,
        "uid": source_uid(name),
        "type": "prometheus",
        "access": "proxy",
        "url": prometheus,
        "jsonData": {"httpMethod": "POST"},
    }


def _data_source(sources: Iterable[Json], wish: Wish) -> Change:
    name = wish.datasource or DEFAULT_SOURCE
    # One that was made here and got another name since is still the same.
    there = next((one for one in sources if one["name"] == name or one["uid"] == source_uid(name)), None)
    if there is not None and there["type"] != "prometheus":
        raise _no_source(f"{name!r} is of type {there['type']}", sources)
    if wish.prometheus is None:
        chosen = there or _existing_source(sources, wish.datasource)
        return Change("data source", "unchanged", chosen["name"], chosen["uid"])
    if there is None:
        body = source_body(name, wish.prometheus)
        return Change("data source", "create", name, body["uid"], body)
    before, after = there.get("url", "").rstrip("/"), wish.prometheus.rstrip("/")
    if before == after:
        return Change("data source", "unchanged", there["name"], there["uid"])
    if there.get("readOnly"):
        raise _from_file("data source", name)
    body = {**there, "url": wish.prometheus}
    return Change("data source", "change", there["name"], there["uid"], body, (Difference("url", before, after),))


def _existing_source(sources: Iterable[Json], name: str | None) -> Json:
    """The default Prometheus, or the only one."""
    if name is not None:
        raise _no_source(f"none is named {name!r}", sources)
    ours = [source for source in sources if source["type"] == "prometheus"]
    chosen = [source for source in ours if source.get("isDefault")] or ours[: len(ours) == 1]
    if not chosen:
        raise _no_source("name one with --datasource" if ours else "--prometheus URL makes one", sources)
    return chosen[0]


def _no_source(problem: str, sources: Iterable[Json]) -> CommandError:
    known = ", ".join(source["name"] for source in sources if source["type"] == "prometheus") or "none"
    return CommandError(f"no Prometheus data source: {problem}; Grafana has: {known}", code="no_datasource")


def _from_file(kind: Kind, name: str) -> CommandError:
    message = f"the {kind} {name!r} comes from a file on Grafana's machine: change it there"
    return CommandError(message, code="provisioned")


def _removals(found: Found, boards: set[str], rules: set[str], alerts: bool) -> Iterator[Change]:
    for uid, title in sorted(found.own_dashboards.items()):
        if uid not in boards:
            yield Change("dashboard", "remove", title, uid)
    for rule in found.rules if alerts else ():
        if is_ours(rule) and rule["uid"] not in rules:
            yield Change("alert rule", "remove", rule["title"], rule["uid"])


def _dashboard(board: Json, found: Found, folder: str) -> Change:
    title, uid = board["title"], board["uid"]
    if (there := found.dashboards.get(uid)) is None:
        return Change("dashboard", "create", title, uid, {**board, "id": None})
    before, meta = there["dashboard"], there["meta"]
    if meta.get("provisioned"):
        raise _from_file("dashboard", title)
    # With the version that was compared, Grafana rejects the push if somebody has saved the dashboard since.
    grafanas_own = {"id": before.get("id"), "version": before.get("version")}
    body = {**board, **grafanas_own}
    changed = (*differences(before, body), *_moved(meta.get("folderUid"), found.folder_uid, folder))
    return Change("dashboard", "change" if changed else "unchanged", title, uid, body, changed)


def _rules(wanted: Iterable[Json], found: Found, folder: str) -> Iterator[Change]:
    there = {rule["uid"]: rule for rule in found.rules}
    for rule in wanted:
        before = there.get(rule["uid"])
        if before is None:
            yield Change("alert rule", "create", rule["title"], rule["uid"], rule)
            continue
        compared = {key: before.get(key) for key in (*rule, "annotations")}
        if seconds(before["for"]) == seconds(rule["for"]):  # Grafana writes 60m as 1h
            compared["for"] = rule["for"]
        changed = (*differences(compared, rule), *_moved(before["folderUID"], found.folder_uid, folder))
        # What is not ours stays: whether the rule is paused, and whom it notifies.
        body = {key: value for key, value in before.items() if key != "annotations"} | rule
        yield Change("alert rule", "change" if changed else "unchanged", rule["title"], rule["uid"], body, changed)


def _moved(before: str | None, after: str | None, folder: str) -> Iterator[Difference]:
    if before != after:
        yield Difference("folder", before, folder)


def _groups(wanted: dict[str, int], found: Found) -> Iterator[Change]:
    for name, interval in wanted.items():
        body = {"title": name, "interval": interval}
        before = found.intervals.get(name)
        if before is None:
            yield Change("rule group", "create", name, body=body)
        else:
            changed = tuple(differences({"interval": before}, {"interval": interval}))
            yield Change("rule group", "change" if changed else "unchanged", name, body=body, differences=changed)
