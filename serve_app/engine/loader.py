"""Gets a model into memory: from a folder, from the hub, or from a GGUF file converted once."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError

logger = logging.getLogger(__name__)

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its tokenizer, and the tokens that end a reply."""

    model: Any
    tokenizer: Any
    eos_token_ids: frozenset[int]


def load(settings: EngineSettings) -> LoadedModel:
    """Load the model that the settings name and place it by `device_map`.

    Raises:
        ModelError: the path is missing, no model, damaged, or there is too little memory; one line, with the remedy.
    """
    name = settings.model
    folder = Path(name).expanduser()
    if folder.exists():
        _check_folder(folder)
        check_memory(folder, settings)
        name = str(folder)
    elif folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"There is no model at {folder}: check the setting 'model'.")
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            model = AutoModelForCausalLM.from_pretrained(
                name, dtype=getattr(torch, settings.dtype), device_map=settings.device_map
            )
        except Exception as error:
            raise ModelError(f"Can't load the model {name}: {_first_line(error)}") from error
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(
            f"The model {name} does not fit the devices of {settings.device_map!r}: use more or larger ones."
        )
    if tokenizer.chat_template is None:
        raise ModelError(f"The model {name} has no chat template: choose a chat or instruct model.")
    return LoadedModel(model, tokenizer, _eos_token_ids(model, tokenizer))


def check_memory(folder: Path, settings: EngineSettings, available: int | None = None) -> None:
    """Refuse a model whose weights and KV cache can't fit into this machine's memory.

    `available` is in bytes, by default what the system has free now. Only models placed on the CPU are checked;
    accelerate plans the others against each device's memory.

    Raises:
        ModelError: what is there, what is needed, and which setting to lower.
    """
    if settings.device_map != "cpu":
        return
    # Files hold 2 bytes per weight as a rule; loading as float32 doubles them.
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    widen = torch.finfo(getattr(torch, settings.dtype)).bits / _stored_bits(folder)
    needed = int(stored * widen) + settings.kv_cache_memory
    there = available_memory() if available is None else available
    if needed > there:
        raise ModelError(
            f"Too little memory: {there / _GIB:.1f} GiB are available, {needed / _GIB:.1f} GiB are needed "
            f"({stored * widen / _GIB:.1f} for the weights of {folder.name}, "
            f"{settings.kv_cache_memory / _GIB:.1f} for kv_cache_memory): "
            f"lower kv_cache_memory or choose a smaller model."
        )


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still take: of the machine, or of its container's limit if that is less."""
    free = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        # Cached files count as used but give way, as in Kubernetes' own measure of a working set.
        return min(free, max(0, limit - used + int(stat.get("inactive_file", 0))))
    except (OSError, ValueError):  # no cgroup v2, or no limit
        return free


def convert_gguf(gguf_path: Path, out_dir: Path, progress: Callable[[str], None]) -> None:
    """Convert a GGUF file into a folder of safetensors at `out_dir`, which appears only when it is complete.

    Needs the model's size in float32 as memory and disk. A folder already at `out_dir` is replaced.

    Raises:
        ModelError: the file is missing, damaged or of an architecture that transformers does not read.
    """
    if not gguf_path.is_file():
        raise ModelError(f"There is no GGUF file at {gguf_path}.")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    out_dir.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        progress(f"Converting {gguf_path.name}, once; this takes up to a minute")
        # The GGUF reader draws a progress bar that no switch of the library turns off.
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            source = {"gguf_file": gguf_path.name}
            model = AutoModelForCausalLM.from_pretrained(
                gguf_path.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **source
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, **source)
            model.save_pretrained(work)
            tokenizer.save_pretrained(work)
        work.chmod(0o755)
        if out_dir.exists():
            shutil.rmtree(out_dir)
        work.rename(out_dir)
        progress(f"The model is ready in {out_dir}")
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"Can't convert {gguf_path}: {_first_line(error)}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and warnings out of the service's output; errors still show."""
    from transformers.utils import logging as library

    verbosity, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(verbosity)
        if bars:
            library.enable_progress_bar()


def _check_folder(folder: Path) -> None:
    """Find what is wrong with a model folder before transformers does, and say it in one line."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is a file: name the folder, or convert a GGUF file with convert_gguf first.")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json.")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ModelError(f"{folder} has no weights: no *.safetensors file is there.")
    from safetensors import SafetensorError, safe_open

    for path in weights:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged or cut short ({error}): fetch it again.") from error


def _stored_bits(folder: Path) -> int:
    from safetensors import safe_open

    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 -- not a dict
                return {"F32": 32, "F16": 16, "BF16": 16}.get(file.get_slice(name).get_dtype(), 8)
    return 32


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    ids = getattr(model.generation_config, "eos_token_id", None)
    own = ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in (*own, tokenizer.eos_token_id) if i is not None)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


# Tokenizers run in the caller's thread here; the library's own pool would fight torch's for the cores.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
