"""A model's fingerprint does not depend on the place of its files, and changes when its output may change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from serve_app.engine.config import EngineSettings
from serve_app.engine.engine import Engine
from serve_app.engine.loading import checkpoint
from serve_app.engine.loading.checkpoint import fingerprint
from tests.engine import model_folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folders.save(tmp_path / "one")


def test_a_copy_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "other" / "name", copy_function=shutil.copyfile)
    assert fingerprint(tmp_path / "other" / "name", "int8") == fingerprint(folder, "int8")


def test_another_type_has_another_fingerprint(folder: Path) -> None:
    assert fingerprint(folder, "int8") != fingerprint(folder, "float32")


def test_other_weights_of_the_same_shape_have_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    made = model_folders.model()
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(1.001)
    tuned = model_folders.save(tmp_path / "tuned", made)
    assert fingerprint(tuned, "float32") != fingerprint(folder, "float32")


def test_another_chat_template_has_another_fingerprint(folder: Path) -> None:
    before = fingerprint(folder, "float32")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert fingerprint(folder, "float32") != before


def test_large_files_are_read_in_part_and_a_change_everywhere_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_SAMPLE_BYTES", 64)
    before = fingerprint(folder, "float32")
    [weights] = folder.glob("*.safetensors")
    raw = bytearray(weights.read_bytes())
    assert len(raw) > 100 * 64
    weights.write_bytes(bytes(raw[:-64]) + bytes(byte ^ 1 for byte in raw[-64:]))
    assert fingerprint(folder, "float32") != before


def test_an_engine_has_the_fingerprint_of_its_model(folder: Path) -> None:
    settings = EngineSettings(model=str(folder), kv_cache_memory=2**20)
    engine = Engine.from_settings(settings, progress=lambda _: None)
    try:
        assert engine.fingerprint == fingerprint(folder, "float32")
    finally:
        engine.close()
