"""A model's folder: what is wrong with it, said in one line before a library fails on it, and what its weights are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, as its file's header tells."""

    name: str
    shape: tuple[int, ...]
    elements: int
    bytes: int


def check(folder: Path) -> None:
    """Find what is wrong with a model folder. Reads the headers of the weights, not the weights.

    Raises:
        ModelError: no folder, no model, an adapter alone, no or damaged or missing weights, no tokenizer.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is neither a folder nor a .gguf file: check the setting 'model'.")
    if not (folder / "config.json").is_file():
        raise ModelError(_no_config(folder))
    config = _read_json(folder / "config.json")
    if not config.get("model_type"):
        raise ModelError(f"{folder / 'config.json'} names no model_type: it is not a transformers model's.")
    for path in weight_files(folder):
        _check_file(path)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ModelError(f"{folder} has no tokenizer: put the model's tokenizer.json and tokenizer_config.json there.")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights: those of the index if there is one, else the only one.

    Raises:
        ModelError: there are none, or the index names one that is missing.
    """
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    if (folder / INDEX).is_file():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / INDEX} has no weight_map: fetch it again.")
        names = sorted({str(name) for name in weight_map.values()})
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(
                f"{folder} lacks {missing[0]}, and {len(missing)} of its {len(names)} files of weights in all: "
                "fetch the model again."
            )
        return [folder / name for name in names]
    raise ModelError(_no_weights(folder))


def stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    """What the weights' files hold, from their headers.

    Raises:
        ModelError: as `weight_files`.
    """
    for path in weight_files(folder):
        with path.open("rb") as file:  # the format: eight bytes of length, then JSON
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, about in header.items():
            if name == "__metadata__":
                continue
            shape, (begin, end) = tuple(about["shape"]), about["data_offsets"]
            elements = 1
            for size in shape:
                elements *= size
            yield StoredTensor(name, shape, elements, end - begin)


def identity_files(folder: Path) -> list[Path]:
    """The files that a model's weights and shape depend on."""
    index = [folder / INDEX] if (folder / INDEX).is_file() else []
    return [folder / "config.json", *index, *weight_files(folder)]


def _no_config(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return (
            f"{folder} holds an adapter (LoRA) without its base model: merge the two "
            "(peft's merge_and_unload) and name the merged folder."
        )
    found = sorted(path.name for path in folder.glob("*.gguf"))
    if found:
        return f"{folder} holds a GGUF file: name the file itself, model: {folder / found[0]}."
    return f"{folder} is not a model folder: it has no config.json."


def _no_weights(folder: Path) -> str:
    if any(path for pattern in _PICKLED for path in folder.glob(pattern)):
        return (
            f"{folder} has pickled weights only (.bin, .pt), which can run code when they are read: "
            "save the model as safetensors (save_pretrained) and name that folder."
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
        raise ModelError(f"{path} is damaged or cut short ({error}): fetch it again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read ({' '.join(str(error).split())}): fetch it again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object: fetch it again.")
    return content
