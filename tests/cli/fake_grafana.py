"""A fake stand-in for the part of Grafana's HTTP API that pushing uses. No Grafana runs in the tests.

It keeps what is written, gives back what Grafana adds, and rejects what Grafana's documentation of the API and the
sources of its handlers say that it rejects: a wrong credential, a role that is too low, an unknown folder, two folders
with one title, a data source or dashboard that comes from a file.
"""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

from .local_http import Answer, LocalServer, Request

TOKEN = "grafana-token-of-the-tests"
LOGIN = ("operator", "p@ss:word")
NEEDS_ADMIN = ("/api/datasources",)


class FakeGrafana(LocalServer):
    """`role` is that of the token; `writes` has all requests that could change something."""

    def __init__(self, prefix: str = "", role: str = "Admin") -> None:
        super().__init__()
        self.prefix = prefix
        self.role = role
        self.folders: list[dict[str, Any]] = []
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.datasources: list[dict[str, Any]] = [
            {"id": 1, "uid": "prom-1", "name": "Prometheus", "type": "prometheus", "url": "http://prometheus:9090"},
            {"id": 2, "uid": "loki-1", "name": "Logs", "type": "loki", "url": "http://loki:3100"},
        ]

    @property
    def writes(self) -> list[Request]:
        return [request for request in self.requests if request.method != "GET"]

    def handle(self, request: Request) -> Answer:
        login = "Basic " + base64.b64encode(":".join(LOGIN).encode()).decode()
        if request.headers.get("authorization") not in (f"Bearer {TOKEN}", login):
            return Answer(401, {"message": "Invalid API key"})
        path = request.path.removeprefix(self.prefix)
        least = "Viewer" if request.method == "GET" else "Admin" if path.startswith(NEEDS_ADMIN) else "Editor"
        if ("Viewer", "Editor", "Admin").index(self.role) < ("Viewer", "Editor", "Admin").index(least):
            return Answer(403, {"message": "You'll need additional permissions to perform this action"})
        match request.method, path.removeprefix("/api/").split("/"):
            case "GET", ["folders"]:
                return Answer(200, self.folders)
            case "POST", ["folders"]:
                return self.make_folder(request.body)
            case "GET", ["datasources"]:
                return Answer(200, self.datasources)
            case "POST", ["datasources"]:
                return self.make_source(request.body)
            case "PUT", ["datasources", "uid", uid]:
                return self.change_source(uid, request.body)
            case "GET", ["search"]:
                return Answer(200, self.search(request.query))
            case "POST", ["dashboards", "db"]:
                return self.save(request.body)
            case "GET", ["dashboards", "uid", uid] if uid in self.dashboards:
                return Answer(200, self.dashboards[uid])
            case "DELETE", ["dashboards", "uid", uid] if uid in self.dashboards:
                return Answer(200, {"title": self.dashboards.pop(uid)["dashboard"]["title"]})
        return Answer(404, {"message": "Not found"})

    def make_folder(self, body: dict[str, Any]) -> Answer:
        if body["title"] in {folder["title"] for folder in self.folders}:
            return Answer(409, {"message": "a folder with the same name already exists in the current location"})
        folder = {"id": len(self.folders) + 1, "uid": f"folder-{len(self.folders) + 1}", "title": body["title"]}
        self.folders.append(folder)
        return Answer(200, folder)

    def make_source(self, body: dict[str, Any]) -> Answer:
        if {body["name"], body["uid"]} & {source[key] for source in self.datasources for key in ("name", "uid")}:
            return Answer(409, {"message": "data source with the same name already exists"})
        self.datasources.append({"id": len(self.datasources) + 1, "readOnly": False, **body})
        return Answer(200, {"message": "Datasource added", "name": body["name"]})

    def change_source(self, uid: str, body: dict[str, Any]) -> Answer:
        source = next((source for source in self.datasources if source["uid"] == uid), None)
        if source is None:
            return Answer(404, {"message": "Data source not found"})
        if source.get("readOnly"):
            return Answer(403, {"message": "Cannot update read-only data source"})
        if not {"name", "type", "access"} <= body.keys():
            return Answer(400, {"message": "bad request data"})
        source.update(body)
        return Answer(200, {"message": "Datasource updated"})

    def search(self, query: dict[str, str]) -> list[dict[str, Any]]:
        boards = (one["dashboard"] for one in self.dashboards.values())
        return [
            {"uid": board["uid"], "title": board["title"], "type": "dash-db"}
            for board in boards
            if query["tag"] in board.get("tags", [])
        ]

    def save(self, payload: dict[str, Any]) -> Answer:
        board = json.loads(json.dumps(payload["dashboard"]))
        there = self.dashboards.get(board["uid"])
        if payload["folderUid"] not in {folder["uid"] for folder in self.folders}:
            return Answer(400, {"message": "folder not found"})
        if not board.get("title") or len(board["uid"]) > 40:
            return Answer(400, {"message": "Dashboard title cannot be empty, or its uid is too long"})
        if there and there["meta"].get("provisioned"):
            return Answer(400, {"message": "Cannot save provisioned dashboard"})
        version = there["dashboard"]["version"] if there else 0
        assert payload["overwrite"] is True
        self.put(board, payload["folderUid"], version + 1)
        url = f"{self.prefix}/d/{board['uid']}/slug"
        return Answer(200, {"uid": board["uid"], "url": url, "status": "success", "version": version + 1})

    def put(self, board: dict[str, Any], folder_uid: str, version: int = 1) -> None:
        """As if somebody had saved it in Grafana's pages."""
        known = self.dashboards.get(board["uid"])
        number = known["dashboard"]["id"] if known else 100 + len(self.dashboards)
        self.dashboards[board["uid"]] = {
            "dashboard": {**copy.deepcopy(board), "id": number, "version": version},
            "meta": {"folderUid": folder_uid, "slug": "slug", "provisioned": False},
        }
