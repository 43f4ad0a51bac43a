"""`serve-app top`: what the service does now, in the terminal, again and again."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Annotated, Any

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.connection import Connection, check_way
from serve_app.cli.grafana.address import parse_address
from serve_app.cli.live.rates import NoSource, Source
from serve_app.cli.output import CommandError

app = typer.Typer()

EVERY_S = 2.0
PIPE_COLUMNS = 120  # where there is no terminal
Json = dict[str, Any]


@command(
    app,
    "top",
    examples=(
        "serve-app top",
        "serve-app top --prometheus http://127.0.0.1:9090 --cluster prod",
        "serve-app top --once --json",
        "serve-app top --every 10 --json >> live.jsonl",
    ),
)
def show_top(
    session: Session,
    every: Annotated[
        float | None,
        typer.Option(min=0.5, max=3600, metavar="SECONDS", help=f"Between two frames. [{EVERY_S:.0f} on a terminal]"),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="One frame; the default without a terminal, unless --every is given.")
    ] = False,
    top: Annotated[int, typer.Option("--accounts", min=0, max=100, help="The most accounts.")] = 10,
    prometheus: Annotated[
        str | None,
        typer.Option(metavar="URL", envvar="PROMETHEUS_URL", help="Figures of all gateways; may hold user:password@."),
    ] = None,
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="The service's label in Prometheus.")] = None,
    namespace: Annotated[str | None, typer.Option(metavar="NAME", help="The service's label in Prometheus.")] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            envvar="SERVE_APP_METRICS_URL",
            help="Without a Prometheus: an exporter of a machine that gateways run on; may be repeated. "
            "Default: those of the local service.",
        ),
    ] = None,
) -> None:
    """Show what goes on now: requests, refusals, TTFT, queues, KV use, pressure, and the busiest accounts.

    Ctrl-C ends it. `tok/s` of a backend counts prompts too; `limit` is what pressure leaves of the tokens per minute.
    """
    service = {name: value for name, value in (("cluster", cluster), ("namespace", namespace)) if value}
    source = choose_source(session.connection, prometheus, metrics or [], service)
    reader = Reader(session, source, top)
    if once or (every is None and not sys.stdout.isatty()):
        frame = reader.next_frame()
        if source.first_after_s:
            if sys.stderr.isatty():
                sys.stderr.write(f"requests/s and the like come in {source.first_after_s:.0f} s\n")
            time.sleep(source.first_after_s)
            frame = reader.next_frame()
        with _shown(session, live=False) as show:
            show(frame)
        return
    with until_interrupted(), _shown(session, live=sys.stdout.isatty()) as show:
        while True:
            show(reader.next_frame())
            time.sleep(every or EVERY_S)


def choose_source(
    connection: Connection, prometheus: str | None, metrics: Sequence[str], service: Mapping[str, str]
) -> Source:
    """Prometheus if it is named, else exporters that are named, else those of the local service."""
    # Imported here: what is imported above, every command waits for.
    from serve_app.cli.live.exporters import Exporters, local_addresses
    from serve_app.cli.live.prometheus import Prometheus

    if prometheus is not None:
        address = parse_address(prometheus, "--prometheus")
        if address.login is not None:
            check_way(address.url, "the password of Prometheus", connection.insecure)
        return Prometheus(address, service, trust_env=not replace(connection, url=address.url).is_local)
    if metrics:
        given = [parse_address(one, "--metrics") for one in metrics]
        addresses = [one.url if one.prefix else f"{one.url}/metrics" for one in given]
        return Exporters(lambda: addresses, all_count=True, clock=time.monotonic)
    # A service that accepts the key of this state folder is the one that runs on it.
    if connection.is_local and connection.key_is_from_home and local_addresses(connection.home):
        return Exporters(lambda: local_addresses(connection.home), all_count=False, clock=time.monotonic)
    return NoSource()


class Reader:
    """Reads frames. After the first one, a service that does not answer is a problem that the frame names."""

    def __init__(self, session: Session, source: Source, top: int) -> None:
        self._session = session
        self._source = source
        self._top = top
        self._last: Json | None = None

    def next_frame(self) -> Json:
        """Raises CommandError when the first frame can't be read."""
        from serve_app.cli.live.frame import build_frame

        try:
            live = self._session.client.api_get("live", query={"top": self._top})
        except CommandError as error:
            if self._last is None:
                raise
            return self._last | {"problem": error.message}
        self._last = build_frame(live, self._source.read())
        return self._last


@contextlib.contextmanager
def _shown(session: Session, *, live: bool) -> Iterator[Callable[[Json], None]]:
    """Shows frames: as lines of JSON, one over the other on a screen of its own, or one after the other."""
    if session.out.as_json:
        yield lambda frame: _write(json.dumps(frame, ensure_ascii=False) + "\n")
        return
    from rich.live import Live

    from serve_app.cli.live import screen

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
    """Ctrl-C and SIGTERM end the block quietly. What is open in it is closed: the terminal is as it was."""
    numbers = (signal.SIGINT, signal.SIGTERM)

    def interrupt(number: int, frame: FrameType | None) -> None:
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)  # a second one must not disturb the closing
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
