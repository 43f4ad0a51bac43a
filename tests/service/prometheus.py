"""A real Prometheus over real services, each of them a cluster of its own."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path

import httpx
import yaml

from dashboards.query import Prometheus
from serve_app.launch.preflight import free_port
from serve_app.launch.prometheus_config import find_service, write_config
from tests.service.harness import Service, until

SHIPPED = (files("serve_app.boards") / "rules.yaml").read_text(encoding="utf-8")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def every_second(rules: str) -> str:
    """The rules with their own windows, evaluated every second: a test can't wait for half minutes."""
    return re.sub(r"interval: \d+[smh]", "interval: 1s", rules)


# A window that has no new value in it ends an alert. Ray's processes report every other second, when they get to it.
SHORTEST_WINDOW_MS = 15_000


def shortened(rules: str, factor: int) -> str:
    """The rules with all durations divided by `factor`: windows (at least 15 s), offsets and `for`.

    Nothing else differs. Numbers in conditions stay, also those that count seconds.
    """

    def divided(found: re.Match[str]) -> str:
        milliseconds = 1000 * int(found["number"]) * _SECONDS[found["unit"]] // factor
        if found["before"] == "[":
            milliseconds = max(milliseconds, SHORTEST_WINDOW_MS)
        return f"{found['before']}{milliseconds}ms"

    return re.sub(r"(?P<before>\[|offset |for: )(?P<number>\d+)(?P<unit>[smhd])\b", divided, every_second(rules))


@contextlib.contextmanager
def scraping(folder: Path, services: Mapping[str, Service], rules: str) -> Iterator[Prometheus]:
    """It scrapes every second. `services` are by what the label `cluster` is to be."""
    jobs = []
    for cluster, service in services.items():
        found = find_service(service.home)
        assert found is not None
        document = yaml.safe_load(write_config(folder / cluster, found, rules, cluster=cluster).read_text())
        for job in document["scrape_configs"]:
            targets = {"files": [str(folder / cluster / f"{job['job_name']}.json")], "refresh_interval": "1s"}
            job["file_sd_configs"] = [targets]
            if job["job_name"] == "ray" and service.dashboard_url is None:  # which lists Ray's targets
                del job["file_sd_configs"]
                job["static_configs"] = [{"targets": [httpx.URL(service.metrics_url).netloc.decode()]}]
            job["job_name"] += f"-{cluster}"
            jobs.append(job)
    (folder / "rules.yaml").write_text(rules)
    interval = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump({"global": interval, "rule_files": ["rules.yaml"], "scrape_configs": jobs}))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            prometheus = Prometheus(f"http://{address}")
            until(lambda: _up(prometheus) == {job["job_name"] for job in jobs})
            yield prometheus
        finally:
            process.terminate()
            process.wait(120)


def _up(prometheus: Prometheus) -> set[str]:
    with contextlib.suppress(httpx.HTTPError, ValueError):
        targets = prometheus.get("targets")["activeTargets"]
        return {target["scrapePool"] for target in targets if target["health"] == "up"}
    return set()
