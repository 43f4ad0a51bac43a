"""Renders the results of a run as Markdown tables, and writes them into docs/benchmarks.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from bench.attack.hostile import ATTACKS
from bench.attack.verdicts import verdicts
from bench.harness import document
from bench.harness.results import Results
from bench.harness.tables import promise_table, table

BEGIN: Final = "<!-- measured: written by `python -m bench.attack --docs`, not by hand -->"
MAX_OTHERS: Final = 0.1  # share of the machine that other programs may use
END: Final = "<!-- end of what bench.attack measured -->"


def write_docs(path: Path, results: Results) -> None:
    """Updates this benchmark's part of the document and its records.

    Raises:
        ValueError: the document does not have this benchmark's marks.
    """
    document.renew(path, BEGIN, END, ("attack.json", results), lambda _: {}, lambda _: markdown(results))


def markdown(results: Results) -> str:
    """The whole report."""
    parts = [
        machine(results),
        promise_table(verdicts(results)),
        latencies(results),
        attackers(results),
        customer(results),
        smuggling(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def machine(results: Results) -> str:
    """Machine and length of the run."""
    there, scope = results["machine"], results["scope"]
    return (
        f"Measured on {results['date']} in {results['seconds'] / 60:.0f} minutes: {there['cores']} cores of "
        f"{there['cpu']} ({there['family']}), {there['memory_bytes'] / 2**30:.0f} GiB, {there['system']}, "
        f"Python {there['python']}, ray {there['libraries'].get('ray', '?')}. {scope['per_s']:g} ordinary requests a "
        f"second; windows of {scope['calm_s']:g} s calm, {scope['attack_s']:g} s of attack, {scope['control_s']:g} s "
        f"of the control. The measuring clients used {results['client_cpu']:.0%} of the machine. {_others(results)}"
    )


def latencies(results: Results) -> str:
    """Returns the ordinary clients' figures, with a row for each attack."""
    rows = []
    for one in results["records"].values():
        calm, attack = one["windows"]["calm"], one["windows"]["attack"]
        control = one["windows"].get("control")
        flaps = one["health"]["attack"]
        rows.append(
            [
                one["title"],
                f"{_ms(calm['p50'])} / {_ms(calm['p99'])} ({calm['samples']})",
                f"{_ms(attack['p50'])} / {_ms(attack['p99'])} ({attack['samples']})",
                _times(one["factor"]),
                "" if control is None else f"{_times(one['control_factor'])} ({control['samples']})",
                _failures(attack),
                f"{flaps['flaps']} ({flaps['failed']} of {flaps['sent']} probes failed)",
                _recovery(one),
            ]
        )
    if not rows:
        return ""
    head = [
        "", "calm p50 / p99, ms (samples)", "under attack", "factor of p99", "control: factor (samples)",
        "ordinary requests that failed", "health flaps", "seconds to recover",
    ]  # fmt: skip
    return f"What ordinary clients saw. Milliseconds to the first token:\n\n{table(head, rows)}"


def attackers(results: Results) -> str:
    """Returns what the attackers sent and received."""
    rows = []
    for one in results["records"].values():
        found = one["attacker"]
        got = [f"{count:,} × {status}" for status, count in sorted(found["statuses"].items())]
        got += [
            f"{found[name]:,} {text}"
            for name, text in (("hung_up", "hung up"), ("cut", "cut by the service"), ("refused", "not connected"))
            if found[name]
        ]
        rows.append(
            [
                one["title"],
                f"{found['share']:.1%}",
                "" if one["control_share"] is None else f"{one['control_share']:.1%}",
                f"{one['service_share']:.0%}",
                f"{found['most_open']:,}",
                f"{found['requests']:,}",
                f"{found['bytes_written'] / 1e6:,.1f}",
                ", ".join(got) or "nothing",
            ]
        )
    if not rows:
        return ""
    head = [
        "", "attacker's share of the machine", "control's share", "service's share", "most connections open",
        "requests sent", "MB written", "results",
    ]  # fmt: skip
    lines = [f"- {one['title']}: {ATTACKS[name].what}." for name, one in results["records"].items() if name in ATTACKS]
    return f"What the attackers did:\n\n{table(head, rows)}\n\n" + "\n".join(lines)


def customer(results: Results) -> str:
    """Returns the customer's figures, with a row for each case."""
    rows = [
        [
            row["case"],
            f"{_ms(row['calm']['p50'])} / {_ms(row['calm']['p99'])} ({row['calm']['samples']})",
            f"{_ms(row['after']['p50'])} / {_ms(row['after']['p99'])} ({row['after']['samples']})",
            _times(row["factor"]),
            f"{row['after']['failed']} of {row['after']['sent']}",
        ]
        for row in results.get("customer", ())
    ]
    if not rows:
        return ""
    head = ["", "calm p50 / p99, ms (samples)", "in this case", "factor of p99", "failed"]
    return f"How hang-ups and refused requests affect a good customer's other requests:\n\n{table(head, rows)}"


def smuggling(results: Results) -> str:
    """Returns a table with each failed case, then the correct cases grouped by their responses."""
    rows: list[dict[str, Any]] = results["smuggling"]
    if not rows:
        return ""
    good: dict[tuple[str, str], list[str]] = {}
    wrong = []
    for row in rows:
        got = (" ".join(map(str, row["statuses"])) or "none", "closed" if row["closed"] else "stays open")
        if row["problems"]:
            wrong.append([*got, f"**{row['case']}: {'; '.join(row['problems'])}**"])
        else:
            good.setdefault(got, []).append(row["case"])
    listed = [*wrong, *([*got, "; ".join(cases)] for got, cases in sorted(good.items()))]
    text = f"Request smuggling through HAProxy: {len(rows) - len(wrong)} of {len(rows)} cases are handled correctly."
    return f"{text}\n\n{table(['responses', 'connection', 'cases'], listed)}"


def _recovery(one: dict[str, Any]) -> str:
    waited = one["windows"]["recovery"]["seconds"]
    is_over = waited - one["recovered_s"] > 1.0  # otherwise requests were late until the end of the window
    return f"{one['recovered_s']:.1f}" if is_over else f"more than {waited:.0f}"


def _others(results: Results) -> str:
    shares = [share for one in results["records"].values() for share in one["others_share"].values()]
    if not shares:
        return ""
    text = f"Other programs used {min(shares):.0%} to {max(shares):.0%} of it"
    return f"{text}: **too much for reliable figures**." if max(shares) > MAX_OTHERS else f"{text}."


def _failures(found: dict[str, Any]) -> str:
    others = [f"{count} × {status}" for status, count in found["statuses"].items() if status not in ("200",)]
    text = f"{found['failed']} of {found['sent']}"
    details = [*(f"{one.replace('× 0', 'no status')}" for one in others)]
    if found["new_keys_failed"]:
        details.append(f"{found['new_keys_failed']} of {found['new_keys']} first uses of a key")
    return text + (f" ({', '.join(details)})" if details else "")


def _ms(seconds: float | None) -> str:
    return "none" if seconds is None else f"{1000 * seconds:.0f}"


def _times(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f}"
