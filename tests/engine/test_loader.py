from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.loading import hub, loader, placement, prepared
from serve_app.engine.loading.progress import Progress
from serve_app.settings import ModelArgs, SettingsError, parse
from tests.engine import model_folders


def settings(model: Path | str, **options: object) -> EngineSettings:
    return EngineSettings(model=str(model), **{"kv_cache_memory": "1MiB", **options})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folders.save(tmp_path / "model")


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2**31), ("512 MB", 512 * 10**6), (4096, 4096), ("1.5gib", 3 * 2**29)]
)
def test_sizes_are_read_with_their_units(text: object, size: int) -> None:
    assert EngineSettings(model="m", kv_cache_memory=text).kv_cache_memory == size  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"kv_cache_memory": "much"}, {"max_runing": 3}, {"dtype": "int3"}], ids=str)
def test_settings_that_mean_nothing_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        settings("m", **options)


def test_a_wrong_dtype_is_refused_with_the_list_of_valid_ones() -> None:
    with pytest.raises(SettingsError, match=r"^args\.dtype: .*'float32', 'bfloat16' or 'int8'$"):
        parse(ModelArgs, {"model": "m", "dtype": "int3"}, "args")


# What can be wrong with a folder: how it is broken, the settings, and the text of the one line.


def remove(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: void((folder / name).write_text(text))


def void(_: object) -> None:
    return None


def truncate(name: str) -> Callable[[Path], None]:
    return lambda folder: void((folder / name).write_bytes((folder / name).read_bytes()[:-10]))


def in_turn(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: void([change(folder) for change in changes])


def shard(folder: Path) -> None:
    shutil.rmtree(folder)
    model_folders.save(folder, max_shard_size="100KB")


def edit_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


SHARD = "model-00002-of-00005.safetensors"

BROKEN: dict[str, tuple[Callable[[Path], None], dict[str, Any], str]] = {
    "no folder": (shutil.rmtree, {}, r"There is no model at .*: check the setting 'model'"),
    "a file": (
        in_turn(shutil.rmtree, lambda f: void(f.write_text("x"))),
        {},
        r"neither a folder nor a \.gguf file: check the setting 'model'",
    ),
    "empty": (in_turn(shutil.rmtree, Path.mkdir), {}, r"not a model folder: it has no config\.json"),
    "adapter alone": (
        in_turn(shutil.rmtree, Path.mkdir, write("adapter_config.json", "{}")),
        {},
        r"an adapter .*merge the two .*set 'model' to the merged folder",
    ),
    "GGUF inside": (
        in_turn(shutil.rmtree, Path.mkdir, write("q4.gguf", "GGUF")),
        {},
        r"set 'model' to the file itself, .*q4\.gguf",
    ),
    "config no JSON": (write("config.json", "{"), {}, r"Cannot read .*config\.json .*: download it again"),
    "config a list": (write("config.json", "[]"), {}, r"config\.json is not a JSON object"),
    "config of something else": (write("config.json", "{}"), {}, r"has no model_type"),
    "no weights": (remove("model.safetensors"), {}, r"has no weights: no \*\.safetensors file is there"),
    "pickled weights": (
        in_turn(remove("model.safetensors"), write("pytorch_model.bin", "")),
        {},
        r"only pickled weights .*save the model as safetensors",
    ),
    "weights of another name": (
        lambda f: void((f / "model.safetensors").rename(f / "weights.safetensors")),
        {},
        r"has weights\.safetensors, but neither .* nor .*: rename the file, or fetch the missing index",
    ),
    "weights cut short": (truncate("model.safetensors"), {}, r"model\.safetensors is damaged .*download it"),
    "weights empty": (write("model.safetensors", ""), {}, r"model\.safetensors is damaged or cut short"),
    "a shard missing": (in_turn(shard, remove(SHARD)), {}, rf"lacks {SHARD}.*1 of its 5 .*: fetch the model again"),
    "a shard cut short": (in_turn(shard, truncate(SHARD)), {}, rf"{SHARD} is damaged or cut .*: download it again"),
    "index no JSON": (in_turn(shard, write("model.safetensors.index.json", "{")), {}, r"Cannot read .*index\.json"),
    "index empty": (in_turn(shard, write("model.safetensors.index.json", "{}")), {}, r"index\.json has no weight_map"),
    "no tokenizer": (remove("tokenizer.json"), {}, r"has no tokenizer: put the model's tokenizer\.json"),
    "tokenizer broken": (write("tokenizer.json", "{}"), {}, r"Can't load the tokenizer of"),
    "no chat template": (without_template, {}, r"has no chat template: choose a chat or instruct model"),
    "unknown architecture": (edit_config(model_type="novel"), {}, r"Can't load the model .*novel"),
    "no text model": (edit_config(model_type="vit"), {}, r"Can't load the model .*"),
    "weights of another shape": (edit_config(hidden_size=32), {}, r"do not match its config\.json.*\. Fetch"),
    "fewer weights than layers": (edit_config(num_hidden_layers=3), {}, r"model\.layers\.2.* is missing .*\. Fetch"),
    "device misspelt": (void, {"device_map": "gpu"}, r"contains 'gpu', which is not a device: use cpu, cuda:0 or disk"),
    "device in a map misspelt": (void, {"device_map": {"": "cpux"}}, r"contains 'cpux', which is not a device"),
    "device misspelt in max_memory": (
        void,
        {"device_map": "auto", "max_memory": {"cpuu": 1}},
        r"contains 'cpuu', which is not a device",
    ),
    # In float32: the settings refuse int8 on any GPU.
    "device not there": (
        void,
        {"device_map": "cuda:77", "dtype": "float32"},
        r"There is no device cuda:77: .*change device_map",
    ),
    "device of another kind": (void, {"device_map": "mps"}, r"type mps are not supported: set device_map to cpu"),
    "a map that says things twice": (void, {"device_map": {"": "cpu", "lm_head": "disk"}}, r"name every part"),
    "too little memory": (void, {"kv_cache_memory": "900000GiB"}, r"Too little memory for .*: lower kv_cache_memory"),
    "too little memory for int8": (
        void,
        {"kv_cache_memory": "900000GiB", "dtype": "int8"},
        r"Too little memory for .* as int8, .*: lower kv_cache_memory to \d+ MiB",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_problem_is_reported_in_one_line_with_the_remedy(folder: Path, case: str) -> None:
    damage, options, line = BROKEN[case]
    damage(folder)
    for dtype in ("float32", "int8"):
        with pytest.raises(ModelError, match=line) as refusal:
            loader.load(settings(folder, **{"dtype": dtype, **options}))
        text = str(refusal.value)
        assert "\n" not in text
        assert len(text) < 500


def test_a_sharded_model_is_loaded_by_its_index(tmp_path: Path) -> None:
    whole = model_folders.save(tmp_path / "whole")
    sharded = model_folders.save(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    (sharded / "consolidated.safetensors").write_bytes(b"of another program")
    one, five = (loader.load(settings(path)).model.state_dict() for path in (whole, sharded))
    assert all(torch.equal(one[name], five[name]) for name in one)


# Memory


def test_too_little_memory_is_refused_with_the_setting_to_lower(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "available_memory", lambda: 2**30)
    chosen = settings(folder, kv_cache_memory="2GiB", max_context=512)
    with pytest.raises(ModelError, match=r"1\.0 GiB are free on cpu, about 2\.0 GiB are needed.*lower kv_cache_memory"):
        loader.load(chosen)
    monkeypatch.setattr(placement, "available_memory", lambda: 3 * 2**30)
    assert loader.load(chosen).settings.kv_cache_memory == 2**31
    monkeypatch.setattr(placement, "available_memory", lambda: 1000)
    with pytest.raises(ModelError, match="choose a smaller model"):
        loader.load(settings(folder, kv_cache_memory=1000))


def test_an_automatic_cache_takes_what_is_left_and_is_of_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings(folder, kv_cache_memory="auto", max_context=512, max_running=4)
    lines: list[str] = []
    most = loader.load(chosen, lines.append).settings.kv_cache_bytes
    assert any(line.startswith("Memory of ") and "for 2,048 tokens" in line for line in lines)
    monkeypatch.setattr(placement, "available_memory", lambda: most // 2)
    with pytest.raises(ModelError):
        loader.load(chosen)
    with pytest.raises(ModelError, match="auto is not possible with max_memory"):
        loader.load(settings(folder, kv_cache_memory="auto", device_map="auto", max_memory={"cpu": "1GiB"}))


@pytest.mark.parametrize("tied", [False, True])
def test_int8_is_counted_as_what_it_takes(tmp_path: Path, tied: bool) -> None:
    from serve_app.engine.loading import checkpoint

    folder = model_folders.save(tmp_path / "model", model_folders.model(tie_word_embeddings=tied), dtype=torch.bfloat16)
    counted = placement.weight_bytes(checkpoint.tensor_sizes(folder), "int8")
    loader.load(settings(folder, dtype="int8"))
    [file] = (tmp_path / "home" / "cache" / "int8").glob("*.safetensors")
    assert counted == pytest.approx(file.stat().st_size, rel=0.1)  # scales and the file's header are not counted


def test_a_container_counts_its_own_limit_as_the_memory_there_is(tmp_path: Path) -> None:
    assert placement.available_memory(tmp_path) > 0
    (tmp_path / "memory.max").write_text("1048576\n")
    (tmp_path / "memory.current").write_text("48576\n")
    (tmp_path / "memory.stat").write_text("anon 40000\ninactive_file 8576\n")
    assert placement.available_memory(tmp_path) == 1_008_576
    (tmp_path / "memory.max").write_text("max\n")
    assert placement.available_memory(tmp_path) > 1_008_576


# Hub names


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no network."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_hub_name_is_found_in_the_local_cache(offline: Path) -> None:
    repository = offline / "models--someone--tiny"
    model_folders.save(repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    assert loader.load(settings("someone/tiny")).model.config.model_type == "llama"
    assert loader.load(settings("someone/tiny", dtype="int8")).weights is not None
    [path] = (prepared.cache_dir() / "int8").glob("*.safetensors")
    assert path.name.startswith("tiny-")


def test_a_revision_of_a_hub_name_is_found_and_another_one_is_not(offline: Path) -> None:
    model_folders.save(offline / "models--someone--tiny" / "snapshots" / ("b" * 40))
    assert loader.load(settings("someone/tiny", revision="b" * 40)).model.config.model_type == "llama"
    with pytest.raises(ModelError, match=r"no cached model of that name, .*HF_HUB_OFFLINE is set"):
        loader.load(settings("someone/tiny", revision="c" * 40))


def test_a_folder_has_no_revision(folder: Path) -> None:
    with pytest.raises(ModelError, match="'revision' is for models on the hub"):
        loader.load(settings(folder, revision="main"))


def test_weights_with_another_fingerprint_than_the_settings_name_are_refused(folder: Path) -> None:
    right = loader.load(settings(folder)).fingerprint
    assert loader.load(settings(folder, fingerprint=right)).fingerprint == right
    with pytest.raises(ModelError, match=f"have the fingerprint {right}, but the settings name 0123456789ab"):
        loader.load(settings(folder, fingerprint="0123456789ab"))


def test_a_hub_that_may_not_be_asked_is_named(offline: Path) -> None:
    with pytest.raises(
        ModelError, match=r"no folder someone/tiny, .*HF_HUB_OFFLINE is set.*or use a folder"
    ) as refusal:
        loader.load(settings("someone/tiny"))
    assert "\n" not in str(refusal.value)


def test_a_hub_that_can_not_be_reached_is_named(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nothing listens
    with pytest.raises(ModelError, match=r"the hub is unreachable .*check the network, or use a folder") as refusal:
        loader.load(settings("someone/tiny"))
    assert "\n" not in str(refusal.value)


def test_an_invalid_hub_name_is_reported_as_such(offline: Path) -> None:
    with pytest.raises(ModelError, match="nor a valid name on the hub"):
        loader.load(settings("some one"))


@pytest.fixture
def slow_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances one second at each reading."""
    monkeypatch.setattr(Progress.__init__, "__defaults__", (itertools.count().__next__,))


def test_a_download_is_reported_in_lines(slow_work: None) -> None:
    lines: list[str] = []
    bar = hub._bar("someone/tiny", lines.append)
    with bar(total=100, unit="B", mininterval=0, desc="Reconstructing") as bytes_done:
        for _ in range(4):
            bytes_done.update(25)
    assert lines
    assert all(line.startswith("Fetching someone/tiny: ") and line.endswith(" %") for line in lines)


# Progress


def test_progress_is_reported_each_ten_percent_but_at_most_once_a_second() -> None:
    now, lines = [0.0], list[str]()
    progress = Progress(lines.append, "Loading", 100, lambda: now[0])
    for step in range(101):  # half a second a percent
        now[0] = step * 0.5
        progress.at(step)
    assert lines == [f"Loading: {share} %" for share in range(10, 100, 10)]


def test_short_work_reports_nothing_and_stuck_work_is_reported() -> None:
    now, lines = [0.0], list[str]()
    progress = Progress(lines.append, "Loading", 100, lambda: now[0])
    progress.at(50)
    assert lines == []
    for now[0] in (0.9, 5.0, 6.0, 14.9, 15.0):
        progress.at(51)
    assert lines == ["Loading: 51 %", "Loading: 51 %"]


def test_a_long_load_is_reported_in_lines(folder: Path, slow_work: None) -> None:
    lines: list[str] = []
    loader.load(settings(folder), lines.append)
    assert len(lines) > 3
    plan = next(index for index, line in enumerate(lines) if line.startswith("Loading"))
    assert all(line.startswith(f"Loading {folder}: ") for line in lines[plan:])
    lines.clear()
    loader.load(settings(folder, dtype="int8"), lines.append)
    assert any(line.startswith("Quantizing") for line in lines)
    assert any(line.startswith("Checking") for line in lines)
