"""Installs the LiteLLM proxy into a virtual environment of its own under `.bench`: `make bench-gateway-peer`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench.harness import peers

LITELLM = "litellm[proxy]==1.106.2"


def install_litellm(target: Path) -> dict[str, Any]:
    """The proxy, installed as its documentation says."""
    python = peers.environment(target)
    peers.pip(target, python, "install", LITELLM)
    return {"python": python, "version": peers.version(python, "litellm")}


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 when it is there afterwards."""
    return peers.main({"litellm": install_litellm}, "python -m bench.gateway.setup_peer", str(__doc__), arguments)


if __name__ == "__main__":
    sys.exit(main())
