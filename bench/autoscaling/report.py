"""Renders the results of the simulated days as Markdown tables, and writes them into docs/benchmarks.md."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from bench.autoscaling import plot
from bench.autoscaling.traffic import SHAPES
from bench.harness import document
from bench.harness.tables import table

BEGIN = "<!-- simulated: written by `python -m bench.autoscaling --docs`, not by hand -->"
END = "<!-- end of what bench.autoscaling simulated -->"
TITLES = {
    "rule": "the rule, tuned",
    "serve": "Serve's policy, tuned",
    "keda": "KEDA on queue depth, tuned",
    "before": "Serve's policy, as it was set before",
    "foresight": "with the day known in advance",
}
MIN_SAVING = 0.25  # minimum share of the cost of Serve's tuned policy that the rule must save


def write_docs(path: Path, results: dict[str, Any]) -> None:
    """Replaces the text between the two marks. Plot and records go into the folder with the document's name.

    Raises:
        ValueError: the document has no marks.
    """
    document.renew(
        path,
        BEGIN,
        END,
        ("autoscaling.json", _rounded(results)),
        lambda folder: plot.draw(results, folder),
        lambda pictures: markdown(results, pictures),
    )


def promises(results: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """Returns for each shape: the promise, what is needed, the result over all days, and whether it holds."""
    rows = []
    for shape in _shapes(results):
        ours, serve = _days(results, shape, "rule"), _days(results, shape, "serve")
        saved = 1.0 - _mean(ours, "cost") / _mean(serve, "cost")
        figures = {"refusals": "refused", "queue age": "queued_p95_s"}
        worse = [title for title, name in figures.items() if _mean(ours, name) > _mean(serve, name) + 1e-9]
        found = f"{saved:.0%}, and " + (f"worse in {' and '.join(worse)}" if worse else "not worse in either")
        title = f"{SHAPES[shape].title}: cost below Serve's tuned policy, with p95 queue age and refusals not worse"
        rows.append((title, f"at least {MIN_SAVING:.0%}", found, saved >= MIN_SAVING and not worse))
    return rows


def markdown(results: dict[str, Any], pictures: str = "") -> str:
    """The whole report."""
    rows = [[what, needed, found, "yes" if kept else "**no**"] for what, needed, found, kept in promises(results)]
    fleet = results["fleet"]
    sections = [
        table(["", "target", "simulated", "met"], rows),
        f"Means of {len({one['seed'] for one in results['records']})} days of each shape, with the range. A replica "
        f"takes {fleet['start_s']:.0f} s to start and costs {fleet['price']:g} an hour; there are {fleet['least']} to "
        f"{fleet['most']}. The refused share counts requests that were refused at least once or started too late.",
        *(_shape(results, shape) for shape in _shapes(results)),
        pictures,
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _shape(results: dict[str, Any], shape: str) -> str:
    rows = []
    for policy, title in TITLES.items():
        days = _days(results, shape, policy)
        if days:
            rows.append(
                [
                    title,
                    _range(days, "cost", "{:.0f}"),
                    _range(days, "queued_p95_s", "{:.1f} s"),
                    _range(days, "first_p95_s", "{:.1f} s"),
                    _range(days, "refused", "{:.2%}"),
                    _range(days, "given_up", "{:.2%}"),
                    _range(days, "changes", "{:.0f}"),
                    _settings(days[0]["settings"]),
                ]
            )
    aim = (
        f"chosen for at most {SHAPES[shape].most_refused:.0%} refused, first token in {SHAPES[shape].first_token_s:g} s"
    )
    head = ["", "cost of a day", "queue age, p95", "first token, p95", "refused", "given up", "changes", "settings"]
    return f"**{SHAPES[shape].title}** ({aim}):\n\n{table(head, rows)}"


def _settings(settings: dict[str, Any]) -> str:
    names = {
        "target_ongoing_requests": "target {:g}",
        "upscale_delay_s": "up {:g} s",
        "downscale_delay_s": "down {:g} s",
        "look_back_period_s": "look-back {:g} s",
        "upscaling_factor": "factor {:g}",
        "threshold": "threshold {:g}",
        "stabilization_s": "down {:g} s",
        "fill": "fill {:g}",
        "spare": "spare {:g}",
        "down_after_s": "down {:g} s",
        "mean_s": "load over {:g} s",
    }
    shown = [form.format(settings[name]) for name, form in names.items() if name in settings]
    if "counts_running" in settings:
        shown.append("running requests counted" if settings["counts_running"] else "only waiting requests counted")
    return ", ".join(shown)


def _shapes(results: dict[str, Any]) -> list[str]:
    there = {one["shape"] for one in results["records"]}
    return [shape for shape in SHAPES if shape in there]


def _days(results: dict[str, Any], shape: str, policy: str) -> list[dict[str, Any]]:
    return [one for one in results["records"] if (one["shape"], one["policy"]) == (shape, policy)]


def _mean(days: list[dict[str, Any]], name: str) -> float:
    return mean(day[name] for day in days)


def _range(days: list[dict[str, Any]], name: str, form: str) -> str:
    values = sorted(day[name] for day in days)
    low, high = form.format(values[0]), form.format(values[-1])
    middle = form.format(mean(values))
    return middle if low == high else f"{middle} ({low} to {high})"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value
