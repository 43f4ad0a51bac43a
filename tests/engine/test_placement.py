from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from serve_app.contracts.generation import Delta, SamplingParams
from serve_app.engine.config import EngineSettings
from serve_app.engine.engine import Engine
from serve_app.engine.errors import ModelError
from serve_app.engine.loading import loader, placement, prepared
from serve_app.engine.loading.loader import LoadedModel
from serve_app.engine.models.choose_runner import create_runner
from serve_app.engine.request import GenerationRequest
from tests.engine import model_folders
from tests.engine.families import Blocks, prefill, tokens_of


def settings(model: Path | str, **options: object) -> EngineSettings:
    return EngineSettings(model=str(model), **{"kv_cache_memory": "1MiB", **options})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folders.save(tmp_path / "model")


def logits(loaded: LoadedModel, chosen: EngineSettings) -> torch.Tensor:
    runner = create_runner(loaded.model, chosen)
    sequence = Blocks(runner.num_blocks, chosen.block_size).sequence(tokens_of(20))
    return runner.execute([prefill(sequence)])


PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
DISK: dict[str, Any] = {
    "one layer": {**dict.fromkeys(PARTS, "cpu"), "model.layers.1": "disk"},
    "embedding and head": {**dict.fromkeys(PARTS, "cpu"), "model.embed_tokens": "disk", "lm_head": "disk"},
    "all": {"": "disk"},
    "a spread without room": "auto",
}


@pytest.mark.parametrize(
    ("case", "stored"), [*((case, torch.float32) for case in DISK), ("one layer", torch.bfloat16)], ids=str
)
def test_a_model_that_stays_on_disk_computes_the_same(tmp_path: Path, case: str, stored: torch.dtype) -> None:
    folder = model_folders.save(tmp_path / "model", dtype=stored)
    options = {"fused": False, "max_context": 128, "device_map": DISK[case], "max_memory": {"cpu": 1000}}
    plain = settings(folder, fused=False, max_context=128)
    lines: list[str] = []
    away = loader.load(settings(folder, **options), lines.append)
    assert any(parameter.is_meta for parameter in away.model.parameters())
    assert any("offloaded" in line for line in lines)
    assert torch.equal(logits(away, settings(folder, **options)), logits(loader.load(plain), plain))


def test_a_model_that_stays_on_disk_runs_through_its_own_code(folder: Path) -> None:
    chosen = settings(folder, device_map=DISK["one layer"])
    assert type(create_runner(loader.load(chosen).model, chosen)).__name__ == "TransformersRunner"


async def reply(chosen: EngineSettings) -> str:
    """The output of a whole engine."""
    engine = Engine.from_settings(chosen)
    try:
        prompt = tuple(engine.chat.render([{"role": "user", "content": "Say something."}]))
        params = SamplingParams(max_tokens=12, temperature=0.0)
        events = [event async for event in engine.generate(GenerationRequest("r", prompt, params))]
    finally:
        engine.close()
    return "".join(event.text for event in events if isinstance(event, Delta))


async def test_an_engine_generates_the_same_with_offloaded_weights(folder: Path) -> None:
    expected = await reply(settings(folder, max_context=256, fused=False))
    assert expected
    away = settings(folder, max_context=256, fused=False, device_map=DISK["embedding and head"])
    assert await reply(away) == expected


async def test_an_engine_generates_the_same_after_a_restart_from_prepared_weights(folder: Path) -> None:
    chosen = settings(folder, max_context=256, dtype="int8", native=False)
    first = await reply(chosen)
    assert first
    assert await reply(chosen) == first


@pytest.mark.parametrize(
    "device_map", ["cpu", "auto", "balanced", "balanced_low_0", "sequential", {"": "cpu"}], ids=str
)
def test_every_placement_of_accelerate_is_accepted(folder: Path, device_map: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("goes to the GPU here")
    model = loader.load(settings(folder, device_map=device_map)).model
    assert placement.execution_device(model) == torch.device("cpu")
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_an_offload_folder_of_a_dead_process_is_removed_and_a_live_ones_is_not(tmp_path: Path) -> None:
    with prepared.own_folder(tmp_path / "offload") as live:
        (live / "weight").touch()
        dead = tmp_path / "offload" / "process-dead"
        dead.mkdir()
        (dead / ".lock").touch()
        with prepared.own_folder(tmp_path / "offload") as empty:
            assert live.exists()
            assert not dead.exists()
        assert not empty.exists()
    assert (live / "weight").exists()  # in use for as long as the process lives


@pytest.mark.parametrize("device_map", ["cuda", "cuda:0", {"": 0}, {"": "cuda:1"}, {"model": 0, "lm_head": "cpu"}])
def test_int8_on_a_gpu_is_refused_with_the_alternative(device_map: Any) -> None:
    with pytest.raises(ValidationError, match="set dtype to bfloat16, or device_map to cpu"):
        EngineSettings(model="m", dtype="int8", device_map=device_map)
    EngineSettings(model="m", dtype="bfloat16", device_map=device_map)


def test_int8_is_refused_where_auto_would_mean_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    automatic = EngineSettings(model="m", dtype="int8", device_map="auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert placement.single_device(automatic) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ModelError, match="set dtype to bfloat16, or device_map to cpu"):
        placement.single_device(automatic)


def test_a_replica_that_asked_for_a_gpu_does_not_fall_back_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for spread in ("auto", "balanced", "balanced_low_0", "sequential"):
        chosen = EngineSettings(model="m", device_map=spread)
        placement.check_gpus(chosen, 0)
        with pytest.raises(ModelError, match=r"has 1 GPU .*torch finds no CUDA device"):
            placement.check_gpus(chosen, 1)
    for named in ("cpu", {"": "cpu"}, {"model": "cpu", "lm_head": "disk"}):
        chosen = EngineSettings(model="m", device_map=named)
        placement.check_gpus(chosen, 0)
        with pytest.raises(ModelError, match=r"has 1 GPU .*computes on the CPU: set device_map to auto"):
            placement.check_gpus(chosen, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for named in ("auto", "cuda:0", {"model": 0, "lm_head": "cpu"}):
        placement.check_gpus(EngineSettings(model="m", device_map=named), 1)
