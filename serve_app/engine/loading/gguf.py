"""Converts a GGUF file to a folder of safetensors once; later starts load that folder."""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from serve_app.contracts.units import GIB
from serve_app.engine.errors import ModelError, first_line
from serve_app.engine.loading import prepared
from serve_app.engine.loading.placement import require_memory
from serve_app.engine.loading.prepared import gguf_slot
from serve_app.engine.loading.progress import Say, quiet_transformers


def converted(gguf_path: Path, cache: Path, say: Say) -> Path:
    """The folder below `cache` with the converted model; the first call converts this version of the file.

    If several processes call it, one converts and the others wait for it. A folder made from an earlier version of the
    same file is removed.

    Raises:
        ModelError: see `convert_gguf`; also if the cache cannot be written.
    """
    path = gguf_path.absolute()
    try:
        slot = gguf_slot(path, cache)
        if slot.path.is_dir():  # complete, because it is renamed into place
            return slot.path
        prepared.make_folder(slot.folder)
        with prepared.only_one(slot.lock, say, path.name):
            # This process has the lock, so these are left over from killed processes.
            for left_over in slot.folder.glob(f".{slot.stem}-*"):
                shutil.rmtree(left_over, ignore_errors=True)
            if not slot.path.is_dir():
                convert_gguf(path, slot.path, say)
                for folder in slot.outdated():
                    shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"Can't keep the converted {path.name} in {cache} ({error.strerror or error}): set cache_dir."
        ) from error
    return slot.path


@contextlib.contextmanager
def _quick_gguf() -> Iterator[None]:
    """Make the gguf package read a file once, into an array, and build its table of names once.

    Without this, transformers opens the file four times and builds the table for every module. The reader slices the
    file several times per token of the vocabulary, and slicing a memory map takes ten times as long as slicing an
    array. Together, this takes half a minute for the bundled model.
    """
    import gguf

    quicker: list[tuple[Any, str, Any]] = [
        (numpy, "memmap", lambda path, dtype=numpy.uint8, mode="r": numpy.fromfile(path, dtype)),
        (gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
        (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ]
    usual = [(module, name, getattr(module, name)) for module, name, _ in quicker]
    for module, name, function in quicker:
        setattr(module, name, function)
    try:
        yield
    finally:
        for module, name, function in usual:
            setattr(module, name, function)


@_quick_gguf()
def convert_gguf(gguf_path: Path, out_dir: Path, progress: Say) -> None:
    """Convert a GGUF file into a folder of safetensors at `out_dir`, which appears only when it is complete.

    Needs as much memory, and as much disk space, as the model's size in float32. Replaces an existing folder at
    `out_dir`.

    Raises:
        ModelError: the file is missing, damaged, too large for memory or disk, or of an unknown architecture.
    """
    if not gguf_path.is_file():
        raise ModelError(f"There is no GGUF file at {gguf_path}.")
    architecture, size = _describe(gguf_path)
    require_memory(size, f"converting {gguf_path.name}", "choose a smaller model, or convert it on a larger machine")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(out_dir.parent).free) < size:
        raise ModelError(
            f"{out_dir.parent} has {free / GIB:.1f} GiB of free disk space, but the converted {gguf_path.name} needs "
            f"{size / GIB:.1f} GiB: free some space, or set cache_dir."
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    work = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        progress(f"Converting {gguf_path.name} ({size / GIB:.1f} GiB as float32), once; this may take minutes")
        # The library has no option to turn off the GGUF reader's progress bar.
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            source = {"gguf_file": gguf_path.name}
            model = AutoModelForCausalLM.from_pretrained(
                gguf_path.parent, dtype="float32", quantization_config=GgufConfig(dequantize=True), **source
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, **source)
            model.save_pretrained(work)
            tokenizer.save_pretrained(work)
        work.chmod(0o755)
        if out_dir.exists():
            shutil.rmtree(out_dir)
        work.rename(out_dir)
        progress(f"The model is ready in {out_dir}")
    except Exception as error:
        raise ModelError(
            f"Can't convert {gguf_path} with the architecture {architecture!r} ({first_line(error)}): "
            "use the model's safetensors instead."
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _describe(gguf_path: Path) -> tuple[str, int]:
    """The file's architecture, and the size of its tensors in float32, in bytes; reads no tensor.

    Raises:
        ModelError: it is not a GGUF file, or it is truncated.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf_path)
        field = reader.get_field("general.architecture")
        size = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    except Exception as error:  # errors of numpy, struct and the reader
        raise ModelError(f"{gguf_path} is damaged or not GGUF ({first_line(error)}): download it again.") from error
    return ("unknown" if field is None else str(field.contents())), size
