"""Renders the results of a run as Markdown tables, and writes them into docs/benchmarks.md."""

from __future__ import annotations

from pathlib import Path

from bench.engine import plan, plots
from bench.engine.figures import floor_share
from bench.engine.verdicts import verdicts
from bench.harness import document
from bench.harness.results import Results, measured, spread, title
from bench.harness.tables import figure_table, promise_table, show, table

BEGIN = "<!-- measured: written by `python -m bench.engine --docs`, not by hand -->"
END = "<!-- end of what was measured -->"


def write_docs(path: Path, results: Results) -> None:
    """Updates this benchmark's part of the document, its plots and its records.

    Raises:
        ValueError: the document does not have this benchmark's marks.
    """
    document.renew(
        path,
        BEGIN,
        END,
        ("engine.json", results),
        lambda folder: plots.draw(results, folder),
        lambda pictures: markdown(results, pictures),
    )


def markdown(results: Results, pictures: str = "") -> str:
    """The whole report."""
    parts = [
        machine(results),
        "### Targets\n\n" + promise_table(verdicts(results)),
        *(rate_tables(results, workload) for workload in (plan.SHORT, plan.LONG)),
        pictures,
        special_tables(results),
        "### Memory and the memory-bandwidth floor\n\n" + server_table(results),
        notes(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def machine(results: Results) -> str:
    """Machine, versions and length of the run."""
    there = results["machine"]
    libraries = ", ".join(f"{name} {version}" for name, version in there["libraries"].items())
    low, high = results["window_s"]
    return (
        f"Measured on {results['date']} in {results['seconds'] / 60:.0f} minutes: {there['cores']} cores of "
        f"{there['cpu']} ({there['family']}; {' '.join(there['flags'])}), {there['memory_bytes'] / 2**30:.0f} GiB, "
        f"memory read at {there['read_bytes_per_s'] / 1e9:.1f} GB/s, {there['system']}, Python {there['python']}, "
        f"{libraries}. {results['rounds']} round(s), each load {low:.0f} to {high:.0f} s; "
        "every figure is the median of the rounds, followed by their minimum and maximum if these differ."
    )


def rate_tables(results: Results, workload: str) -> str:
    """Tables of a load's rates, waits and times per token, by number of clients."""
    if not measured(results, workload):
        return ""
    prompt = {plan.SHORT: "Short prompts (40 tokens)", plan.LONG: "Long prompts (1,000 tokens)"}[workload]
    tables = (
        ("Output tokens per second, all clients together:", "tokens_per_s", "{:.0f}", 1.0),
        ("Time to first token, seconds, median of the requests:", "ttft_p50_s", "{:.2f}", 1.0),
        ("Time to first token, seconds, 95th percentile:", "ttft_p95_s", "{:.2f}", 1.0),
        ("Milliseconds per token of one stream after its first:", "token_p50_s", "{:.1f}", 1000.0),
    )
    shown = [
        f"{heading}\n\n{figure_table(results, workload, figure, form, scale)}"
        for heading, figure, form, scale in tables
    ]
    return "\n\n".join([f"### {prompt}", *shown])


def special_tables(results: Results) -> str:
    """Tables of the other workloads: editing code, second turns, and a long prompt while streams run."""
    parts = []
    shapes: list[tuple[str, str, int, list[tuple[str, str, str, float]]]] = [
        (
            "Editing code, 1 client",
            plan.CODE,
            1,
            [("tokens/s", "tokens_per_s", "{:.0f}", 1), ("ms per token", "token_p50_s", "{:.1f}", 1000)],
        ),
        (
            "A second turn over a conversation of 1,000 tokens, 1 client",
            plan.PREFIX,
            1,
            [
                ("first turn's TTFT, s", "ttft_first_s", "{:.2f}", 1),
                ("second turn's TTFT, s", "ttft_second_s", "{:.2f}", 1),
                ("second / first", "second_to_first", "{:.2f}", 1),
            ],
        ),
        (
            "4 streams while a prompt of 6,000 tokens is prefilled",
            plan.DISTURBED,
            4,
            [
                ("tokens/s of a stream before", "calm_tokens_per_s", "{:.1f}", 1),
                ("during", "disturbed_tokens_per_s", "{:.1f}", 1),
                ("kept", "kept", "{:.2f}", 1),
                ("longest pause, s", "longest_pause_s", "{:.2f}", 1),
                ("the prompt's TTFT, s", "intruder_ttft_s", "{:.1f}", 1),
            ],
        ),
    ]
    for heading, workload, clients, columns in shapes:
        if names := measured(results, workload):
            body = [
                [
                    title(results, name),
                    *(show(spread(results, name, workload, clients, key), form, by) for _, key, form, by in columns),
                ]
                for name in names
            ]
            parts.append(f"### {heading}\n\n" + table(["", *(column[0] for column in columns)], body))
    return "\n\n".join(parts)


def server_table(results: Results) -> str:
    """Memory, idle CPU use, and share of the memory-bandwidth floor, by server."""
    bandwidth = results["machine"]["read_bytes_per_s"]
    rows = []
    for name, server in results["servers"].items():

        def share(clients: int, name: str = name, weights: int = server["weight_bytes"]) -> str:
            time = spread(results, name, plan.SHORT, clients, "token_p50_s")
            return "" if time is None else f"{floor_share(weights, bandwidth, time.median):.0%}"

        memory = server["peak_memory_bytes"]
        idle = server["idle_cpu"]
        rows.append(
            [
                server["title"],
                f"{server['weight_bytes'] / 1e6:.0f} MB",
                f"{1000 * server['weight_bytes'] / bandwidth:.1f} ms",
                share(1),
                share(16),
                f"{memory / 2**30:.2f} GiB" if memory else "",
                "" if idle is None else f"{idle:.0%}",
            ]
        )
    head = ["", "weights", "floor: read all weights", "floor / measured, 1 client", "floor / measured, 16 clients"]
    head += ["peak memory", "idle CPU, share of one core"]
    return table(head, rows)


def notes(results: Results) -> str:
    """Returns settings, missing servers, and replies that differ from what was requested."""
    lines = [f"- {one['title']}: {_facts(one['facts'])}." for one in results["servers"].values()]
    lines += [f"- Not in the tables: {name} ({why})." for name, why in results["missing"].items()]
    if results["cut_short"]:
        lines.append("- The run was cut short by its time limit: later rounds are missing.")
    records = results["records"]
    client = max((record.get("client_cpu", 0.0) for record in records), default=0.0)
    lines.append(f"- The load generator used at most {client:.0%} of one core. It shares the cores with the servers.")
    for what, sentence in _ODDITIES.items():
        places = sorted({_place(results, record) for record in records if record.get(what)})
        if places:
            lines.append(f"- {sentence}: {'; '.join(places)}.")
    for record in records:
        if record["problems"]:
            lines.append(f"- Left out, {_place(results, record)}, round {record['round'] + 1}: {record['problems'][0]}")
    return "### Notes\n\n" + "\n".join(lines)


_ODDITIES = {
    "early": "Some replies had fewer tokens than asked for (counted as they are)",
    "unanswered": "Some requests of the following loads had no token when the load ended (their waits until then count "
    "as TTFT)",
}


def _place(results: Results, record: Results) -> str:
    return f"{title(results, record['server'])}, {record['workload']}, {record['clients']} clients"


def _facts(facts: Results) -> str:
    flat = {**facts, **facts.get("settings", {})}
    flat.pop("settings", None)
    return ", ".join(f"{key} {value}" for key, value in flat.items())
