"""Compiles the native decoder for this machine, once, and binds it.

The library is kept in a cache folder, named after its sources, the compiler and the processor's features: another
machine or another version compiles its own. OpenMP's threads are torch's own, since both load the same runtime.
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


class Matrix(ctypes.Structure):
    """`Matrix` of int8_matmul.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_int32),
        ("in_", ctypes.c_int32),
    )


class Shape(ctypes.Structure):
    """`Shape` of decoder.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in (
                "layers",
                "hidden",
                "heads",
                "kv_heads",
                "head_dim",
                "intermediate",
                "vocab",
                "num_blocks",
                "block_size",
            )
        ),
        ("norm_eps", ctypes.c_float),
    )


class Layer(ctypes.Structure):
    """`Layer` of decoder.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "q_norm", "k_norm", "post_norm")),
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
        ("cache", ctypes.c_void_p),
        ("window", ctypes.c_int32),
    )


class Span(ctypes.Structure):
    """`Span` of decoder.cpp."""

    _fields_ = (("table", ctypes.c_void_p), *((name, ctypes.c_int32) for name in ("row", "tokens", "position")))


class Step(ctypes.Structure):
    """`Step` of decoder.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ids", "rope_rows", "spans", "keep", "logits")),
        *((name, ctypes.c_int32) for name in ("rows", "num_spans", "kept", "threads")),
    )


class Draw(ctypes.Structure):
    """`Draw` of draw.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "peaks", "sums", "steepness", "uniform", "tokens", "drawn")),
        *((name, ctypes.c_int64) for name in ("rows", "blocks")),
        ("least", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


def prepare(folder: Path, progress: Callable[[str], None]) -> None:
    """Compile ahead of time, into `folder`, what `load` will look for; does nothing if it is there or can't be made."""
    try:
        path = folder / _name(_compiler(), "native")
        if not path.is_file():
            progress("Compiling the engine's kernels for this processor, once; this takes some seconds")
            _compile(_compiler(), "native", path)
    except _FAILURES as error:
        progress(_explain(error))


@functools.cache
def load(folder: Path, architecture: str = "native") -> ctypes.CDLL | None:
    """The compiled library, compiling it into `folder` first if need be; None, with one line in the log, where that
    can't be done.

    `architecture` is what the compiler's `-march` takes; any but `native` is for tests.
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
    """No C++ compiler is on this machine."""


_FAILURES = (NoCompiler, OSError, subprocess.SubprocessError)


def _explain(error: Exception) -> str:
    if isinstance(error, NoCompiler):
        return "No C++ compiler is here: int8 runs through torch, several times slower (install g++)."
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
    # Under a name of its own, then moved: two processes that compile at once don't disturb each other.
    handle, made = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        command = [compiler, *_FLAGS.split(), f"-march={architecture}", "-o", made, str(_HERE / "decoder.cpp")]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        Path(made).replace(path)
    finally:
        Path(made).unlink(missing_ok=True)


def _name(compiler: str, architecture: str) -> str:
    """The library's file name; it changes with the sources, the flags, the compiler and the processor's features."""
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
    library.native_isa.restype = ctypes.c_char_p
    library.native_packed_size.restype = ctypes.c_int64
    library.native_packed_size.argtypes = [ctypes.c_int32, ctypes.c_int32]
    library.native_pack.restype = None
    library.native_pack.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p]
    library.native_decoder.restype = ctypes.c_void_p
    library.native_decoder.argtypes = [ctypes.c_void_p] * 7
    library.native_run.restype = None
    library.native_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.native_draw.restype = None
    library.native_draw.argtypes = [ctypes.c_void_p]
    library.native_free.restype = None
    library.native_free.argtypes = [ctypes.c_void_p]
    return library
