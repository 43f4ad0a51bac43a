"""Installs the LiteLLM proxy into a separate virtual environment under `.bench`: `make bench-gateway-peer`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench.harness import peers

LITELLM = "litellm[proxy]==1.106.2"


def install_litellm(target: Path) -> dict[str, Any]:
    """Installs the proxy as its documentation describes."""
    python = peers.environment(target)
    peers.pip(target, python, "install", LITELLM)
    return {"python": python, "version": peers.version(python, "litellm")}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 if the proxy is installed."""
    return peers.main({"litellm": install_litellm}, "python -m bench.gateway.setup_peer", str(__doc__), arguments)


if __name__ == "__main__":
    sys.exit(main())
