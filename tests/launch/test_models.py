from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import yaml

from serve_app.launch.__main__ import Launch
from serve_app.settings import read_config
from tests.engine import model_folders


def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **args: object) -> Launch:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"applications": [{"name": "own", "args": args}]}))
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path / "home"))
    return Launch(argparse.Namespace(home=tmp_path / "home", port="8000", config=config))


def test_a_configured_model_is_quantized_before_the_service_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folders.save(tmp_path / "model")
    start = launch(tmp_path, monkeypatch, model=str(folder), dtype="int8", kv_cache_memory="1MiB")
    start.prepare_models(read_config(start.options.config))
    [made] = (tmp_path / "home" / "cache" / "int8").glob("*.safetensors")
    written = made.stat().st_mtime_ns
    start.prepare_models(read_config(start.options.config))
    assert made.stat().st_mtime_ns == written
