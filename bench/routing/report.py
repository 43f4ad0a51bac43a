"""Renders the comparison of routers as Markdown tables, and writes them into docs/benchmarks.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from bench.harness import document
from bench.harness.promises import Promise, Verdict
from bench.harness.results import Results, Spread
from bench.harness.tables import promise_table, show, table

BEGIN: Final = "<!-- measured: written by `python -m bench.routing --docs`, not by hand -->"
END: Final = "<!-- end of what bench.routing measured -->"
#: Column heading and format, by figure.
COLUMNS: Final = {
    "cached_share": ("cached share of prompt tokens", "{:.2f}"),
    "ttft_p50_s": ("first token p50, s", "{:.2f}"),
    "ttft_p95_s": ("p95, s", "{:.2f}"),
    "most_requests": ("requests of the busier replica / even share", "{:.2f}"),
    "most_computed": ("prompt tokens computed by the busier replica / even share", "{:.2f}"),
    "beside_two_s": ("first token during another account's 2 requests, s", "{:.3f}"),
    "beside_flood_s": ("during its 50, s", "{:.3f}"),
}


def spread(results: Results, router: str, figure: str) -> Spread | None:
    """A router's figure over its measurements."""
    return Spread.of(record[figure] for record in results["records"] if record["router"] == router)


def ratio(results: Results, figure: str) -> Spread | None:
    """Ratio of the median of our figure to the median of Serve's default."""
    ours, default = spread(results, "conversation", figure), spread(results, "balanced", figure)
    if ours is None or default is None or default.median == 0:
        return None
    return Spread.of([ours.median / default.median])


PROMISES: Final = (
    Promise("cached share, conversation against balanced", 1.5, lambda found: ratio(found, "cached_share")),
    Promise(
        "first token p95, conversation against balanced", 1.0, lambda found: ratio(found, "ttft_p95_s"), at_most=True
    ),
    Promise(
        "conversation: first token during another account's 50 requests / during its 2",
        2.0,
        lambda found: spread(found, "conversation", "fairness"),
        at_most=True,
    ),
)


def verdicts(results: Results) -> list[Verdict]:
    """Each promise with its figure."""
    return [Verdict(promise, promise.measure(results)) for promise in PROMISES]


def markdown(results: Results) -> str:
    """The whole report."""
    machine, plan = results["machine"], results["plan"]
    routers = list(dict.fromkeys(record["router"] for record in results["records"]))
    rows = [
        [f"`{name}`: {results['routers'][name]}"]
        + [show(spread(results, name, figure), form) for figure, (_, form) in COLUMNS.items()]
        for name in routers
    ]
    order = ", ".join(f"`{record['router']}`" for record in results["records"])
    return "\n\n".join(
        [
            f"{plan['clients']} clients of {plan['accounts']} accounts hold {plan['conversations']} conversations "
            f"each, {plan['think_s']:g} s between turns on average; {plan['kv_cache']} of KV cache for each replica; "
            f"seed {plan['seed']}; routers in the order in which they were measured: {order}. "
            f"{machine['cores']} cores of {machine['cpu']} ({machine['family']}).",
            table(["router", *(name for name, _ in COLUMNS.values())], rows),
            promise_table(verdicts(results)),
        ]
    )


def write_docs(path: Path, results: dict[str, Any]) -> None:
    """Replaces the text between the two marks. The records go into the folder with the document's name.

    Raises:
        ValueError: the document has no marks.
    """
    text = path.read_text()
    document.check(text, BEGIN, END)
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    (folder / "routing.json").write_text(json.dumps(results, separators=(",", ":")) + "\n")
    path.write_text(document.renewed(text, BEGIN, END, markdown(results) + "\n"))
