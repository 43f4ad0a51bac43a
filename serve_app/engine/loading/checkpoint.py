"""Checks a model's folder, with one-line errors, before a library loads it. Computes the model's fingerprint."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, Final, NamedTuple

from serve_app import __version__
from serve_app.engine.errors import ModelError

INDEX = "model.safetensors.index.json"

_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")

_SAMPLES: Final = 16  # samples per file, evenly spread: enough to tell models apart, as fine-tuning changes all weights
_SAMPLE_BYTES: Final = 64 * 1024
_BESIDE_WEIGHTS: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def check(folder: Path) -> None:
    """Check a model folder. Reads only the headers of the weights.

    Raises:
        ModelError: no folder, no model, only an adapter, missing or damaged weights, or no tokenizer.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is neither a folder nor a .gguf file: check the setting 'model'.")
    if not (folder / "config.json").is_file():
        raise ModelError(_no_config(folder))
    config = _read_json(folder / "config.json")
    if not config.get("model_type"):
        raise ModelError(f"{folder / 'config.json'} has no model_type: use the folder of a transformers model.")
    for path in weight_files(folder):
        _check_file(path)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ModelError(f"{folder} has no tokenizer: put the model's tokenizer.json and tokenizer_config.json there.")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files with the weights: the single file, or else the files in the index.

    Raises:
        ModelError: there are none, or the index names a missing file.
    """
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    if (folder / INDEX).is_file():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / INDEX} has no weight_map: download it again.")
        names = sorted({str(name) for name in weight_map.values()})
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(
                f"{folder} lacks {missing[0]} (in total, {len(missing)} of its {len(names)} weight files are missing): "
                "fetch the model again."
            )
        return [folder / name for name in names]
    raise ModelError(_no_weights(folder))


class Tensor(NamedTuple):
    """A tensor of a weight file, from the file's header."""

    dtype: str  # as the file names it: BF16, F32, I32
    elements: int
    num_bytes: int


def tensors(folder: Path) -> dict[str, Tensor]:
    """Each tensor in the weight files by name, from their headers.

    Raises:
        ModelError: see `weight_files`.
    """
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with path.open("rb") as file:  # eight bytes of length, then JSON
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                found[name] = Tensor(tensor["dtype"], math.prod(tensor["shape"]), end - begin)
    return found


def tensor_sizes(folder: Path) -> dict[str, int]:
    """The number of elements of each tensor in the weight files. Raises ModelError; see `weight_files`."""
    return {name: tensor.elements for name, tensor in tensors(folder).items()}


def identity_files(folder: Path) -> list[Path]:
    """The files that determine a model's weights and shape."""
    index = [folder / INDEX] if (folder / INDEX).is_file() else []
    return [folder / "config.json", *index, *weight_files(folder)]


def fingerprint(folder: Path, dtype: str) -> str:
    """Twelve hex digits that identify everything that affects replies: weights, tokenizer, template, type, release.

    The same files give the same fingerprint on every machine. Only samples of large files are read, so weights that
    differ in only a few places may have the same fingerprint.

    Raises:
        ModelError: see `weight_files`.
        OSError: a file is missing.
    """
    digest = hashlib.sha256(f"{__version__} {dtype}".encode())
    others = [folder / name for name in _BESIDE_WEIGHTS if (folder / name).is_file()]
    for path in [*identity_files(folder), *others]:
        size = path.stat().st_size
        digest.update(f"\0{path.name} {size}\0".encode())
        with path.open("rb") as file:
            if size <= _SAMPLES * _SAMPLE_BYTES:
                digest.update(file.read())
                continue
            for sample in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]


def _no_config(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return (
            f"{folder} holds an adapter (LoRA) without its base model: merge the two (peft's merge_and_unload) "
            "and set 'model' to the merged folder."
        )
    found = sorted(path.name for path in folder.glob("*.gguf"))
    if found:
        return f"{folder} holds a GGUF file: set 'model' to the file itself, {folder / found[0]}."
    return f"{folder} is not a model folder: it has no config.json."


def _no_weights(folder: Path) -> str:
    if any(path for pattern in _PICKLED for path in folder.glob(pattern)):
        return (
            f"{folder} has only pickled weights (.bin, .pt), which can run code when they are read: "
            "save the model as safetensors (save_pretrained) and set 'model' to that folder."
        )
    if other := sorted(path.name for path in folder.glob("*.safetensors")):
        return (
            f"{folder} has {other[0]}, but neither model.safetensors nor {INDEX}: "
            "rename the file, or fetch the missing index."
        )
    return f"{folder} has no weights: no *.safetensors file is there."


def _check_file(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):  # compares the header with the file's length
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or cut short ({error}): download it again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot read {path} ({' '.join(str(error).split())}): download it again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object: download it again.")
    return content
