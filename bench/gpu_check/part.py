"""Runs one part in this process: `python -m bench.gpu_check.part MODULE RESULT OPTIONS`. `parts.run_part` starts it."""

from __future__ import annotations

import faulthandler
import importlib
import json
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Skip(Exception):
    """The part cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Options:
    """The options of the command line and the part's time limit."""

    device: str  # cpu, or cuda:0
    shapes: tuple[str, ...]  # model shapes, the smallest first
    work: Path  # folder for files that only this run needs
    limit_s: float

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def dtype(self) -> str:
        """The type in which throughput is measured."""
        return "bfloat16" if self.on_gpu else "float32"


class Report:
    """The part's result so far. Figures are written immediately, so those of a killed part remain."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.monotonic()
        self._state: dict[str, Any] = {"figures": {}}
        self._problems: list[str] = []

    def doing(self, text: str) -> None:
        """Records the current step."""
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)
        self._state["doing"] = text
        self._write()

    def add(self, **figures: Any) -> None:
        """Adds figures. A mapping is merged into the mapping of the same name."""
        known = self._state["figures"]
        for name, value in figures.items():
            known[name] = {**known[name], **value} if isinstance(value, dict) and name in known else value
        print(json.dumps(figures), flush=True)
        self._write()

    def problem(self, text: str) -> None:
        """Records a failure. The part continues."""
        print(f"PROBLEM: {text}", flush=True)
        self._problems.append(text)

    @property
    def figures(self) -> dict[str, Any]:
        """Everything reported so far."""
        return dict(self._state["figures"])

    def end(self, outcome: str | None = None, reason: str | None = None) -> None:
        """Writes the outcome. The default is `failed` if there are problems, else `passed`."""
        self._state["outcome"] = outcome or ("failed" if self._problems else "passed")
        self._state["reason"] = "; ".join([*self._problems, *([reason] if reason else [])]) or None
        self._write()

    def _write(self) -> None:
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps(self._state))
        draft.replace(self._path)


def main(module: str, result: str, given: str) -> None:
    """Runs the part and writes its result."""
    choices = json.loads(given)
    options = Options(choices["device"], tuple(choices["shapes"]), Path(choices["work"]), choices["limit_s"])
    faulthandler.enable()
    if options.limit_s > 6:  # logs the stack of a part that hangs
        faulthandler.dump_traceback_later(options.limit_s - 3)
    signal.alarm(int(options.limit_s) + 15)  # ends this process if the parent was killed
    report = Report(Path(result))
    try:
        importlib.import_module(module).run(options, report)
    except Skip as reason:
        report.end("skipped", str(reason))
    except Exception as error:
        traceback.print_exc()
        report.end("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    else:
        report.end()


if __name__ == "__main__":
    from bench.gpu_check import part  # parts import this module by name, so its classes must not come from __main__

    part.main(*sys.argv[1:])
