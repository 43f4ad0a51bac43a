"""The service with its console, and the e-mail address and password of the person who opens its pages."""

from __future__ import annotations

import secrets
from typing import Any, Final

from bench.harness.servers import Launched, shipped_config

PASSWORD: Final = "a password of the benchmark"
EMAIL: Final = f"reader-{secrets.token_hex(4)}@example.org"  # random, because runs share a ledger
PAGES: Final = (
    "",
    "/keys",
    "/usage",
    "/usage?span=90+days&by=key",
    "/usage?span=24+hours",
    "/requests",
    "/billing",
    "/alerts",
    "/members",
)


class WithConsole(Launched):
    """config.yaml and the console."""

    name = "console"
    title = "serve-app"

    def config(self) -> dict[str, Any]:
        config = shipped_config()
        args = {"trusted_proxies": 1}
        path = {"name": "console", "route_prefix": "/console", "import_path": "deployments.apps:console", "args": args}
        config["applications"].append(path)
        return config

    @property
    def facts(self) -> dict[str, Any]:
        return {}
