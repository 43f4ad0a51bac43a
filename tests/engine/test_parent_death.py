"""A child of `multiprocessing` that ends with its parent, also when either is stopped or killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60
# A process, its child and its grandchild, each of which prints its process id. The last one is stopped.
PROGRAM = """
import multiprocessing, os, signal, threading
from serve_app.engine.vllm_adapter.parent_death import end_with_parent

def run(left):
    end_with_parent()
    print(os.getpid(), flush=True)
    if left:
        multiprocessing.get_context("spawn").Process(target=run, args=(left - 1,)).start()
        threading.Event().wait()
    os.kill(os.getpid(), signal.SIGSTOP)

if __name__ == "__main__":
    run(2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is of Linux")
def test_children_and_grandchildren_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    try:
        _, *others = [int(process.stdout.readline()) for _ in range(3)]
        ends = [os.pidfd_open(other) for other in others]
        process.kill()
        process.wait()
        for end in ends:
            assert select.select([end], [], [], PATIENCE_S)[0], "it lives on"
            os.close(end)
    finally:
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is of Linux")
def test_a_child_whose_parent_has_ended_already_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    parent = type("Parent", (), {"pid": os.getppid() + 1})
    monkeypatch.setattr("multiprocessing.parent_process", lambda: parent)
    monkeypatch.setattr("ctypes.CDLL", lambda _: type("Kernel", (), {"prctl": lambda *_: 0})())
    monkeypatch.setattr("os.kill", lambda *call: killed.append(call))
    from serve_app.engine.vllm_adapter.parent_death import end_with_parent

    end_with_parent()
    assert killed == [(os.getpid(), signal.SIGKILL)]
