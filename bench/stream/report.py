"""Renders the results of a run as a Markdown table, and writes it into docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.harness import document
from bench.harness.tables import table

BEGIN: Final = "<!-- measured: written by `python -m bench.stream --docs`, not by hand -->"
END: Final = "<!-- end of what bench.stream measured -->"
_BACKENDS: Final = ("Model", "Paced", "BareModel")
_GATEWAYS: Final = ("Gateway", "Bare")


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Returns the median and the 99th percentile in milliseconds; empty without values."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {name: 1000 * ordered[int(share * (len(ordered) - 1))] for name, share in (("p50", 0.5), ("p99", 0.99))}


def line(record: dict[str, Any]) -> str:
    """One record as one line of progress."""
    cores = ", ".join(f"{part} {value:.2f}" for part, value in _largest(record))
    problems = f", PROBLEM {record['problems'][0]}" if record["problems"] else ""
    load = f"{record['streams']} x {record['rate']}{_hang_ups(record)}"
    return (
        f"{load}: {record['tokens_per_s']:.0f} tokens/s, {record['events_per_s']:.0f} "
        f"events/s, gap {_pair(record['gap_ms'])} ms, first token {_pair(record['first_ms'])} ms, cores: {cores}, "
        f"client {record['client_cores']:.2f}{problems}"
    )


def _hang_ups(record: dict[str, Any]) -> str:
    return f", {record['hang_ups']:.0%} hang up" if record.get("hang_ups") else ""


def _pair(found: dict[str, float]) -> str:
    return f"{found['p50']:.0f} / {found['p99']:.0f}" if found else "none"


def _largest(record: dict[str, Any]) -> list[tuple[str, float]]:
    parts = sorted(record["cores_by_part"].items(), key=lambda pair: -pair[1])
    return [(part, value) for part, value in parts if value >= 0.01]


def _cores(record: dict[str, Any], names: Sequence[str]) -> float:
    return sum(record["cores_by_part"].get(name, 0.0) for name in names)


def markdown(results: dict[str, Any]) -> str:
    """Returns the report."""
    there = results["machine"]
    head = [
        "server",
        "streams x tokens/s",
        "tokens/s",
        "events/s",
        "gap p50 / p99, ms",
        "first token p50 / p99, ms",
        "cores: backend",
        "gateway",
        "HAProxy",
        "client",
        "CPU µs per token, backend and gateway",
    ]
    rows = []
    for record in results["records"]:
        backend, gateway = _cores(record, _BACKENDS), _cores(record, _GATEWAYS)
        rows.append(
            [
                record["title"],
                f"{record['streams']} x {record['rate']}" + _hang_ups(record),
                f"{record['tokens_per_s']:,.0f}",
                f"{record['events_per_s']:,.0f}",
                _pair(record["gap_ms"]),
                _pair(record["first_ms"]),
                f"{backend:.2f}",
                f"{gateway:.2f}",
                f"{_cores(record, ['HAProxy']):.2f}",
                f"{record['client_cores']:.2f}",
                f"{1e6 * (backend + gateway) / record['tokens_per_s']:.0f}" if record["tokens_per_s"] else "",
            ]
        )
    about = (
        f"Measured on {results['date']} in {results['seconds'] / 60:.0f} minutes: {there['cores']} cores of "
        f"{there['cpu']} ({there['family']}), {there['system']}, Python {there['python']}, ray "
        f"{there['libraries'].get('ray', '?')}. Replies of {results['tokens']} tokens, windows of "
        f"{results['window_s']} s after {results['warm_up_s']} s of warm-up. A gap is the time between two reads of a "
        "stream that contain tokens. All processes, including the client, share the cores."
    )
    problems = [
        f"- {record['title']}, {record['streams']}: {record['problems'][0]}"
        for record in results["records"]
        if record["problems"]
    ]
    return "\n\n".join([about, table(head, rows), *(["\n".join(problems)] if problems else [])]) + "\n"


def write_docs(path: Path, results: dict[str, Any]) -> None:
    """Updates this benchmark's part of the document and its records. Raises ValueError if the document has no marks."""
    document.renew(path, BEGIN, END, ("stream.json", results), lambda folder: {}, lambda pictures: markdown(results))
