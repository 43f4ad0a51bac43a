"""Reports the progress of a long load as a few lines, instead of transformers' and accelerate's progress bars."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Say = Callable[[str], None]  # receives one line at a time, for a log or a terminal


class Progress:
    """Sends a line `what: 40 %` every ten percent, at most once a second and at least every ten seconds.

    Work that ends within the first second sends nothing. `total` is in any unit, above 0; `clock` returns seconds.
    """

    def __init__(self, say: Say, what: str, total: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._what = what
        self._total = max(total, 1e-9)
        self._clock = clock
        self._sent_at = clock()
        self._sent = 0  # percent in the last line

    def at(self, done: float, total: float | None = None) -> None:
        """Record that `done` of the total is done, and send a line if it is due, but none at 100 %.

        If `total` is given, it replaces the total.
        """
        if total is not None:
            self._total = max(total, 1e-9)
        now, percent = self._clock(), min(int(100 * done / self._total), 100)
        silent = now - self._sent_at
        if percent < 100 and (silent >= 10.0 or (silent >= 1.0 and percent - self._sent >= 10)):
            self._say(f"{self._what}: {percent} %")
            self._sent_at, self._sent = now, percent


@contextlib.contextmanager
def quiet_transformers(say: Say | None = None, what: str = "") -> Iterator[None]:
    """Keep transformers' progress bars and warnings out of the output; errors still show.

    With `say`, its loading bars become lines such as `what: 40 %`. Only one thread of a process may use this at a time,
    because the library's switches are global.
    """
    from transformers.utils import logging as library

    def count(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        items = args[0] if args else options.get("iterable")
        if say is None or items is None:
            return library.EmptyTqdm(*args, **options)
        return _Counted(items, Progress(say, what, options.get("total") or len(items)))

    verbosity, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    accelerate = logging.getLogger("accelerate")
    accelerate_level = accelerate.level
    library.set_verbosity_error()
    accelerate.setLevel(logging.ERROR)
    library.disable_progress_bar()
    previous = library.set_tqdm_hook(count)
    try:
        yield
    finally:
        library.set_tqdm_hook(previous)
        library.set_verbosity(verbosity)
        accelerate.setLevel(accelerate_level)
        if bars:
            library.enable_progress_bar()


class _Counted:
    """Replaces a progress bar: passes the items on and reports their number."""

    def __init__(self, items: Iterable[Any], progress: Progress) -> None:
        self._items = items
        self._progress = progress

    def __iter__(self) -> Iterator[Any]:
        for done, item in enumerate(self._items):
            self._progress.at(done)
            yield item

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: None  # all other methods of a bar do nothing
