"""A fake stand-in for the part of Grafana's HTTP API that pushing dashboards uses. No Grafana runs in the tests."""

from __future__ import annotations

import base64
from typing import Any

from .local_http import Answer, LocalServer, Request

TOKEN = "grafana-token-of-the-tests"
LOGIN = ("operator", "p@ss:word")


class FakeGrafana(LocalServer):
    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        self.folders: list[dict[str, Any]] = []
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.datasources = [
            {"uid": "prom-1", "name": "Prometheus", "type": "prometheus"},
            {"uid": "loki-1", "name": "Logs", "type": "loki"},
        ]

    def handle(self, request: Request) -> Answer:
        login = "Basic " + base64.b64encode(":".join(LOGIN).encode()).decode()
        if request.headers.get("authorization") not in (f"Bearer {TOKEN}", login):
            return Answer(401, {"message": "Invalid API key"})
        match request.method, request.path.removeprefix(self.prefix):
            case "GET", "/api/folders":
                return Answer(200, self.folders)
            case "POST", "/api/folders":
                folder = {"uid": f"folder-{len(self.folders) + 1}", "title": request.body["title"]}
                self.folders.append(folder)
                return Answer(200, folder)
            case "GET", "/api/datasources":
                return Answer(200, self.datasources)
            case "POST", "/api/dashboards/db":
                return self.save(request.body)
        return Answer(404, {"message": "Not found"})

    def save(self, payload: dict[str, Any]) -> Answer:
        board = payload["dashboard"]
        if board["uid"] in self.dashboards and not payload.get("overwrite"):
            return Answer(412, {"message": "A dashboard with the same uid already exists"})
        if payload["folderUid"] not in {folder["uid"] for folder in self.folders}:
            return Answer(400, {"message": "folder not found"})
        self.dashboards[board["uid"]] = payload
        return Answer(200, {"uid": board["uid"], "url": f"{self.prefix}/d/{board['uid']}/slug", "status": "success"})
