"""Finds the metrics endpoints of the service on this machine, and configures a Prometheus that reads them."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from serve_app.launch.preflight import LaunchError
from serve_app.local_run import find_run

SCRAPE_S = 5
RAY_TARGETS = "prom_metrics_service_discovery.json"  # Ray's dashboard keeps it up to date
HAPROXY_METRICS = re.compile(r"^frontend prometheus\n\s+bind\s+(\S*):(\d+)", re.MULTILINE)
ANY_ADDRESS = {"": "127.0.0.1", "*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Service:
    """The metrics endpoints of a running service: the file of Ray's targets, and HAProxy's address if HAProxy runs."""

    ray_targets: Path
    haproxy: str | None

    def targets(self) -> list[dict[str, str]]:
        with contextlib.suppress(OSError, ValueError):
            listed = [address for group in json.loads(self.ray_targets.read_text()) for address in group["targets"]]
            found = [{"job": "ray", "address": address} for address in listed]
            return found + ([{"job": "haproxy", "address": self.haproxy}] if self.haproxy else [])
        return []


def find_service(home: Path) -> Service | None:
    """Returns the running service of this state folder."""
    run = find_run(home)
    if run is None:
        return None
    haproxy = None
    for config in run.haproxy_files("haproxy.cfg"):
        with contextlib.suppress(OSError):  # the service may be stopping
            if found := HAPROXY_METRICS.search(config.read_text()):
                host = ANY_ADDRESS.get(found[1], found[1])
                haproxy = f"[{host}]:{found[2]}" if ":" in host else f"{host}:{found[2]}"
    return Service(run.session / RAY_TARGETS, haproxy)


def write_config(
    folder: Path, service: Service, rules: str, *, cluster: str = "local", namespace: str = "default"
) -> Path:
    """Writes Prometheus's configuration and target lists into `folder`. Returns the configuration's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (("cluster", cluster), ("namespace", namespace)):
        if not re.fullmatch(r"[\w.-]+", value):
            raise LaunchError(f"--{name} {value!r}: use only letters, digits, dots, hyphens and underscores")
    labels = [
        {"target_label": "cluster", "replacement": cluster},
        {"target_label": "namespace", "replacement": namespace},
    ]
    jobs = [
        {
            "job_name": job,
            "file_sd_configs": [{"files": [f"{job}.json"], "refresh_interval": f"{SCRAPE_S}s"}],
            "relabel_configs": labels,
        }
        for job in ("ray", "haproxy")
    ]
    interval = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    document = {"global": interval, "rule_files": ["rules.yaml"], "scrape_configs": jobs}
    _replace(folder / "rules.yaml", rules)
    _replace(folder / "haproxy.json", json.dumps([{"targets": [service.haproxy] if service.haproxy else []}]))
    link = folder / "ray.json"
    link.unlink(missing_ok=True)
    link.symlink_to(service.ray_targets)
    config = folder / "prometheus.yml"
    _replace(config, yaml.safe_dump(document, sort_keys=False))
    return config


def _replace(path: Path, text: str) -> None:
    """Replaces a file atomically, because Prometheus may read at any moment."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def check_config(config: Path) -> None:
    """Checks the configuration with promtool, if it is installed."""
    if (promtool := shutil.which("promtool")) is None:
        return
    checked = subprocess.run([promtool, "check", "config", str(config)], capture_output=True, text=True, check=False)
    if checked.returncode != 0:
        raise LaunchError(f"Prometheus does not accept {config}:\n{(checked.stdout + checked.stderr).strip()}")
