from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import yaml

from serve_app.launch.__main__ import READY_S, SLOW_S, Launch
from serve_app.launch.preflight import LaunchError
from serve_app.settings import read_config
from tests.engine import model_folders


def launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ready_timeout: float | None = None, **args: object
) -> Launch:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"applications": [{"name": "own", "args": args}]}))
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path / "home"))
    home = tmp_path / "home"
    return Launch(argparse.Namespace(home=home, port="8000", config=config, ready_timeout=ready_timeout, tls=False))


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


def test_a_model_of_ones_own_may_take_longer_to_load_unless_a_time_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(model_folders.save(tmp_path / "model"))
    for given, waits in ((None, SLOW_S), (60.0, 60.0)):
        start = launch(tmp_path, monkeypatch, given, model=folder)
        assert start.ready_s == (given or READY_S)
        start.prepare_models(read_config(start.options.config))
        assert start.ready_s == waits


def test_without_vllms_environment_the_start_says_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_APP_VLLM_PYTHON", str(tmp_path / "python"))
    start = launch(tmp_path, monkeypatch, model="bundled", engine="vllm")
    with pytest.raises(LaunchError, match=r"there is no .*/python to run vllm replicas: run `make engine-vllm`"):
        start.prepare_models(read_config(start.options.config))
