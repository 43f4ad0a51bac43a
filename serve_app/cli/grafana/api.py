"""Grafana's HTTP API: reads what a push compares with, applies one change, and turns every failure into one line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from urllib.parse import quote

import serve_app
from serve_app.cli.grafana.address import Address
from serve_app.cli.grafana.plan import Change, Found
from serve_app.cli.grafana.shipped import TAG, UID_PREFIX, Json
from serve_app.cli.output import CommandError

TIMEOUT_S = 10.0
MAX_DASHBOARDS = 5000  # Grafana's own limit of one search


class Grafana:
    """A Grafana. Rules are written without provenance: with it, people could not pause them in Grafana's pages."""

    def __init__(self, address: Address, credential: str | tuple[str, str]) -> None:
        from grafana_client import GrafanaApi

        self._url = address.url
        # grafana-client puts the path in front of `api`, so it must end with a slash.
        self._api = GrafanaApi.from_url(f"{address.url}/", credential=credential, timeout=TIMEOUT_S)

    def look(self, folder: str, boards: Iterable[str], groups: Iterable[str] | None) -> Found:
        """What is there of a folder with a title, dashboards by uid, and rule groups by name (None: no rules)."""
        folders = self._rows(self._api.folder.get_all_folders, "title", "uid")
        uid = next((str(one["uid"]) for one in folders if one["title"] == folder), None)
        search = partial(self._api.search.search_dashboards, tag=TAG, type_="dash-db", limit=MAX_DASHBOARDS)
        ours = self._rows(search, "uid", "title")
        dashboards = {
            board: self._one(partial(self._api.dashboard.get_dashboard, board), "dashboard", "meta") for board in boards
        }
        provisioning = self._api.alertingprovisioning
        rules, intervals = [], {}
        if groups is not None:
            rules = self._rows(provisioning.get_alertrules_all, "uid", "title", "folderUID", "ruleGroup", "for")
            there = {rule["ruleGroup"] for rule in rules if rule["folderUID"] == uid}
            for name in there.intersection(groups):
                group = self._one(partial(provisioning.get_rule_group, uid, quote(name, safe="")), "interval")
                if group is not None:
                    intervals[name] = int(group["interval"])
        return Found(
            folder_uid=uid,
            sources=self._rows(self._api.datasource.list_datasources, "name", "uid", "type"),
            dashboards={board: one for board, one in dashboards.items() if one is not None},
            own_dashboards={one["uid"]: one["title"] for one in ours if one["uid"].startswith(UID_PREFIX)},
            rules=rules,
            intervals=intervals,
        )

    def apply(self, change: Change, folder_uid: str | None) -> str | None:
        """Make one change. Returns the uid of the folder, which is new after the folder's own change."""
        with self._errors():
            if change.kind == "folder":
                return str(self._api.folder.create_folder(change.name)["uid"])
            self._write(change, folder_uid)
        return folder_uid

    def _write(self, change: Change, folder_uid: str | None) -> None:
        api, rules = self._api, self._api.alertingprovisioning
        match change.kind, change.action:
            case "data source", "create":
                api.datasource.create_datasource(change.body)
            case "data source", _:
                api.datasource.update_datasource_by_uid(change.uid, change.body)
            case "dashboard", "remove":
                api.dashboard.delete_dashboard(change.uid)
            case "dashboard", _:
                # Never `overwrite`: older versions of Grafana would replace another dashboard of the same title.
                message = f"serve-app {serve_app.__version__}"
                board = {"dashboard": change.body, "folderUid": folder_uid, "overwrite": False, "message": message}
                api.dashboard.update_dashboard(board)
            case "alert rule", "remove":
                rules.delete_alertrule(change.uid)
            case "alert rule", "create":
                rules.create_alertrule({**change.body, "folderUID": folder_uid}, disable_provenance=True)
            case "alert rule", _:
                rules.update_alertrule(change.uid, {**change.body, "folderUID": folder_uid}, disable_provenance=True)
            case _:
                # Without `rules` in it, Grafana changes the interval alone and keeps all rules of the group.
                group = {**change.body, "folderUid": folder_uid}
                rules.update_rule_group(folder_uid, quote(change.name, safe=""), group, disable_provenance=True)

    def _rows(self, ask: Callable[[], Any], *keys: str) -> list[Json]:
        with self._errors():
            rows = ask()
            if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= set(keys) for row in rows):
                raise ValueError("another program")
            return rows

    def _one(self, ask: Callable[[], Any], *keys: str) -> Json | None:
        """None: it does not exist."""
        from grafana_client.client import GrafanaClientError

        with self._errors():
            try:
                one: Json = ask()
            except GrafanaClientError as error:
                if error.status_code == 404:
                    return None
                raise
            if not isinstance(one, dict) or not one.keys() >= set(keys):
                raise ValueError("another program")
            return one

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns what grafana-client and its HTTP library raise into one line without the credential."""
        from grafana_client.client import GrafanaException, GrafanaTimeoutError

        try:
            yield
        except GrafanaTimeoutError:
            message = f"Grafana at {self._url} did not answer within {TIMEOUT_S:.0f} s"
            raise CommandError(message, code="unreachable") from None
        except GrafanaException as error:
            message = f"Grafana at {self._url}: {_reason(error)}"
            raise CommandError(message, code="grafana", status=error.status_code or None) from None
        except (ValueError, KeyError, TypeError):
            message = f"{self._url} does not answer like Grafana: check the address and its path"
            raise CommandError(message, code="grafana") from None
        except OSError:  # of which the HTTP library's errors of connection are subclasses
            raise CommandError(f"no Grafana at {self._url}: check the address", code="unreachable") from None


def _reason(error: Any) -> str:
    if error.status_code == 401:
        return "the token or password is not accepted"
    if error.status_code == 403:
        return "the token may not do this: its service account needs the role Editor, and Admin for --prometheus"
    response = error.response
    said = response.get("message") if isinstance(response, dict) else None
    return str(said or error.message).splitlines()[0]
