"""Transformers' and accelerate's bars and warnings kept out of the service's output; progress is told as lines."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from serve_app.engine.loading.progress import Progress, Say


@contextlib.contextmanager
def quiet_transformers(say: Say | None = None, what: str = "") -> Iterator[None]:
    """Keep transformers' bars and warnings out of the output; errors still show.

    With `say`, what its loading bars count is told as `what: 40 %`. One at a time in a process: the switches are
    global.
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
    """In the place of a progress bar: passes the items on, and says how many have passed."""

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
        """All other methods of a bar do nothing here."""
        return lambda *args, **options: None
