"""Shutting down ends all processes of the driver in time, stubborn and orphaned ones too."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from argparse import Namespace
from pathlib import Path

import psutil
import pytest
from ray._common.utils import try_to_create_directory

from serve_app.launch.__main__ import Launch
from serve_app.launch.driver import Driver, driver_environment
from serve_app.launch.preflight import free_port

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


ADOPTER = """
import subprocess, sys, time
from pathlib import Path
from serve_app.launch.driver import Driver, become_subreaper
become_subreaper()
driver = Driver([sys.executable, "-c", sys.argv[1]], {**__import__("os").environ}, Path(sys.argv[2]))
while driver.exit_code() is None and not Path(sys.argv[2]).read_text().startswith("reaped"):
    time.sleep(0.02)
driver.shut_down(2.0, lambda text: None)
"""

# Starts an orphan that ends at once, and waits until nothing is left of it, as of the engine of a killed replica.
LOSER = """
import subprocess, time
from pathlib import Path
orphan = subprocess.run(["sh", "-c", "true & echo $!"], capture_output=True, text=True, check=True).stdout.strip()
while Path("/proc", orphan).exists():
    time.sleep(0.02)
print("reaped", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_an_orphan_that_ends_while_the_service_runs_leaves_no_entry_in_the_process_table(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(ADOPTER), LOSER, str(tmp_path / "log")]
    subprocess.run(command, timeout=60, check=True)
    assert (tmp_path / "log").read_text() == "reaped\n"


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


def test_only_their_owner_reads_the_files_of_a_drivers_processes(tmp_path: Path) -> None:
    program = "import subprocess, sys; subprocess.run(['touch', sys.argv[1]], check=True)"
    before = os.umask(0)
    try:
        driver = Driver([sys.executable, "-c", program, str(tmp_path / "made")], {**os.environ}, tmp_path / "log")
        while driver.exit_code() is None:
            time.sleep(0.02)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o600


def test_rays_folder_is_in_one_that_only_this_user_can_enter(tmp_path: Path) -> None:
    """Ray opens its own folder to everybody."""
    run = Path(tempfile.mkdtemp(prefix="sa-", dir=tmp_path))
    options = Namespace(home=tmp_path, port="8000", ready_timeout=None, tls=False, num_cpus=4)
    launch = Launch(options)
    launch.metrics_port, launch.dashboard_port = 1, None
    command = launch._driver_command(tmp_path / "config.yaml", run)
    folder = Path(command[command.index("--temp-dir") + 1])
    try_to_create_directory(str(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777
    assert folder.parent == run
    assert stat.S_IMODE(run.stat().st_mode) == 0o700


def test_all_sockets_of_a_run_are_in_its_folder_and_their_paths_are_short_enough(tmp_path: Path) -> None:
    environment = driver_environment(tmp_path / "home", tmp_path, free_port())
    for name in ("HAPROXY_SOCKET_PATH", "HAPROXY_METRICS_SOCKET_PATH", "HAPROXY_CONFIG_FILE_LOC"):
        path = Path(environment[f"RAY_SERVE_{name}"])
        assert path.parent == tmp_path / "ha"
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        # Serve adds the id of the node, HAProxy a suffix while it replaces its own socket.
        assert len(f"/tmp/sa-12345678/{path.relative_to(tmp_path)}/{'0' * 56}.12345678.tmp") <= 107


def test_rays_processes_listen_on_this_machine_alone(tmp_path: Path) -> None:
    environment = driver_environment(tmp_path / "home", tmp_path, free_port())
    program = "from ray._private.services import get_node_ip_address; print(get_node_ip_address())"
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "127.0.0.1"
