"""The service with two replicas of the bundled model and one of the routers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

from bench.harness.command import say
from bench.harness.servers import Launched, deployment, shipped_config
from bench.routing.figures import Sent
from serve_app.model.bundled import ensure_bundled_model
from serve_app.storage.request_log import FOLDER, PATTERN

#: Descriptions by name.
ROUTERS: Final = {
    "balanced": "Serve's default: the less busy of two replicas",
    "conversation": "ours: hash of account and first messages, with a bound on the load",
    "hash": "Serve's ConsistentHashRouter on the same key",
    "prefix": "Serve's PrefixCacheAffinityRouter",
    "capacity": "Serve's CapacityQueueRouter",
}
REPLICAS: Final = 2
RUNNING: Final = 8  # sequences that a replica decodes at once


class Routed(Launched):
    """config.yaml with two replicas of one thread each, and without limits that the load would reach."""

    title = "serve-app"

    def __init__(self, folder: Path, router: str, kv_cache: str) -> None:
        self.name = f"routing-{router}"
        super().__init__(folder)
        self.router, self.kv_cache = router, kv_cache

    def config(self) -> dict[str, Any]:
        config = shipped_config()
        [application] = [one for one in config["applications"] if one["name"] == "smollm2"]
        application["import_path"] = "bench.routing.backends:model"
        application["args"] |= {
            "router": self.router,
            "num_threads": 1,
            "max_running": RUNNING,
            "max_waiting": 128,
            "max_context": 8192,
            "kv_cache_memory": self.kv_cache,
        }
        model = deployment(config, "Model")
        del model["autoscaling_config"]
        model |= {"num_replicas": REPLICAS, "max_ongoing_requests": 160}
        deployment(config, "Limiter")["user_config"]["pressure"] = {"target_s": 60, "prefill_target_s": 300}
        return config

    def command(self) -> list[str]:
        folder = ensure_bundled_model(self.folder / "home", say).parent  # converted once for all runs
        shutil.rmtree(self.home, ignore_errors=True)  # a new ledger for every run
        self.home.mkdir(parents=True)
        (self.home / "models").symlink_to(folder.absolute())
        return super().command()

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "TOKENIZERS_PARALLELISM": "false"}

    @property
    def facts(self) -> dict[str, Any]:
        return {"router": self.router, "kv_cache": self.kv_cache}

    def account(self, name: str) -> tuple[str, str]:
        """Creates an account with high limits. Returns its id and key."""
        return self.new_account(name, "1000", rpm=10**6, tpm=10**9, concurrency=512)

    def log(self) -> list[Sent]:
        """All requests with a reply, from the request log, which is complete after the service has stopped."""
        lines = [
            json.loads(line) for path in (self.home / FOLDER).glob(PATTERN) for line in path.read_text().splitlines()
        ]
        return [
            Sent(
                account=line["account"],
                replica=line["replica"] or "",
                prompt_tokens=line["prompt_tokens"],
                cached_tokens=line["cached_tokens"],
                first_token_s=line["first_token_ms"] / 1000,
            )
            for line in lines
            if line.get("event") == "request" and line["status"] == 200 and line["first_token_ms"] is not None
        ]
