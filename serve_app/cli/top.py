"""`serve-app top`: shows current activity in the terminal, refreshed periodically."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Annotated, Any

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.output import CommandError

app = typer.Typer()

EVERY_S = 2.0
PIPE_COLUMNS = 120  # width of the output without a terminal
Json = dict[str, Any]


@command(
    app,
    "top",
    examples=(
        "serve-app top",
        "serve-app top --once --json",
        "serve-app top --every 10 --json >> live.jsonl",
    ),
)
def show_top(
    session: Session,
    every: Annotated[
        float | None,
        typer.Option(
            min=0.5, max=3600, metavar="SECONDS", help=f"Seconds between two frames. [{EVERY_S:.0f} on a terminal]"
        ),
    ] = None,
    once: Annotated[
        bool,
        typer.Option("--once", help="Show one frame. This is the default without a terminal, unless --every is given."),
    ] = False,
    top: Annotated[int, typer.Option("--accounts", min=0, max=100, help="Maximum number of accounts.")] = 10,
) -> None:
    """Show current activity: open requests, queues, KV use, pressure, and the busiest accounts.

    Press Ctrl-C to stop. `tok/s` counts prompt and output tokens. `limit` is the effective tokens per minute
    under pressure, as a share of the configured ones. The dashboards show requests per second and latencies.
    """
    reader = Reader(session, top)
    session.out.progress.end()  # the frames replace the progress lines
    if once or (every is None and not sys.stdout.isatty()):
        with _shown(session, live=False) as show:
            show(reader.next_frame())
        return
    with until_interrupted(), _shown(session, live=sys.stdout.isatty()) as show:
        while True:
            show(reader.next_frame())
            time.sleep(every or EVERY_S)


class Reader:
    """Reads frames. If the service stops answering later, each frame repeats the last data and names the problem."""

    def __init__(self, session: Session, top: int) -> None:
        self._session = session
        self._top = top
        self._last: Json | None = None

    def next_frame(self) -> Json:
        """Returns the next frame. Raises CommandError if the first frame can't be read."""
        try:
            live = self._session.client.api_get("live", query={"top": self._top})
        except CommandError as error:
            if self._last is None:
                raise
            return self._last | {"problem": error.message}
        self._last = {**live, "problem": None}
        return self._last


@contextlib.contextmanager
def _shown(session: Session, *, live: bool) -> Iterator[Callable[[Json], None]]:
    """Yields a function that shows frames: as lines of JSON, on one screen, or one after the other."""
    if session.out.form == "json":
        yield lambda frame: _write(json.dumps(frame, ensure_ascii=False) + "\n")
        return
    from rich.live import Live

    from serve_app.cli import live_screen as screen

    url, on_terminal = session.connection.url, sys.stdout.isatty()
    console = screen.new_console(None if on_terminal else PIPE_COLUMNS)
    if not live:
        if on_terminal:
            yield lambda frame: console.print(screen.draw(frame, url, console.width))
        else:
            yield lambda frame: _write(screen.as_text(frame, url, PIPE_COLUMNS) + "\n")
        return
    with Live(console=console, screen=True, auto_refresh=False) as display:
        yield lambda frame: display.update(screen.draw(frame, url, console.width), refresh=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def until_interrupted() -> Iterator[None]:
    """Ends the `with` block quietly on Ctrl-C and SIGTERM. Closes the contexts in it, which restores the terminal."""
    numbers = (signal.SIGINT, signal.SIGTERM)

    def interrupt(number: int, frame: FrameType | None) -> None:
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)  # a second signal must not disturb the cleanup
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
