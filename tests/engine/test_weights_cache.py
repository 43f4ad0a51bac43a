from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.loading import loader, prepared
from serve_app.engine.loading.prepared import Source, int8_slot
from serve_app.engine.models import llama_weights
from serve_app.engine.models.quantize import Int8Weight
from tests.engine import model_folders
from tests.engine.families import FAMILIES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folders.save(tmp_path / "model")


def settings(folder: Path, **options: object) -> EngineSettings:
    chosen = {"dtype": "int8", "kv_cache_memory": "1MiB", "cache_dir": str(folder.parent / "cache"), **options}
    return EngineSettings(model=str(folder), **chosen)  # type: ignore[arg-type]


def tensors(weights: llama_weights.LlamaWeights) -> Iterator[torch.Tensor]:
    parts: list[Any] = [weights.embedding, weights.final_norm, weights.head]
    parts += [getattr(layer, part.name) for layer in weights.layers for part in fields(layer)]
    for part in parts:
        if isinstance(part, Int8Weight):
            yield from (part.values, part.scales)
        elif part is not None:
            yield part


def same(left: llama_weights.LlamaWeights | None, right: llama_weights.LlamaWeights | None) -> bool:
    assert left is not None
    assert right is not None
    pairs = zip(tensors(left), tensors(right), strict=True)
    return left.shape == right.shape and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def cached(folder: Path) -> Path:
    [path] = (folder.parent / "cache" / "int8").glob("*.safetensors")
    return path


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets an entry each time weights are quantized from here on."""
    calls: list[str] = []
    take = llama_weights.extract_weights

    def counting(*args: Any, **options: Any) -> llama_weights.LlamaWeights:
        calls.append("quantized")
        return take(*args, **options)

    monkeypatch.setattr(llama_weights, "extract_weights", counting)
    return calls


@pytest.mark.parametrize(
    ("family", "tied", "stored"),
    [
        *((family, False, torch.float32) for family in FAMILIES),
        *(("llama", tied, torch.bfloat16) for tied in (False, True)),
        ("qwen2", True, torch.float32),
    ],
    ids=str,
)
def test_first_start_and_restart_give_the_weights_that_quantizing_gives(
    tmp_path: Path, family: str, tied: bool, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folders.save(tmp_path / "model", model_folders.model(family, tie_word_embeddings=tied), dtype=stored)
    plain = loader.load(settings(folder, dtype="float32")).model
    expected = llama_weights.extract_weights(plain, int8=True)
    calls = counted(monkeypatch)
    first = loader.load(settings(folder))
    assert calls == ["quantized"]
    monkeypatch.setattr(loader, "_load_float", None)  # a restart never reads the float weights
    again = loader.load(settings(folder))
    assert same(first.weights, expected)
    assert same(again.weights, expected)


def test_what_stands_in_for_the_model_has_no_weights_but_its_real_rotary_frequencies(folder: Path) -> None:
    loaded = loader.load(settings(folder))
    plain = loader.load(settings(folder, dtype="float32"))
    assert all(parameter.is_meta for parameter in loaded.model.parameters())
    assert torch.equal(loaded.model.model.rotary_emb.inv_freq, plain.model.model.rotary_emb.inv_freq)
    assert llama_weights.why_not(loaded.model) is None
    assert loaded.eos_token_ids == plain.eos_token_ids
    assert loaded.model.generation_config.to_dict() == plain.model.generation_config.to_dict()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's list of mapped files")
def test_replicas_share_the_files_pages(folder: Path) -> None:
    loaded = loader.load(settings(folder))
    assert loaded.weights is not None
    address = loaded.weights.layers[0].qkv.values.data_ptr()  # type: ignore[union-attr]
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= address < end:
            assert line.endswith(str(cached(folder)))
            return
    pytest.fail("the weights lie in no mapping")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def rewrite(path: Path, change: Any) -> None:
    with safe_open(path, framework="pt") as file:
        content = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = dict(file.metadata())
    change(content, metadata)
    save_file(content, path, metadata)


DAMAGE = {
    "cut short": (cut, "damaged"),
    "one bit flipped": (flip, "has changed"),
    "no such file at all": (lambda path: path.write_text("hello"), "damaged"),
    "empty": (lambda path: path.write_bytes(b""), "damaged"),
    "another version": (lambda path: rewrite(path, lambda t, m: m.update(format="2")), "another format"),
    "another model's": (lambda path: rewrite(path, lambda t, m: m.update(model="f" * 64)), "made from other files"),
    "a tensor missing": (
        lambda path: rewrite(path, lambda t, m: t.pop("layers.1.down.values")),
        "down.values is missing",
    ),
    "no checksums": (lambda path: rewrite(path, lambda t, m: m.pop("crc32")), "has changed"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_can_not_be_trusted_is_made_again(
    folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader.load(settings(folder))
    expected = llama_weights.extract_weights(loader.load(settings(folder, dtype="float32")).model, int8=True)
    change, reason = DAMAGE[damage]
    change(cached(folder))
    calls, lines = counted(monkeypatch), list[str]()
    assert same(loader.load(settings(folder), lines.append).weights, expected)
    assert calls == ["quantized"]
    assert [reason in line for line in lines if "not used" in line] == [True], lines
    assert same(loader.load(settings(folder), lines.append).weights, expected)
    assert calls == ["quantized"]


def test_a_changed_model_is_prepared_anew_and_the_old_file_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader.load(settings(folder))
    old = cached(folder)
    weights = folder / "model.safetensors"
    about = weights.stat()
    model_folders.save(folder, model_folders.model(rms_norm_eps=1e-3))
    os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    calls = counted(monkeypatch)
    loader.load(settings(folder))
    assert calls == ["quantized"]
    assert cached(folder) != old


def test_two_models_of_the_same_folder_name_keep_apart(tmp_path: Path) -> None:
    one, two = model_folders.save(tmp_path / "a" / "model"), model_folders.save(tmp_path / "b" / "model")
    cache = str(tmp_path / "cache")
    loader.load(settings(one, cache_dir=cache))
    loader.load(settings(two, cache_dir=cache))
    assert len(list((tmp_path / "cache" / "int8").glob("*.safetensors"))) == 2


def test_without_a_writable_folder_the_start_continues_and_warns_once(folder: Path) -> None:
    blocked = folder.parent / "cache"
    blocked.write_text("a file in the way")
    lines: list[str] = []
    loaded = loader.load(settings(folder), lines.append)
    expected = llama_weights.extract_weights(loader.load(settings(folder, dtype="float32")).model, int8=True)
    assert same(loaded.weights, expected)
    assert sum("can't be kept" in line for line in lines) == 1


def test_a_full_disk_leaves_no_half_written_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    def full(tensors: Any, name: str, metadata: Any) -> None:
        Path(name).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    lines: list[str] = []
    assert loader.load(settings(folder), lines.append).weights is not None
    assert [path.suffix for path in (folder.parent / "cache" / "int8").iterdir()] == [".lock"]
    assert any("No space left on device" in line for line in lines)


def test_what_a_killed_process_left_half_written_is_cleared_away(folder: Path) -> None:
    slot = int8_slot(Source(str(folder), folder), folder.parent / "cache")
    prepared.make_folder(slot.folder)
    left_over = slot.folder / f".{slot.stem}-writing-abc"
    left_over.write_bytes(b"half")
    loader.load(settings(folder))
    assert not left_over.exists()


def test_replicas_that_start_together_quantize_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Threads stand in for processes: the lock belongs to an open file, not to a process.
    calls, lines = counted(monkeypatch), list[str]()
    shape = llama_weights.shape_of(model_folders.model().config)
    slot = int8_slot(Source(str(folder), folder), folder.parent / "cache")
    weights = llama_weights.extract_weights(model_folders.model(), int8=True)
    calls.clear()
    together = threading.Barrier(4)
    results: list[llama_weights.LlamaWeights] = []

    def build() -> llama_weights.LlamaWeights:
        calls.append("quantized")
        return weights

    def start() -> None:
        from serve_app.engine.loading import weights_cache

        together.wait()
        results.append(weights_cache.load_or_build(slot, shape, torch.device("cpu"), build, lines.append))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["quantized"]
    assert len(results) == 4
    assert all(same(result, results[0]) for result in results)


def test_only_the_owner_can_read_the_cache(folder: Path) -> None:
    loader.load(settings(folder))
    for path in (folder.parent / "cache", folder.parent / "cache" / "int8"):
        assert path.stat().st_mode & 0o777 == 0o700
    assert cached(folder).stat().st_mode & 0o777 == 0o600


def test_the_cache_is_in_the_services_home_or_else_in_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_HOME", "/srv/app")
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/me/.cache")
    assert prepared.cache_dir() == Path("/srv/app/cache")
    assert prepared.cache_dir("/elsewhere") == Path("/elsewhere")
    monkeypatch.delenv("SERVE_APP_HOME")
    assert prepared.cache_dir() == Path("/home/me/.cache/serve-app")


def test_other_models_are_told_which_dtypes_work(tmp_path: Path) -> None:
    folder = model_folders.save(tmp_path / "model", model_folders.gpt2())
    with pytest.raises(ModelError, match="set dtype to float32 or bfloat16"):
        loader.load(settings(folder))


def test_a_model_that_is_quantized_already_is_not_quantized_again(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quantized already.*set dtype to float32 or bfloat16"):
        loader.load(settings(folder))


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_int8_goes_to_one_device(folder: Path, device_map: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("auto may choose several GPUs here")
    assert loader.load(settings(folder, device_map=device_map)).weights is not None


def test_int8_is_not_spread(folder: Path) -> None:
    with pytest.raises(ModelError, match="the whole model on the CPU"):
        loader.load(settings(folder, device_map={"model": "cpu", "lm_head": "disk"}))
