"""Shutting down ends all processes of the driver in time, stubborn and orphaned ones too."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil

# The driver starts a child that ignores stop signals, and one whose parent exits at once.
DRIVER = """
import signal, subprocess, sys, time
stubborn = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)]; " \\
    "print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
child.stdout.readline()
subprocess.run(["sh", "-c", "sleep 600 & echo $!"], stdout=open(sys.argv[1] + ".orphan", "w"))
open(sys.argv[1], "w").write(str(child.pid))
signal.pause()
"""

# A launcher of its own process, as a subreaper takes in every orphan of the process it is.
LAUNCHER = """
import sys, time
from pathlib import Path
from serve_app.launch.driver import Driver, become_subreaper
become_subreaper()
pid_file = Path(sys.argv[1])
driver = Driver([sys.executable, "-c", sys.argv[2], str(pid_file)], {**__import__("os").environ}, Path(sys.argv[3]))
while not pid_file.exists() or not pid_file.read_text():
    time.sleep(0.02)
driver.shut_down(2.0, lambda text: None)
"""


def test_no_process_of_the_driver_is_left(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-c", textwrap.dedent(LAUNCHER), str(pid_file), DRIVER, str(tmp_path / "log")]
    subprocess.run(command, timeout=120, check=True)
    for pid in (int(pid_file.read_text()), int((tmp_path / "pid.orphan").read_text())):
        assert has_ended(pid)


def has_ended(pid: int) -> bool:
    """Waits for the end of a process that is no child, as long as a slow machine may take."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        psutil.Process(pid).wait(60)
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_driver_stops_when_its_launcher_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    launcher = """
import os, sys, time
from pathlib import Path
from serve_app.launch.driver import Driver
driver = Driver([sys.executable, "-c", sys.argv[2], sys.argv[1]], {**os.environ}, Path(sys.argv[1] + ".log"))
while not Path(sys.argv[1]).exists() or not Path(sys.argv[1]).read_text():
    time.sleep(0.02)
os.kill(os.getpid(), 9)
"""
    driver = "import os, signal, sys; open(sys.argv[1], 'w').write(str(os.getpid())); signal.pause()"
    result = subprocess.run([sys.executable, "-c", launcher, str(pid_file), driver], timeout=120, check=False)
    assert result.returncode == -9
    assert has_ended(int(pid_file.read_text()))
    assert os.path.exists(str(pid_file) + ".log")
