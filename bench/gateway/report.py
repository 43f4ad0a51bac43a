"""Renders the results of a run as Markdown tables, and writes them into docs/benchmarks.md."""

from __future__ import annotations

from pathlib import Path

from bench.gateway import plot
from bench.gateway.session import WORKLOAD
from bench.gateway.verdicts import verdicts
from bench.harness import document, parts
from bench.harness.results import Results, measured, title
from bench.harness.tables import figure_table, promise_table, table

BEGIN = "<!-- measured: written by `python -m bench.gateway --docs`, not by hand -->"
END = "<!-- end of what bench.gateway measured -->"

_TABLES = (
    ("Requests per second:", "requests_per_s", "{:.0f}"),
    ("Milliseconds from request to reply, median:", "p50_ms", "{:.1f}"),
    ("Milliseconds from request to reply, 99th percentile:", "p99_ms", "{:.1f}"),
    ("Processor milliseconds per request, all processes of a system added up:", "cpu_ms", "{:.2f}"),
)


def write_docs(path: Path, results: Results) -> None:
    """Updates this benchmark's part of the document, its plot and its records.

    Raises:
        ValueError: the document does not have this benchmark's marks.
    """
    document.renew(
        path,
        BEGIN,
        END,
        ("gateway.json", results),
        lambda folder: plot.draw(results, folder),
        lambda pictures: markdown(results, pictures),
    )


def markdown(results: Results, pictures: str = "") -> str:
    """The whole report."""
    sections = [
        machine(results),
        promise_table(verdicts(results)),
        *(f"{heading}\n\n{figure_table(results, WORKLOAD, figure, form)}" for heading, figure, form in _TABLES),
        pictures,
        part_table(results),
        notes(results),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def machine(results: Results) -> str:
    """Machine, versions and length of the run."""
    there = results["machine"]
    return (
        f"Measured on {results['date']} in {results['seconds'] / 60:.0f} minutes: {there['cores']} cores of "
        f"{there['cpu']} ({there['family']}), {there['memory_bytes'] / 2**30:.0f} GiB, {there['system']}, "
        f"Python {there['python']}, ray {there['libraries'].get('ray', '?')}. {results['rounds']} round(s), each load "
        f"{results['window_s']} s after {results['warm_up_s']} s of warm-up; every figure is the median of the rounds, "
        "followed by their minimum and maximum if these differ."
    )


def part_table(results: Results, clients: int = 16) -> str:
    """Returns a table of a request's processor time by part, as means over the rounds."""
    means: dict[str, dict[str, float]] = {}
    for name in measured(results, WORKLOAD):
        found = [
            record["cpu_ms_by_part"]
            for record in results["records"]
            if (record["server"], record["clients"]) == (name, clients) and not record["problems"]
        ]
        if found:
            means[name] = {part: sum(one.get(part, 0.0) for one in found) / len(found) for part in parts.largest(found)}
    if not means:
        return ""
    names = parts.largest(means.values())
    rows = [[part, *(f"{one[part]:.2f}" if part in one else "" for one in means.values())] for part in names]
    head = ["", *(title(results, name) for name in means)]
    return f"Processor milliseconds per request at {clients} clients, by process:\n\n{table(head, rows)}"


def notes(results: Results) -> str:
    """Returns settings, checks of the ledger, missing systems and failures."""
    lines = []
    for one in results["servers"].values():
        lines.append(f"- {one['title']}: {', '.join(f'{key} {value}' for key, value in one['facts'].items())}.")
    lines += [f"- Not in the tables: {name} ({why})." for name, why in results["missing"].items()]
    for audit in results["audits"]:
        verdict = "each of them is in the ledger, and the books are sound"
        if not (audit["exact"] and audit["books_sound"]):
            verdict = f"**the ledger has {audit['settled']}, books {'sound' if audit['books_sound'] else 'not sound'}**"
        lines.append(
            f"- {title(results, audit['server'])}, round {audit['round'] + 1}: {audit['answered']} replies; {verdict}."
        )
    records = results["records"]
    failed = sum(record["non_2xx"] + record["broken"] + record["timeouts"] for record in records)
    client = max((record["client_cpu"] for record in records), default=0.0)
    lines.append(f"- Requests that failed, of {sum(record['requests'] for record in records)}: {failed}.")
    lines.append(f"- wrk used at most {client:.0%} of one core. It shares the cores with the systems.")
    for record in records:
        if record["problems"]:
            place = f"{title(results, record['server'])}, {record['clients']} clients, round {record['round'] + 1}"
            lines.append(f"- Left out: {place}: {'; '.join(record['problems'])}.")
    return "\n".join(lines)
