"""Plants faults into copies of the tree, one at a time in each, and proves that the tests catch each of them.

`faults.toml` beside this file lists the faults, each with the tests that should catch it. These tests first run without
any fault and must pass. A fault is caught when one of its tests fails. If pytest can't find or import what it should
run, or the planted code names something that does not exist, that is an error and not a catch. The exit status is 0
when all are caught, 1 when one survives, no longer applies or ends in an error, 130 after Ctrl-C. The tree itself is
only read.

Each run is forked from a process that has imported the libraries, and imports the copy's code anew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue

from tests.faults.forked import libraries, run_pytest

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("faults.toml")
LIMIT_S = 600.0  # of one run of pytest, on a busy machine too
AT_ONCE = 2  # copies, in which pytest runs
TAIL = 25  # lines of its output that an error shows
FORKS = multiprocessing.get_context("forkserver")
# With these errors the planted code does not run as intended, so it tests no promise.
BROKEN = re.compile(r"\b(NameError|UnboundLocalError|AttributeError|ImportError|ModuleNotFoundError|TypeError)\b: ")


@dataclass(frozen=True)
class Fault:
    """`before`, which is in `file` once, becomes `after`. With `hangs`, tests that do not end catch it, too."""

    name: str
    what: str
    file: str
    before: str
    after: str
    tests: list[str]
    hangs: bool = False

    def misfit(self) -> str | None:
        """Why it can't be planted; None when it can."""
        if not (ROOT / self.file).is_file():
            return f"there is no {self.file}"
        count = (ROOT / self.file).read_text().count(self.before)
        return None if count == 1 else f"{self.file} has its snippet {count} times, and it must be once"


def read_table() -> list[Fault]:
    return [Fault(name, **entry) for name, entry in tomllib.loads(TABLE.read_text()).items()]


@dataclass(frozen=True)
class Result:
    """The verdict is caught, survived or error; `by` is the test that failed, or what went wrong."""

    name: str
    verdict: str
    by: str
    seconds: float


class Copy:
    """The tracked files of the working tree, in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self._tree, self._scratch, self._output = folder / "tree", folder / "tmp", folder / "output"
        self._scratch.mkdir(parents=True)
        self._child: BaseProcess | None = None
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (self._tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._tree / name)

    def plant(self, fault: Fault) -> Result:
        """Runs the fault's tests with the fault in place, and puts the file back."""
        path = self._tree / fault.file
        sound, times = path.read_text(), path.stat()
        path.write_text(sound.replace(fault.before, fault.after))
        started = time.monotonic()
        try:
            status, output = self.run(fault.tests, keep_compiled=False)
        finally:
            path.write_text(sound)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        verdict, by = judge(fault, status, output)
        return Result(fault.name, verdict, by, round(time.monotonic() - started, 1))

    def run(self, tests: list[str], *, keep_compiled: bool) -> tuple[int | None, str]:
        """Returns pytest's exit status, None when it does not end in time, and its output.

        Python knows a compiled file by its source's time and size alone, so no run with a fault may leave one.
        """
        arguments = (self._tree, self._scratch, self._output, tests, keep_compiled)
        child = self._child = FORKS.Process(target=run_pytest, args=arguments)
        child.start()
        try:
            child.join(LIMIT_S)
            if child.exitcode is None:
                return None, f"pytest did not end in {LIMIT_S:g} s"
            return child.exitcode, self._output.read_text(errors="replace")
        finally:
            self.stop()
            child.join()

    def stop(self) -> None:
        """Ends a run and every process that its tests have started."""
        if self._child is not None and self._child.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)


def judge(fault: Fault, status: int | None, output: str) -> tuple[str, str]:
    """The verdict, and the test or the reason."""
    if status is None:
        return ("caught" if fault.hangs else "error"), output
    if status == 0:
        return "survived", "all of its tests pass"
    failed = re.search(r"^FAILED (.+?)(?: - .*)?$", output, re.MULTILINE)
    if status == 1 and failed and not BROKEN.search(output):
        return "caught", failed[1]
    return "error", f"pytest exits with {status}:\n{tail(output)}"


def tail(output: str) -> str:
    """The end of pytest's output, indented."""
    return "\n".join(f"    {line}" for line in output.rstrip().splitlines()[-TAIL:])


def prove(faults: list[Fault]) -> list[Result] | None:
    """The result of each fault; None if it can't be decided. Prints the progress."""
    misfits = [(fault, why) for fault in faults if (why := fault.misfit()) is not None]
    for fault, why in misfits:
        print(f"{fault.name} no longer applies: {why}")
    if misfits:
        return None
    FORKS.set_forkserver_preload(libraries(ROOT))
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        copies = [Copy(Path(folder) / str(number)) for number in range(min(AT_ONCE, len(faults)))]
        tests = list(dict.fromkeys(test for fault in faults for test in fault.tests))
        print(f"without any fault: {len(tests)} tests or files ...", end=" ", flush=True)
        started = time.monotonic()
        status, output = copies[0].run(tests, keep_compiled=True)
        if status != 0:
            print(f"do not pass, so they prove nothing:\n{tail(output)}")
            return None
        print(f"pass in {time.monotonic() - started:.1f} s", flush=True)
        return _plant_all(faults, copies)


def _plant_all(faults: list[Fault], copies: list[Copy]) -> list[Result]:
    idle: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        idle.put(copy)

    def plant(fault: Fault) -> Result:
        copy = idle.get()
        try:
            return copy.plant(fault)
        finally:
            idle.put(copy)

    results = []
    with ThreadPoolExecutor(len(copies)) as pool:
        try:
            for one in pool.map(plant, faults):
                results.append(one)
                found = f"{one.verdict} by {one.by} in {one.seconds:.1f} s" if one.verdict == "caught" else one.verdict
                print(f"{len(results)}/{len(faults)} {one.name} ... {found}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.stop()
            raise
    return results


def report(results: list[Result]) -> None:
    """The closing table."""
    widest = max(len(one.name) for one in results)
    print()
    for one in results:
        print(f"{one.name:{widest}}  {one.verdict:8}  {one.seconds:5.1f} s  {one.by}")
    caught = sum(one.verdict == "caught" for one in results)
    seconds = sum(one.seconds for one in results)
    print(f"\n{caught} of {len(results)} faults are caught; their runs took {seconds:.0f} s together")


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    faults = read_table()
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="plant these faults alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of each fault to this file, too")
    options = parser.parse_args(arguments)
    if unknown := set(options.only or ()) - {fault.name for fault in faults}:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}: --list names them all")
    chosen = [fault for fault in faults if options.only is None or fault.name in options.only]
    if options.list:
        for fault in chosen:
            print(f"{fault.name}\n    {fault.what}\n    {fault.file}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as after Ctrl-C
    try:
        results = prove(chosen)
    except KeyboardInterrupt:
        print("\nstopped; the copy is gone")
        return 130
    if results is None:
        return 1
    report(results)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
    return 0 if all(one.verdict == "caught" for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
