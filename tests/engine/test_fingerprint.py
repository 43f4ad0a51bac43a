"""A model's fingerprint is the same wherever its files are, and another one when what it says may be another."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from serve_app.engine import Engine
from serve_app.engine.config import EngineSettings
from serve_app.engine.loading import fingerprint as module
from serve_app.engine.loading.fingerprint import fingerprint
from tests.engine import model_folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folders.save(tmp_path / "one")


def test_a_copy_has_the_same(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "other" / "name", copy_function=shutil.copyfile)
    assert fingerprint(tmp_path / "other" / "name", "int8") == fingerprint(folder, "int8")


def test_another_type_has_another(folder: Path) -> None:
    assert fingerprint(folder, "int8") != fingerprint(folder, "float32")


def test_weights_of_the_same_shape_have_another(folder: Path, tmp_path: Path) -> None:
    made = model_folders.model()
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(1.001)
    tuned = model_folders.save(tmp_path / "tuned", made)
    assert fingerprint(tuned, "float32") != fingerprint(folder, "float32")


def test_another_chat_template_has_another(folder: Path) -> None:
    before = fingerprint(folder, "float32")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert fingerprint(folder, "float32") != before


def test_of_large_files_a_little_is_read_and_a_change_all_over_is_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SAMPLE_BYTES", 64)
    before = fingerprint(folder, "float32")
    [weights] = folder.glob("*.safetensors")
    raw = bytearray(weights.read_bytes())
    assert len(raw) > 100 * 64
    weights.write_bytes(bytes(raw[:-64]) + bytes(byte ^ 1 for byte in raw[-64:]))
    assert fingerprint(folder, "float32") != before


def test_an_engine_tells_that_of_its_model(folder: Path) -> None:
    settings = EngineSettings(model=str(folder), kv_cache_memory=2**20)
    engine = Engine.from_settings(settings, progress=lambda _: None)
    try:
        assert engine.fingerprint == fingerprint(folder, "float32")
    finally:
        engine.close()
