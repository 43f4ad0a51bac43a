"""The alert rules of the fake Grafana: `/api/v1/provisioning`, with the checks of Grafana's handlers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from .local_http import Answer, Request

REQUIRED = ("title", "folderUID", "ruleGroup", "condition", "data", "noDataState", "execErrState", "for")
DEFAULT_INTERVAL_S = 60
UNITS = {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}


class FakeAlerts:
    """Rules by their uid, as the API returns them, and the intervals of their groups."""

    def __init__(self, folders: Callable[[], set[str]]) -> None:
        self.rules: dict[str, dict[str, Any]] = {}
        self.intervals: dict[tuple[str, str], int] = {}
        self._folders = folders

    def handle(self, request: Request, path: str) -> Answer:
        provenance = "" if request.headers.get("x-disable-provenance") == "true" else "api"
        match request.method, path.split("/"):
            case "GET", ["alert-rules"]:
                return Answer(200, list(self.rules.values()))
            case "POST", ["alert-rules"]:
                if request.body.get("uid") in self.rules:
                    return Answer(409, {"message": "a conflicting alert rule is found: rule UID is already used"})
                return self.save(request.body, provenance, 201)
            case "PUT", ["alert-rules", uid] if uid in self.rules:
                if self.rules[uid].get("provenance", "") not in ("", provenance):
                    return Answer(409, {"message": "cannot change provenance from 'api' to ''"})
                return self.save({**request.body, "uid": uid}, provenance, 200)
            case "DELETE", ["alert-rules", uid]:
                self.rules.pop(uid, None)
                return Answer(204)
            case _, ["folder", folder, "rule-groups", quoted]:
                return self.group(request, folder, unquote(quoted))
        return Answer(404, {"message": "Not found"})

    def save(self, body: dict[str, Any], provenance: str, status: int) -> Answer:
        if problem := self._problem(body):
            return Answer(400, {"message": f"invalid alert rule: {problem}"})
        if any(
            rule["title"] == body["title"] and rule["folderUID"] == body["folderUID"]
            for uid, rule in self.rules.items()
            if uid != body["uid"]
        ):
            message = (
                "a conflicting alert rule is found: rule title under the same organisation and folder should be unique"
            )
            return Answer(409, {"message": message})
        rule = copy.deepcopy(body)
        added = {"id": len(self.rules) + 1, "orgID": 1, "updated": "2026-01-01T00:00:00Z"}
        rule |= {**added, "for": canonical(body["for"]), "isPaused": body.get("isPaused", False)}
        for step in rule["data"]:
            step["model"] = {"intervalMs": 1000, "maxDataPoints": 43200, **step["model"]}
        rule = {key: value for key, value in rule.items() if key not in ("annotations", "provenance") or value}
        self.rules[body["uid"]] = {**rule, "provenance": provenance} if provenance else rule
        self.intervals.setdefault((rule["folderUID"], rule["ruleGroup"]), DEFAULT_INTERVAL_S)
        return Answer(status, self.rules[body["uid"]])

    def group(self, request: Request, folder: str, name: str) -> Answer:
        rules = [rule for rule in self.rules.values() if (rule["folderUID"], rule["ruleGroup"]) == (folder, name)]
        if not rules:
            return Answer(404, {"message": "alert rule group not found"})
        if request.method == "PUT":
            if request.body["interval"] <= 0 or request.body["interval"] % 10:
                return Answer(400, {"message": "interval should be non-zero and divided exactly by 10s"})
            if "rules" in request.body:
                raise AssertionError("would replace all rules of the group, those of people too")
            self.intervals[folder, name] = request.body["interval"]
        interval = self.intervals[folder, name]
        return Answer(200, {"title": name, "folderUid": folder, "interval": interval, "rules": rules})

    def _problem(self, body: dict[str, Any]) -> str | None:
        if missing := [key for key in REQUIRED if not body.get(key)]:
            return f"no {missing}"
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", body["uid"]):
            return "uid"
        if body["folderUID"] not in self._folders():
            return "folder does not exist"
        if body["condition"] not in [step["refId"] for step in body["data"]]:
            return "condition does not exist among the queries"
        for step in body["data"]:
            span = step["relativeTimeRange"]
            if step["datasourceUid"] != "__expr__" and span["from"] <= span["to"]:
                return "invalid relative time range"
            if not isinstance(step["model"], dict):
                return "model"
        if body["noDataState"] not in ("OK", "NoData", "Alerting", "KeepLast"):
            return "noDataState"
        if body["execErrState"] not in ("OK", "Error", "Alerting", "KeepLast"):
            return "execErrState"
        texts = [*body.get("labels", {}).values(), *body.get("annotations", {}).values()]
        return None if all(isinstance(text, str) for text in texts) else "labels and annotations are texts"


def canonical(duration: str) -> str:
    """As Prometheus's library for durations writes it: 60m is 1h."""
    parts = re.findall(r"(\d+)([wdhms])", duration)
    left = sum(int(number) * UNITS[unit] for number, unit in parts)
    text = ""
    for unit in ("d", "h", "m", "s"):
        if count := left // UNITS[unit]:
            text += f"{count}{unit}"
            left -= count * UNITS[unit]
    return text or "0s"
