from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.loading import loader, prepared
from serve_app.model import bundled
from tests.engine import model_folders


@pytest.fixture
def tiny_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A tiny model in the place of the bundled one; the conversions that are made of its file."""
    gguf, conversions = tmp_path / "small.gguf", list[Path]()
    gguf.write_bytes(b"weights")

    def convert(source: Path, folder: Path, progress: object) -> None:
        conversions.append(source)
        model_folders.save(folder)

    monkeypatch.setenv(bundled.GGUF_VARIABLE, str(gguf))
    monkeypatch.setattr(bundled, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr("serve_app.engine.loading.gguf.convert_gguf", convert)
    return conversions


def test_the_bundled_model_must_be_the_recorded_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"something else")
    monkeypatch.setenv(bundled.GGUF_VARIABLE, str(other))
    with pytest.raises(ModelError, match="not the bundled model"):
        bundled.ensure_bundled_model(tmp_path / "home", print)
    monkeypatch.setenv(bundled.GGUF_VARIABLE, str(tmp_path / "missing.gguf"))
    with pytest.raises(ModelError, match=f"check {bundled.GGUF_VARIABLE}"):
        bundled.ensure_bundled_model(tmp_path / "home", print)


def test_the_bundled_model_is_prepared_once_for_many_concurrent_starts(tmp_path: Path, tiny_one: list[Path]) -> None:
    left_overs = [tmp_path / "models" / f".{name}-old" for name in (f"fetch-{bundled.NAME}", bundled.NAME)]
    for left_over in left_overs:
        left_over.mkdir(parents=True)
    threads = [threading.Thread(target=bundled.ensure_bundled_model, args=(tmp_path, print)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tiny_one) == 1
    assert not any(left_over.exists() for left_over in left_overs)


def test_set_up_leaves_nothing_for_the_first_start(
    tmp_path: Path, tiny_one: list[Path], copied_kernels: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    folder = bundled.prepare_bundled_model(home, print)
    monkeypatch.setattr(loader, "prepare", None)  # not called again
    assert bundled.prepare_bundled_model(home, print) == folder
    monkeypatch.setattr(loader, "_quantize", None)
    # As the launcher sets the home, and as a replica finds it.
    for cache in (str(bundled.bundled_cache_dir(home)), None):
        monkeypatch.setenv("SERVE_APP_HOME", str(home))
        settings = EngineSettings(model=str(folder), dtype="int8", kv_cache_memory="1MiB", cache_dir=cache)  # type: ignore[arg-type]
        assert loader.load(settings).weights is not None
    assert len(tiny_one) == 1


def test_state_folders_that_link_to_one_model_share_what_is_made_from_it(tmp_path: Path, tiny_one: list[Path]) -> None:
    folder = bundled.ensure_bundled_model(tmp_path / "first", print)
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "models").symlink_to(folder.parent)
    assert bundled.ensure_bundled_model(tmp_path / "second", print) == folder
    assert len(tiny_one) == 1


def test_the_command_reports_a_problem_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(bundled.GGUF_VARIABLE, str(tmp_path / "missing.gguf"))
    assert bundled.main(["--home", str(tmp_path)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_start_knows_without_loading_whether_it_must_prepare_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path / "home"))
    folder, gguf = model_folders.save(tmp_path / "model"), tmp_path / "q.gguf"
    gguf.write_bytes(b"GGUF")

    def ready(model: Path | str, dtype: str = "int8") -> bool:
        return prepared.is_ready(EngineSettings(model=str(model), dtype=dtype))  # type: ignore[arg-type]

    assert ready(folder, "float32")
    assert not ready(folder)
    loader.prepare(EngineSettings(model=str(folder), dtype="int8"), print)
    assert ready(folder)
    assert not ready(gguf, "float32")
    converted = prepared.gguf_slot(gguf, prepared.cache_dir()).path
    model_folders.save(converted)
    assert ready(gguf, "float32")
    assert not ready(gguf)
    assert ready("someone/tiny")  # a name on the hub: only the hub can report it
    assert ready(tmp_path / "nowhere")  # the loader reports what is wrong
    assert ready(tmp_path)
