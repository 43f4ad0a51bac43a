"""Measures the cost of an unavailable trace collector: `python -m bench.gateway.collectors`.

The service runs without a collector, with one that refuses connections, and with one that accepts them but never
answers. The three take turns under the same load.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from bench.gateway import load
from bench.gateway.session import WORKLOAD, Scope, Session
from bench.gateway.systems import Full
from bench.harness.command import PEERS, completed
from bench.harness.machine import describe
from bench.harness.results import Results, client_counts, ratio
from bench.harness.servers import ServerError, deployment
from bench.harness.tables import figure_table, show, table
from serve_app.launch.preflight import free_port

NONE: Final = "no collector"
MAX_LOSS: Final = 0.05  # maximum share by which a collector may lower throughput and raise p90
FIGURES: Final = (("requests_per_s", "requests/s"), ("p90_ms", "p90, ms"), ("p99_ms", "p99, ms"))


class Traced(Full):
    """The service with a collector's address in its environment."""

    def __init__(self, folder: Path, title: str, endpoint: str, share: float) -> None:
        self.title = title
        self.name = title.replace(" ", "-")
        super().__init__(folder)
        self._endpoint = endpoint
        self._share = share

    def config(self) -> dict[str, Any]:
        config = super().config()
        deployment(config, "Gateway")["user_config"]["trace_share"] = self._share
        return config

    def environment(self) -> dict[str, str]:
        there = super().environment()
        return {**there, "OTEL_EXPORTER_OTLP_ENDPOINT": self._endpoint} if self._endpoint else there


@contextlib.contextmanager
def silent_listener() -> Iterator[str]:
    """Runs a server that accepts every connection but never reads or writes. Yields its address."""
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):  # the socket is closed
                while True:
                    kept.append(server.accept()[0])

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in kept:
                connection.close()


def measure(folder: Path, scope: Scope, share: float) -> Results:
    with silent_listener() as silent:
        endpoints = {NONE: "", "refuses": f"http://127.0.0.1:{free_port()}", "never answers": silent}
        systems = [Traced(folder, title, endpoint, share) for title, endpoint in endpoints.items()]
        session = Session(systems, scope)
        session.run()
    return {
        "servers": {system.name: {"title": system.title} for system in systems},
        "records": session.records,
        "audits": session.audits,
        "missing": session.missing,
        "trace_share": share,
        "machine": describe(),
    }


def markdown(results: Results) -> str:
    """Tables of the figures, and of their ratios to the figures without a collector."""
    parts = [f"{text}:\n\n{figure_table(results, WORKLOAD, figure, '{:.1f}')}" for figure, text in FIGURES]
    return "\n\n".join([*parts, f"Ratio to {NONE}:\n\n{ratio_table(results)}"]) + "\n"


def ratio_table(results: Results) -> str:
    none, *others = results["servers"]
    rows = [
        [results["servers"][name]["title"], str(clients)]
        + [show(ratio(results, name, none, WORKLOAD, clients, figure), "{:.2f}") for figure, _ in FIGURES]
        for name in others
        for clients in client_counts(results, WORKLOAD)
    ]
    return table(["collector", "clients", *(text for _, text in FIGURES)], rows)


def is_kept(results: Mapping[str, Any]) -> bool:
    """Returns whether the medians of throughput and p90 are within MAX_LOSS of those without a collector."""
    none, *others = results["servers"]
    found = [
        (ratio(dict(results), name, none, WORKLOAD, clients, figure), figure)
        for name in others
        for clients in client_counts(dict(results), WORKLOAD)
        for figure in ("requests_per_s", "p90_ms")
    ]
    return bool(found) and all(
        one is not None and (one.median >= 1 - MAX_LOSS if figure == "requests_per_s" else one.median <= 1 + MAX_LOSS)
        for one, figure in found
    )


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 if the promise is kept, else 1."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.collectors", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="default: 4")
    parser.add_argument("--clients", nargs="+", type=int, default=[16], help="default: 16")
    parser.add_argument("--seconds", type=int, default=12, help="seconds of each load; default: 12")
    parser.add_argument("--warm-up", type=int, default=6, help="seconds; default: 6")
    parser.add_argument("--share", type=float, default=0.01, help="share of traces that are sent; default: 0.01")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all results to OUT")
    options = parser.parse_args(arguments)
    scope = Scope(options.rounds, tuple(options.clients), options.warm_up, options.seconds)
    load.check_wrk()
    folder = PEERS.absolute() / "gateway"
    results = completed(lambda: measure(folder, scope, options.share), (load.LoadError, ServerError))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results))
    return 0 if is_kept(results) else 1


if __name__ == "__main__":
    sys.exit(main())
