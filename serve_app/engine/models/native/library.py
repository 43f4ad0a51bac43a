"""Compiles the native decoder once for this machine, and binds it.

The library is stored in a cache folder under a name that depends on its sources, the compiler and the processor's
features, so another machine or version compiles separately. It shares torch's OpenMP threads, because both load the
same runtime.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_FLAGS = "-std=c++17 -O3 -fopenmp -fno-math-errno -fno-trapping-math -ffp-contract=fast -Wno-psabi -shared -fPIC"
_COMPILE_S = 300


def _each(kind: type, names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in names.split())


class Matrix(ctypes.Structure):
    """`Matrix` of int8_matmul.h."""

    _fields_ = (*_each(ctypes.c_void_p, "panels scales bias"), *_each(ctypes.c_int32, "out in_"))


class Shape(ctypes.Structure):
    """`Shape` of decoder.cpp."""

    _fields_ = (
        *_each(ctypes.c_int32, "layers hidden heads kv_heads head_dim intermediate vocab num_blocks block_size"),
        ("norm_eps", ctypes.c_float),
    )


class Layer(ctypes.Structure):
    """`Layer` of decoder.cpp."""

    _fields_ = (
        *_each(ctypes.c_void_p, "input_norm q_norm k_norm post_norm"),
        *_each(Matrix, "qkv output gate_up down"),
        ("cache", ctypes.c_void_p),
        ("window", ctypes.c_int32),
    )


class Span(ctypes.Structure):
    """`Span` of decoder.cpp."""

    _fields_ = (("table", ctypes.c_void_p), *_each(ctypes.c_int32, "row tokens position"))


class Step(ctypes.Structure):
    """`Step` of decoder.cpp."""

    _fields_ = (
        *_each(ctypes.c_void_p, "ids rope_rows spans keep logits"),
        *_each(ctypes.c_int32, "rows num_spans kept threads"),
    )


class Draw(ctypes.Structure):
    """`Draw` of draw.h."""

    _fields_ = (
        *_each(ctypes.c_void_p, "logits peaks sums steepness uniform tokens drawn"),
        *_each(ctypes.c_int64, "rows blocks"),
        ("least", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


def prepare(folder: Path, progress: Callable[[str], None]) -> None:
    """Compile the library of `load` into `folder` if it is missing. If that fails, send a line to `progress`."""
    try:
        path = folder / _name(_compiler(), "native")
        if not path.is_file():
            progress("Compiling the engine's kernels for this processor, once; this takes some seconds")
            _compile(_compiler(), "native", path)
    except _FAILURES as error:
        progress(_explain(error))


@functools.cache
def load(folder: Path, architecture: str = "native") -> ctypes.CDLL | None:
    """The library, compiled into `folder` if it is missing; None, with one line in the log, if that fails.

    `architecture` is the compiler's `-march`; values other than `native` are for tests.
    """
    import torch  # noqa: F401 -- loads the OpenMP runtime that the library then shares

    try:
        path = folder / _name(_compiler(), architecture)
        if not path.is_file():
            _compile(_compiler(), architecture, path)
        return _bind(ctypes.CDLL(str(path)))
    except _FAILURES as error:
        logger.warning("%s", _explain(error))
        return None


class NoCompiler(Exception):
    """This machine has no C++ compiler."""


_FAILURES = (NoCompiler, OSError, subprocess.SubprocessError)


def _explain(error: Exception) -> str:
    if isinstance(error, NoCompiler):
        return "No C++ compiler found: int8 runs through torch, several times slower (install g++)."
    output = getattr(error, "stderr", None) or str(error)
    last = (str(output).strip().splitlines() or ["unknown error"])[-1]
    return f"The native decoder can't be used: int8 runs through torch, several times slower ({last})."


def _compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NoCompiler
    return compiler


def _compile(compiler: str, architecture: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Compiled under a temporary name, then moved, because two processes may compile at the same time.
    handle, made = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        command = [compiler, *_FLAGS.split(), f"-march={architecture}", "-o", made, str(_HERE / "decoder.cpp")]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        Path(made).replace(path)
    finally:
        Path(made).unlink(missing_ok=True)


def _name(compiler: str, architecture: str) -> str:
    """The library's file name, which depends on sources, flags, compiler and processor features."""
    digest = hashlib.sha256()
    for source in sorted([*_HERE.glob("*.h"), *_HERE.glob("*.cpp")]):
        digest.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True, timeout=30).stdout
    for part in (_FLAGS, architecture, version, platform.machine(), _processor_features()):
        digest.update(part.encode())
    return f"decoder-{digest.hexdigest()[:20]}.so"


def _processor_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _bind(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, int32 = ctypes.c_void_p, ctypes.c_int32
    signatures: dict[str, tuple[type | None, list[type]]] = {
        "native_isa": (ctypes.c_char_p, []),
        "native_lanes": (int32, []),
        "native_packed_size": (ctypes.c_int64, [int32, int32]),
        "native_pack": (None, [pointer, int32, int32, pointer]),
        "native_decoder": (pointer, [pointer] * 7),
        "native_run": (None, [pointer, pointer]),
        "native_draw": (None, [pointer]),
        "native_free": (None, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
