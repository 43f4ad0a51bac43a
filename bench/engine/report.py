"""Tables of a run, in Markdown, and their place in docs/benchmarks.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from bench import document
from bench.engine import plan, plots
from bench.engine.figures import Spread, floor_share
from bench.engine.results import Results, client_counts, measured, spread, title
from bench.engine.verdicts import Verdict, verdicts

BEGIN = "<!-- measured: written by `python -m bench.engine --docs`, not by hand -->"
END = "<!-- end of what was measured -->"


def write_docs(path: Path, results: Results) -> None:
    """Renew what stands between the two marks; plots and records go into the folder of the same name.

    Raises:
        ValueError: the document has no marks.
    """
    text = path.read_text()
    document.check(text, BEGIN, END)
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    pictures = plots.draw(results, folder)
    (folder / "engine.json").write_text(json.dumps(results, separators=(",", ":")) + "\n")
    shown = "\n\n".join(f"![{alt}]({folder.name}/{name})" for name, alt in pictures.items())
    path.write_text(document.renewed(text, BEGIN, END, markdown(results, shown)))


def markdown(results: Results, pictures: str = "") -> str:
    """The whole report."""
    parts = [
        machine(results),
        "### What was promised\n\n" + promise_table(verdicts(results)),
        *(rate_tables(results, workload) for workload in (plan.SHORT, plan.LONG)),
        pictures,
        special_tables(results),
        "### Memory and the memory-bandwidth floor\n\n" + server_table(results),
        notes(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def machine(results: Results) -> str:
    """What it ran on."""
    there = results["machine"]
    libraries = ", ".join(f"{name} {version}" for name, version in there["libraries"].items())
    low, high = results["window_s"]
    return (
        f"Measured on {results['date']} in {results['seconds'] / 60:.0f} minutes: {there['cores']} cores of "
        f"{there['cpu']} ({there['family']}; {' '.join(there['flags'])}), {there['memory_bytes'] / 2**30:.0f} GiB, "
        f"memory read at {there['read_bytes_per_s'] / 1e9:.1f} GB/s, {there['system']}, Python {there['python']}, "
        f"{libraries}. {results['rounds']} round(s), each load {low:.0f} to {high:.0f} s; "
        "every figure is the median of the rounds with the range of all of them."
    )


def promise_table(verdicts: Iterable[Verdict]) -> str:
    """Each promise with its figure."""
    rows = []
    for verdict in verdicts:
        promise = verdict.promise
        needed = f"{'at most' if promise.at_most else 'at least'} {promise.needed:.2f}"
        if promise.goal is not None:
            needed += f", goal {promise.goal:g}"
        kept = {True: "yes", False: "**no**", None: "not measured"}[verdict.kept]
        rows.append([promise.text, needed, show(verdict.measured, "{:.2f}"), kept])
    return table(["", "needed", "measured", "kept"], rows)


def rate_tables(results: Results, workload: str) -> str:
    """Rates, waits and times per token of a load, by number of clients."""
    counts = client_counts(results, workload)
    if not counts:
        return ""
    prompt = {plan.SHORT: "Short prompts (40 tokens)", plan.LONG: "Long prompts (1,000 tokens)"}[workload]
    head = ["", *(f"{count} client{'s' if count > 1 else ''}" for count in counts)]

    def rows(figure: str, form: str, scale: float = 1.0) -> list[list[str]]:
        return [
            [title(results, name), *(show(spread(results, name, workload, n, figure), form, scale) for n in counts)]
            for name in measured(results, workload)
        ]

    return "\n\n".join(
        [
            f"### {prompt}\n\nOutput tokens per second, all clients together:",
            table(head, rows("tokens_per_s", "{:.0f}")),
            "Time to first token, seconds, median of the requests:",
            table(head, rows("ttft_p50_s", "{:.2f}")),
            "Time to first token, seconds, 95th percentile:",
            table(head, rows("ttft_p95_s", "{:.2f}")),
            "Milliseconds per token of one stream after its first:",
            table(head, rows("token_p50_s", "{:.1f}", 1000)),
        ]
    )


def special_tables(results: Results) -> str:
    """Editing code, second turns, and long prompts beside streams."""
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
    """Memory, idle cost, and how close each comes to reading its weights at the speed of memory."""
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
    head = ["", "weights", "floor per token", "share at 1 client", "at 16", "peak memory", "idle, of a core"]
    return table(head, rows)


def notes(results: Results) -> str:
    """What the tables don't show: settings, what is missing, what went otherwise than asked."""
    lines = [f"- {one['title']}: {_facts(one['facts'])}." for one in results["servers"].values()]
    lines += [f"- Not in the tables: {name} ({why})." for name, why in results["missing"].items()]
    if results["cut_short"]:
        lines.append("- The run was cut short by its time limit: later rounds are missing.")
    records = results["records"]
    client = max((record.get("client_cpu", 0.0) for record in records), default=0.0)
    lines.append(f"- The load generator took at most {client:.0%} of one core, of the same cores that the servers use.")
    for what, tell in _ODDITIES.items():
        places = sorted({_place(results, record) for record in records if record.get(what)})
        if places:
            lines.append(f"- {tell}: {'; '.join(places)}.")
    for record in records:
        if record["problems"]:
            lines.append(f"- Left out, {_place(results, record)}, round {record['round'] + 1}: {record['problems'][0]}")
    return "### Notes\n\n" + "\n".join(lines)


_ODDITIES = {
    "early": "Some replies had fewer tokens than asked for (counted as they are)",
    "unanswered": "Some requests had no token when the load ended; their waits until then count as TTFT",
}


def _place(results: Results, record: Results) -> str:
    return f"{title(results, record['server'])}, {record['workload']}, {record['clients']} clients"


def _facts(facts: Results) -> str:
    flat = {**facts, **facts.get("settings", {})}
    flat.pop("settings", None)
    return ", ".join(f"{key} {value}" for key, value in flat.items())


def show(spread: Spread | None, form: str, scale: float = 1.0) -> str:
    """Median and range; the median alone where the range is nothing at this precision."""
    if spread is None:
        return ""
    middle, low, high = (form.format(value * scale) for value in (spread.median, spread.low, spread.high))
    return middle if low == high else f"{middle} ({low} to {high})"


def table(head: list[str], rows: Iterable[list[str]], cell: Callable[[str], str] = str) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(each) for each in line) + " |" for line in lines)
