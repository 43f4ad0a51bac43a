"""The Serve applications as Ray's head reports them."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from tests.service.chaos.stand import StandError
from tests.service.drill.nodes import ADDRESSES, HEAD

CONFIG: Final = Path(__file__).with_name("serve.yaml")
#: What a node may have, with the deployment that tells, and how many replicas of it run.
KINDS: Final = {
    "gateway": (("gateway", "Gateway"), 3),
    "limiter": (("gateway", "Limiter"), 1),
    "accounting": (("gateway", "Accounting"), 1),
    "second accounting": (("gateway", "Accounting-1"), 1),
    "model": (("smollm2", "Model"), 2),
}


@dataclass(frozen=True, slots=True)
class Replica:
    """One that Serve lists."""

    deployment: tuple[str, str]
    id: str
    address: str  # of its node
    state: str
    pid: int = 0  # on its node; 0 while it starts


class ServeView:
    """Serve's own interface on the head."""

    def __init__(self, token: str) -> None:
        address, authorization = ADDRESSES[HEAD][0], {"authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=f"http://{address}:8265", headers=authorization, timeout=10, trust_env=False)
        self.gateways = KINDS["gateway"][1]  # processes that are to run; `deploy` applies a change

    def close(self) -> None:
        self._http.close()

    def deploy(self, patience_s: float) -> None:
        """Raises StandError."""
        config, problem = yaml.safe_load(CONFIG.read_text()), ""
        config["applications"][0]["deployments"][0]["num_replicas"] = self.gateways
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            try:
                answer = self._http.put("/api/serve/applications/", json=config, timeout=60)
                if answer.is_success:
                    return
                problem = f"{answer.status_code}: {answer.text[-300:]}"
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            time.sleep(1)
        raise StandError(f"Ray's head takes no deployment: {problem}")

    def applications(self) -> dict[str, Any]:
        """By name; empty while the head is away."""
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer = self._http.get("/api/serve/applications/")
            if answer.is_success:
                return dict(answer.json()["applications"])
        return {}

    def replicas(self) -> list[Replica]:
        """All that Serve lists."""
        return _replicas(self.applications())

    def problem(self, gone: frozenset[str]) -> str:
        """Returns what is missing until all runs, or an empty string. `gone` are replicas that were lost."""
        applications = self.applications()
        if not applications:
            return "the head does not answer"
        for name, application in applications.items():
            if application["status"] != "RUNNING":
                return f"{name} is {application['status']}: {application['message'][-200:]}"
        replicas = _replicas(applications)
        for kind, (deployment, usual) in KINDS.items():
            wanted = self.gateways if kind == "gateway" else usual
            of_kind = [one for one in replicas if one.deployment == deployment]
            if len(of_kind) != wanted or any(one.state != "RUNNING" or one.id in gone for one in of_kind):
                return f"{kind}: " + ", ".join(f"{one.id} {one.state}" for one in of_kind)
        return ""


def _replicas(applications: dict[str, Any]) -> list[Replica]:
    return [
        Replica(
            (application, deployment), one["replica_id"], one.get("node_ip") or "", one["state"], one.get("pid") or 0
        )
        for application, view in applications.items()
        for deployment, about in view["deployments"].items()
        for one in about["replicas"]
    ]
