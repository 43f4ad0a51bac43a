"""Draws a frame of the live view: three tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

Json = dict[str, Any]
UNKNOWN = "-"
WIDE = 100  # terminals of at least this width get wider gaps between table columns
ROUND = 9_999.5  # larger numbers are shown in thousands


def new_console(width: int | None = None) -> Console:
    """Returns a console that prints text literally, without Rich's markup. `width` None: the terminal's width."""
    return Console(width=width, markup=False, highlight=False, emoji=False)


def draw(frame: Json, url: str, width: int) -> RenderableType:
    """Returns the frame for a terminal of `width` columns."""
    parts: list[RenderableType] = [*_head(frame, url), Text()]
    parts += [_models(frame, width), Text(), _backends(frame, width), Text(), _accounts(frame, width)]
    return Group(*parts)


def as_text(frame: Json, url: str, width: int) -> str:
    """Returns the frame without colours, for a pipe."""
    console = new_console(width)
    with console.capture() as capture:
        console.print(draw(frame, url, width))
    # Rich pads every line to the table's width, which a pipe does not need.
    return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())


def _head(frame: Json, url: str) -> list[Text]:
    limiters = frame["limiters"]
    silent = [str(limiter["shard"]) for limiter in limiters if not limiter["admits"]]
    facts = [
        f"open {frame['open_requests']:,}",
        f"held {frame['held']} {frame['currency']}",
        f"limiters {len(limiters) - len(silent)}/{len(limiters)}",
    ]
    lines = [
        Text(_printable(f"{url}   {frame['at'][11:19]} UTC"), no_wrap=True, overflow="ellipsis"),
        Text("   ".join(facts), style="bold"),
    ]
    warnings = [f"limiter shards that do not admit: {', '.join(silent)}"] if silent else []
    waiting = sum(one["spool"]["settlements"] for one in frame["gateways"] if one["spool"] is not None)
    if waiting:
        warnings.append(f"settlements in gateways' spools that wait for the ledger: {waiting:,}")
    if frame["problem"]:
        warnings.append(f"showing figures of {frame['at'][11:19]} UTC: {frame['problem']}")
    return lines + [Text(_printable(warning), style="red") for warning in warnings]


def _models(frame: Json, width: int) -> Table:
    table = _table(width, "model", "backend", "share")
    for model in frame["models"]:
        for number, backend in enumerate(model["backends"]):
            table.add_row(
                _name("" if number else model["id"]), _name(backend["name"]), Text(_percent(backend["share"]))
            )
    return table


def _backends(frame: Json, width: int) -> Table:
    names = ("status", "repl", "run", "wait", "oldest", "KV", "prefill", "tok/s", "press", "limit")
    table = _table(width, "backend", *names)
    for backend in frame["backends"]:
        load, running = backend["load"], backend["replicas"]
        status = (backend["status"] or UNKNOWN).lower()
        row = [_name(backend["name"]), Text(_printable(status), style="" if status in ("running", UNKNOWN) else "red")]
        if load is None:
            table.add_row(*row, Text(UNKNOWN if running is None else f"0/{running}", style="red"))
            continue
        # Number of replicas that report. If Serve counts a different number, it follows: `1/2`.
        replicas = str(load["replicas"]) if running in (None, load["replicas"]) else f"{load['replicas']}/{running}"
        table.add_row(
            *row,
            Text(replicas),
            Text(_count(load["running"])),
            Text(_count(load["waiting"])),
            Text(_seconds(load["queue_age_s"])),
            Text(_percent(load["kv_used"])),
            Text(_count(load["queued_prefill_tokens"])),
            Text(_rate(load["tokens_per_s"])),
            Text(f"{load['pressure']:.2f}", style="red" if load["pressure"] > 1 else ""),
            Text(_percent(load["effective_share"]), style="red" if load["effective_share"] < 1 else ""),
        )
    return table


def _accounts(frame: Json, width: int) -> Table:
    table = _table(width, "account", "name", "open", "held", "tokens/limit", "limit", untruncated=("account",))
    for account in frame["accounts"]:
        table.add_row(
            _name(account["id"]),
            _name(account["name"]),
            Text(_count(account["open_requests"])),
            Text(account["held"]),
            Text(f"{_count(account['tokens_used'])}/{_count(account['tokens_limit'])}"),
            Text(_percent(account["effective_share"]), style="red" if account["effective_share"] < 1 else ""),
        )
    return table


def _table(width: int, *columns: str, untruncated: Sequence[str] = ()) -> Table:
    """Returns an empty table. On a narrow terminal, names are truncated, except in the columns `untruncated`."""
    table = Table(box=None, pad_edge=False, padding=(0, 3 if width >= WIDE else 1, 0, 0), header_style="bold")
    for column in columns:
        is_name = column in ("model", "backend", "account", "name", "status")
        table.add_column(
            Text(column, no_wrap=True),
            justify="left" if is_name else "right",
            no_wrap=column in untruncated or not is_name or column == "status",
            overflow="ellipsis",
        )
    return table


def _name(name: str) -> Text:
    return Text(_printable(name), no_wrap=True, overflow="ellipsis")


def _printable(text: str) -> str:
    """Replaces control characters, because names come from people."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _count(count: int) -> str:
    return f"{count:,}" if count < ROUND else _rounded(count)


def _rate(rate: float | None) -> str:
    if rate is None:
        return UNKNOWN
    if rate >= ROUND:
        return _rounded(rate)
    return f"{rate:,.1f}" if rate < 99.95 else f"{rate:,.0f}"


def _rounded(number: float) -> str:
    for unit in ("k", "M", "G"):
        number /= 1000
        if number < 999.5 or unit == "G":
            break
    return f"{number:.1f}{unit}" if number < 99.95 else f"{number:.0f}{unit}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
