"""Stores int8 weights in a file: quantized once, then mapped into memory by every replica on the machine.

The file is safetensors, so reading it cannot run code. Its metadata holds the format's version, the identity of the
model's files and a CRC-32 of each tensor. It is renamed into place when complete. Replicas that map it share its pages.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import torch

from serve_app.contracts.units import GIB
from serve_app.engine.errors import first_line
from serve_app.engine.loading import prepared
from serve_app.engine.loading.prepared import INT8_FORMAT
from serve_app.engine.loading.progress import Progress, Say
from serve_app.engine.models.llama_weights import LlamaLayer, LlamaShape, LlamaWeights
from serve_app.engine.models.quantize import Int8Weight

_PARTS = tuple(part.name for part in fields(LlamaLayer))
_OPTIONAL = frozenset({"qkv_bias", "q_norm", "k_norm", "output_bias"})
_MATRICES = frozenset({"qkv", "output", "gate_up", "down"})


class Unusable(Exception):
    """The cache file cannot be used; the message names the reason."""


def load_or_build(
    slot: prepared.Slot, shape: LlamaShape, device: torch.device, build: Callable[[], LlamaWeights], say: Say
) -> LlamaWeights:
    """The weights from the slot's file, which is built first if it is missing, damaged or from another model.

    If several processes call it, one builds and the others wait and read. If the file cannot be written, the built
    weights are returned, and `say` receives a line about it.
    """
    if slot.path.is_file():
        try:
            return read(slot, shape, device, say)
        except Unusable as error:
            say(f"The prepared weights in {slot.path} are not used ({error}): preparing them again")
    with contextlib.ExitStack() as stack:
        try:
            prepared.make_folder(slot.folder)
            stack.enter_context(prepared.only_one(slot.lock, say, "the int8 weights"))
        except OSError as error:
            say(
                f"Int8 weights can't be kept in {slot.folder} ({error.strerror}), so each start prepares them: "
                "set cache_dir to a folder that can be written"
            )
            return to_device(build(), device)
        # This process has the lock, so these are left over from killed processes.
        for left_over in slot.folder.glob(f".{slot.stem}-writing-*"):
            left_over.unlink(missing_ok=True)
        if slot.path.is_file():  # written by another process in the meantime, or still unusable
            with contextlib.suppress(Unusable):
                return read(slot, shape, device, say)
        weights = build()
        try:
            write(slot, weights)
        except OSError as error:
            say(f"Int8 weights can't be kept in {slot.folder} ({first_line(error)}), so each start prepares them")
            return to_device(weights, device)
        for path in slot.outdated():
            path.unlink(missing_ok=True)
        del weights  # replaced by the mapped file, so that processes share the pages
        total = sum(path.stat().st_size for path in slot.folder.rglob("*") if path.is_file())
        say(
            f"Int8 weights are ready in {slot.path} ({slot.path.stat().st_size / GIB:.2f} GiB; "
            f"{total / GIB:.2f} GiB in total in that folder)"
        )
        try:
            return read(slot, shape, device, say)
        except Unusable as error:
            say(f"The int8 weights just written to {slot.path} can't be read ({error}): check that disk")
            return to_device(build(), device)


def write(slot: prepared.Slot, weights: LlamaWeights) -> None:
    """Write the weights to the slot's file, which appears only when all of it is on the disk.

    Raises:
        OSError: no space, or no permission.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = dict(_named(weights))
    checksums = {name: _crc(tensor) for name, tensor in tensors.items()}
    metadata = {"format": INT8_FORMAT, "model": slot.identity, "crc32": json.dumps(checksums, separators=(",", ":"))}
    handle, name = tempfile.mkstemp(prefix=f".{slot.stem}-writing-", dir=slot.folder)
    os.close(handle)
    try:
        save_file(tensors, name, metadata)
        _to_disk(Path(name))
        os.replace(name, slot.path)
        _to_disk(slot.folder)
    except SafetensorError as error:  # safetensors raises this for a full disk, too
        raise OSError(str(error)) from error
    finally:
        Path(name).unlink(missing_ok=True)


def read(slot: prepared.Slot, shape: LlamaShape, device: torch.device, say: Say) -> LlamaWeights:
    """Check every byte of the slot's weights and map them into memory, or copy them to a device other than the CPU.

    Raises:
        Unusable: the file has another format, version or model, is truncated, or is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(slot.path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != INT8_FORMAT:
                raise Unusable("another format")
            if metadata.get("model") != slot.identity:
                raise Unusable("made from other files")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- not a dict
    except (SafetensorError, OSError) as error:
        raise Unusable(f"damaged: {first_line(error)}") from error
    checksums = json.loads(metadata.get("crc32", "{}"))
    progress = Progress(say, f"Checking {slot.path.name}", sum(tensor.nbytes for tensor in tensors.values()))
    done = 0
    for name, tensor in tensors.items():
        if checksums.get(name) != _crc(tensor):
            raise Unusable(f"damaged: {name} has changed")
        done += tensor.nbytes
        progress.at(done)
    try:
        return to_device(_assemble(shape, tensors), device)
    except KeyError as error:
        raise Unusable(f"{error.args[0]} is missing") from error


def to_device(weights: LlamaWeights, device: torch.device) -> LlamaWeights:
    tensors = {name: tensor.to(device) for name, tensor in _named(weights)}
    return _assemble(weights.shape, tensors)


def _named(weights: LlamaWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor with its name in the file. Tensors that are not int8 are float32, the type that runners compute in.

    So the embedding needs more disk space than in a half-precision checkpoint. It needs no extra memory, because
    replicas share its pages and only read the rows of tokens that occur.
    """
    yield "embedding", weights.embedding.float().contiguous()
    yield "final_norm", weights.final_norm.float()
    yield from _matrix("head", weights.head)
    for number, layer in enumerate(weights.layers):
        for part in _PARTS:
            value, name = getattr(layer, part), f"layers.{number}.{part}"
            if part in _MATRICES:
                yield from _matrix(name, value)
            elif value is not None:
                yield name, value.float()


def _matrix(name: str, weight: torch.Tensor | Int8Weight) -> Iterator[tuple[str, torch.Tensor]]:
    assert isinstance(weight, Int8Weight)
    yield f"{name}.values", weight.values
    yield f"{name}.scales", weight.scales


def _assemble(shape: LlamaShape, tensors: dict[str, torch.Tensor]) -> LlamaWeights:
    def matrix(name: str) -> Int8Weight:
        return Int8Weight(tensors[f"{name}.values"], tensors[f"{name}.scales"])

    def part(name: str, kind: str) -> torch.Tensor | Int8Weight | None:
        if kind in _MATRICES:
            return matrix(name)
        return tensors.get(name) if kind in _OPTIONAL else tensors[name]

    layers = [
        LlamaLayer(**{kind: part(f"layers.{number}.{kind}", kind) for kind in _PARTS})  # type: ignore[arg-type]
        for number in range(shape.num_layers)
    ]
    return LlamaWeights(shape, tensors["embedding"], layers, tensors["final_norm"], matrix("head"))


def _crc(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
