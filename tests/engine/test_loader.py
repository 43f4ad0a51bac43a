from __future__ import annotations

import hashlib
import shutil
import threading
from pathlib import Path

import pytest
from pydantic import ValidationError

from serve_app import bundled
from serve_app.engine import EngineSettings, ModelError, loader


def settings(model: Path | str, **options: object) -> EngineSettings:
    return EngineSettings(model=str(model), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2**31), ("512 MB", 512 * 10**6), (4096, 4096), ("1.5gib", 3 * 2**29)]
)
def test_sizes_are_read_with_their_units(text: object, size: int) -> None:
    assert EngineSettings(model="m", kv_cache_memory=text).kv_cache_memory == size  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"kv_cache_memory": "much"}, {"max_runing": 3}, {"dtype": "int3"}], ids=str)
def test_settings_that_mean_nothing_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        settings("m", **options)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"There is no model at .*nowhere"):
        loader.load(settings(tmp_path / "nowhere"))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        loader.load(settings(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no weights"):
        loader.load(settings(tmp_path))


def test_a_file_instead_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="convert_gguf"):
        loader.load(settings(tmp_path / "model.gguf"))


@pytest.mark.model
def test_a_truncated_file_is_named(tmp_path: Path, model_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path / name, tmp_path)
    with (model_path / "model.safetensors").open("rb") as whole:
        (tmp_path / "model.safetensors").write_bytes(whole.read(2**20))
    with pytest.raises(ModelError, match="cut short") as refusal:
        loader.load(settings(tmp_path))
    assert "\n" not in str(refusal.value)


@pytest.mark.model
def test_too_little_memory_is_refused_with_the_setting_to_lower(model_path: Path) -> None:
    chosen = settings(model_path, kv_cache_memory="2GiB")
    with pytest.raises(ModelError, match=r"1\.0 GiB are available, 2\.5 GiB are needed.*lower kv_cache_memory"):
        loader.check_memory(model_path, chosen, available=2**30)
    loader.check_memory(model_path, chosen, available=3 * 2**30)


def test_a_container_counts_its_own_limit_as_the_memory_there_is(tmp_path: Path) -> None:
    assert loader.available_memory(tmp_path) > 0
    (tmp_path / "memory.max").write_text("1048576\n")
    (tmp_path / "memory.current").write_text("48576\n")
    (tmp_path / "memory.stat").write_text("anon 40000\ninactive_file 8576\n")
    assert loader.available_memory(tmp_path) == 1_008_576
    (tmp_path / "memory.max").write_text("max\n")
    assert loader.available_memory(tmp_path) > 1_008_576


def test_a_broken_gguf_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"Can't convert"):
        loader.convert_gguf(tmp_path / "broken.gguf", tmp_path / "out", print)
    assert [path.name for path in tmp_path.iterdir()] == ["broken.gguf"]


def test_the_bundled_model_must_be_the_recorded_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"something else")
    monkeypatch.setenv(bundled.GGUF_VARIABLE, str(other))
    with pytest.raises(ModelError, match="not the bundled model"):
        bundled.ensure_bundled_model(tmp_path / "home", print)
    monkeypatch.setenv(bundled.GGUF_VARIABLE, str(tmp_path / "missing.gguf"))
    with pytest.raises(ModelError, match=f"check {bundled.GGUF_VARIABLE}"):
        bundled.ensure_bundled_model(tmp_path / "home", print)


def test_the_bundled_model_is_prepared_once_however_many_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf, conversions = tmp_path / "small.gguf", []
    gguf.write_bytes(b"weights")

    def convert(source: Path, folder: Path, progress: object) -> None:
        conversions.append(source)
        folder.mkdir()
        for name in bundled._FILES:
            (folder / name).touch()

    monkeypatch.setenv(bundled.GGUF_VARIABLE, str(gguf))
    monkeypatch.setattr(bundled, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(loader, "convert_gguf", convert)
    left_over = tmp_path / "models" / f".fetch-{bundled.NAME}-old"
    left_over.mkdir(parents=True)
    threads = [threading.Thread(target=bundled.ensure_bundled_model, args=(tmp_path, print)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert conversions == [gguf]
    assert not left_over.exists()


def test_the_command_says_in_one_line_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(bundled.GGUF_VARIABLE, str(tmp_path / "missing.gguf"))
    assert bundled.main(["--home", str(tmp_path)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
