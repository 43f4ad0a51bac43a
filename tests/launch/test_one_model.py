"""`make serve MODEL=…`: the configuration for a model and this machine, and what is refused before anything starts."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from serve_app.engine.loading import sizing
from serve_app.engine.loading.checkpoint import Tensor
from serve_app.launch import __main__ as launcher
from serve_app.launch import one_model, vllm_environment
from serve_app.launch.gpus import Gpu
from serve_app.launch.one_model import Choice, Facts, Machine, Wish
from serve_app.launch.preflight import LaunchError
from serve_app.settings import ModelArgs, parse
from tests.engine import model_folders
from tests.engine.fake_hub import served

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())
PYTHON = "/opt/vllm/bin/python"
MIB, GIB = 2**20, 2**30
L4 = (23034, "NVIDIA L4", (8, 9))
A10G = (23028, "NVIDIA A10G", (8, 6))
RTX5000 = (32760, "NVIDIA RTX 5000 Ada Generation", (8, 9))
H100 = (81559, "NVIDIA H100 80GB HBM3", (9, 0))


def facts(model: str, **config: Any) -> Facts:
    """A published model, without its files."""
    known = sizing.MODELS[model] | config
    return Facts(
        f"org/{model}",
        known,
        {name: Tensor("BF16", size, 2 * size) for name, size in sizing.tensor_sizes(known).items()},
    )


def machine(*cards: tuple[int, str, tuple[int, int]], used: int = 450, driver: int = 580, memory: int = 64) -> Machine:
    """A machine with these GPUs, `used` MiB of each by other programs, and `memory` GiB."""
    gpus = [
        Gpu(index, f"GPU-{index}", name, mib * MIB, (mib - used) * MIB, capability, driver)
        for index, (mib, name, capability) in enumerate(cards)
    ]
    return Machine(gpus, memory * GIB, cores=8)


def choose(model: Facts, there: Machine, **wish: Any) -> Choice:
    return one_model.choose(model, Wish(**wish), there, PYTHON)


def test_a_gpu_gets_vllm_with_the_models_context() -> None:
    choice = choose(facts("qwen2.5-7b"), machine(H100))
    assert choice.engine == "vllm"
    assert choice.args["max_context"] == 32768
    assert choice.args["vllm"] == {"tensor_parallel_size": 1}
    assert choice.actor["num_gpus"] == 1
    assert choice.actor["runtime_env"] == {"py_executable": PYTHON}
    running = choice.args["max_running"]
    assert choice.max_ongoing == running + running // 8 + choice.args["max_waiting"]
    small = choose(facts("qwen2.5-7b"), machine(L4))
    assert small.args["max_running"] < running
    shorter = choose(facts("qwen2.5-7b", max_position_embeddings=4096), machine(H100))
    assert (shorter.args["max_context"], shorter.args["max_output"]) == (4096, 2048)
    assert choose(facts("llama-3.1-8b"), machine(H100)).args["max_context"] == 32768  # of 131,072
    assert choose(facts("llama-3.1-8b"), machine(H100), context=65536).args["max_context"] == 65536


def test_a_replica_takes_as_many_gpus_as_it_needs_and_the_others_are_for_more_replicas() -> None:
    one, two = (choose(facts(name), machine(L4, L4, L4, L4)) for name in ("qwen2.5-7b", "qwen2.5-14b"))
    assert (one.args["vllm"]["tensor_parallel_size"], one.max_replicas) == (1, 4)
    assert (two.args["vllm"]["tensor_parallel_size"], two.max_replicas) == (2, 2)
    assert two.actor["num_gpus"] == 2
    chosen = choose(facts("qwen2.5-7b"), machine(L4, L4, L4, L4), gpus=4)
    assert (chosen.args["vllm"]["tensor_parallel_size"], chosen.max_replicas) == (4, 1)


@pytest.mark.parametrize(
    ("model", "there", "wish", "changes"),
    [
        ("qwen2.5-14b", machine(L4, L4), {"gpus": 1}, ["use 2 such GPUs (GPUS=2)", "quantized to 4 bits"]),
        ("qwen2.5-14b", machine(A10G), {}, ["use a machine with 2 such GPUs", "quantized to 4 bits"]),
        ("llama-3.1-8b", machine(L4), {"context": 65536}, ["lower the context to 32768 (CONTEXT=32768)"]),
        ("qwen2.5-32b", machine(H100, used=20_000), {}, ["end the programs that use 19.5 GiB of GPU 0"]),
        ("qwen2.5-14b", machine(RTX5000), {}, ["(QUANTIZATION=fp8_per_tensor)"]),
        ("llama-3.3-70b", machine(L4), {}, ["choose a smaller model"]),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_what_would(
    model: str, there: Machine, wish: dict[str, Any], changes: list[str]
) -> None:
    with pytest.raises(LaunchError, match="Too little memory") as refused:
        choose(facts(model), there, **wish)
    for change in changes:
        assert change in str(refused.value)


def test_the_changes_of_a_refusal_fit() -> None:
    assert choose(facts("qwen2.5-14b"), machine(L4, L4), gpus=2)
    assert choose(facts("llama-3.1-8b"), machine(L4), context=32768)
    choice = choose(facts("qwen2.5-14b"), machine(RTX5000), quantization="fp8_per_tensor")
    assert choice.args["vllm"]["quantization"] == "fp8_per_tensor"


def test_the_precision_of_weights_on_a_gpu_is_never_changed_unasked() -> None:
    for card in (L4, A10G, H100):
        args = choose(facts("qwen2.5-7b"), machine(card)).args
        assert "dtype" not in args
        assert "quantization" not in args["vllm"]


def test_vllms_share_leaves_what_other_programs_use() -> None:
    assert "gpu_memory_utilization" not in choose(facts("qwen2.5-7b"), machine(H100)).args["vllm"]
    choice = choose(facts("qwen2.5-7b"), machine(H100, used=20_000))
    share = choice.args["vllm"]["gpu_memory_utilization"]
    assert share * 81559 < 81559 - 20_000
    assert share == pytest.approx(1 - 20_000 / 81559, abs=0.02)
    assert any("other programs use 19.5 GiB of GPU 0" in line for line in choice.lines)


@pytest.mark.parametrize(
    ("there", "wish", "message"),
    [
        (machine(), {"engine": "other"}, r"ENGINE=other: can only be started from a configuration"),
        (machine(L4, L4), {"gpus": 3}, r"GPUS=3: this machine has 2"),
        (machine(), {"gpus": 1}, r"GPUS=1: no NVIDIA GPU was found"),
        (machine(L4), {"gpus": -1}, r"GPUS=-1: must be at least 0"),
        (machine(*[H100] * 8), {"gpus": 8}, r"GPUS=8: vLLM can't divide the model's 28 attention heads"),
        (machine(H100, driver=570), {}, r"driver has version 570, and vLLM's build needs 580.*GPUS=0"),
        (machine((16384, "Tesla V100", (7, 0))), {}, r"compute capability 7\.0, and CUDA 13 needs 7\.5"),
        (machine(), {"quantization": "fp8_per_tensor"}, r"QUANTIZATION works only with vLLM on a GPU"),
        (machine(H100), {"context": 65536}, r"CONTEXT=65536: the model's context is 32768 tokens"),
    ],
)
def test_options_that_do_not_fit_the_machine_are_refused(there: Machine, wish: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        choose(facts("qwen2.5-7b"), there, **wish)


def test_a_config_json_of_unknown_form_is_one_line() -> None:
    odd = Facts("org/mamba", {"model_type": "mamba"}, {})
    for there in (machine(H100), machine()):
        with pytest.raises(LaunchError, match=r"the config\.json of org/mamba has an unusual form"):
            choose(odd, there)


def test_without_a_gpu_the_native_engine_computes_on_the_cpu() -> None:
    choice = choose(facts("qwen2.5-7b"), machine())
    assert (choice.engine, choice.args["dtype"], choice.args["device_map"]) == ("native", "int8", "cpu")
    assert "num_gpus" not in choice.actor
    assert any("weights as int8" in line for line in choice.lines)
    assert choose(facts("qwen2.5-7b"), machine(H100), gpus=0).engine == "native"
    other = facts("qwen2.5-7b", model_type="phi3")
    assert choose(other, machine()).args["dtype"] == "float32"
    assert choose(other, machine(memory=24)).args["dtype"] == "bfloat16"  # float32 does not fit
    with pytest.raises(LaunchError, match=r"on the CPU: 11\.0 GiB are available.*CONTEXT=16384"):
        choose(facts("qwen2.5-7b"), machine(memory=11))


def test_why_a_gpu_is_not_used_is_told() -> None:
    there = Machine([], 64 * GIB, 8, "AMD GPUs are not supported.")
    assert choose(facts("qwen2.5-7b"), there).lines[0] == there.remark
    with pytest.raises(LaunchError, match=r"GPUS=1: no NVIDIA GPU was found\. AMD GPUs are not supported"):
        choose(facts("qwen2.5-7b"), there, gpus=1)


def test_engines_are_the_operators_choice() -> None:
    native = choose(facts("qwen2.5-7b"), machine(H100, H100), engine="native", gpus=2)
    assert (native.engine, native.args["device_map"], native.actor["num_gpus"]) == ("native", "auto", 2)
    assert any("several GPUs add memory but no speed" in line for line in native.lines)
    vllm = choose(facts("qwen2.5-0.5b"), machine(), engine="vllm")
    assert vllm.args["kv_cache_memory"] == "4096MiB"
    assert "num_gpus" not in vllm.actor


@pytest.mark.parametrize("there", [machine(L4, L4), machine()])
def test_the_configuration_is_config_yaml_with_one_backend(there: Machine) -> None:
    from deployments import strict_config

    choice = choose(facts("qwen2.5-7b"), there)
    config = one_model.configuration(CONFIG, choice)
    assert strict_config.find_problems(config) == []
    gateway, console, backend = config["applications"]
    assert console == CONFIG["applications"][-1]
    models = gateway["deployments"][0]["user_config"]["models"]
    before = CONFIG["applications"][0]["deployments"][0]["user_config"]["models"]
    assert models.keys() == before.keys()
    for identifier, model in models.items():
        assert model["backends"] == {backend["name"]: 100}
        assert model["price"] == before[identifier]["price"]
        assert (model["context_length"], model["max_output"]) == (32768, 4096)
    assert ("pressure" in gateway["deployments"][1]["user_config"]) == (not there.gpus)  # targets of a laptop
    [deployment] = backend["deployments"]
    assert deployment["max_ongoing_requests"] == choice.max_ongoing
    assert deployment["autoscaling_config"]["max_replicas"] == max(1, len(there.gpus))
    parse(ModelArgs, backend["args"], "args")
    assert yaml.safe_load((ROOT / "config.yaml").read_text()) == CONFIG


@pytest.mark.parametrize(
    ("model", "name"),
    [("Qwen/Qwen2.5-7B-Instruct", "qwen2-5-7b-instruct"), ("/m/My Model/", "my-model"), (".", "model")],
)
def test_a_backend_is_named_after_its_model(model: str, name: str) -> None:
    assert one_model.backend_name(model) == name


# Over the launcher, with an nvidia-smi on PATH.


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


def put_gpus(folder: Path, *memory: int, code: int = 0) -> None:
    lines = [f"{i}, GPU-{i}, NVIDIA L4, {mib}, {mib - 450}, 8.9, 580.95.05, [N/A]" for i, mib in enumerate(memory)]
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"exit {code}\n")
    program.chmod(0o755)


Dry = Callable[..., tuple[int, str, str]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Dry:
    """Runs the launcher in this process. Returns its exit status, output and errors."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(ROOT)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["serve-app", *arguments])
        code = launcher.main()
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_a_dry_run_prints_the_configuration_and_starts_nothing(tmp_path: Path, path: Path, start: Dry) -> None:
    folder = model_folders.save(tmp_path / "Tiny")
    put_gpus(path, 23034, 23034)
    code, out, err = start("--model", str(folder), "--gpus", "2", "--dry-run")
    assert code == 0, err
    config = yaml.safe_load(out)
    backend = config["applications"][-1]
    assert backend["name"] == "tiny"
    assert backend["args"]["model"] == str(folder)
    assert backend["args"]["vllm"]["tensor_parallel_size"] == 2
    assert backend["deployments"][0]["ray_actor_options"]["num_gpus"] == 2
    assert "on vLLM: 2 of 2 GPUs (NVIDIA L4)" in err
    assert not (tmp_path / "home").exists()
    put_gpus(path, code=9)
    assert "nvidia-smi fails" in start("--model", str(folder), "--dry-run")[2]
    code, out, _ = start("--model", str(folder), "--gpus", "0", "--dry-run")
    assert yaml.safe_load(out)["applications"][-1]["args"]["device_map"] == "cpu"


def test_options_of_one_model_need_it(start: Dry) -> None:
    for option in (("--gpus", "0"), ("--engine", "vllm"), ("--dry-run",)):
        code, _, err = start(*option)
        assert code == 1
        assert f"{option[0]} needs a model" in err


def test_a_path_that_is_no_model_is_named(tmp_path: Path, start: Dry) -> None:
    (tmp_path / "m.gguf").touch()
    for model in (str(tmp_path / "missing"), str(tmp_path / "m.gguf")):
        code, _, err = start("--model", model, "--gpus", "0", "--dry-run")
        assert code == 1
        assert f"MODEL={model} is not a folder" in err


def put_on_hub(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes a model whose file of weights has only the header: it says how large the tensors are."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, size in sizing.tensor_sizes(config).items():
        header[name] = {"dtype": "BF16", "shape": [size], "data_offsets": [end, end + 2 * size]}
        end += 2 * size
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def test_a_model_on_the_hub_that_does_not_fit_is_refused_before_its_download(
    tmp_path: Path, path: Path, start: Dry, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_hub(tmp_path / "files", sizing.MODELS["qwen2.5-14b"])
    put_gpus(path, 23034)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with served("org/big", tmp_path / "files") as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        code, _, err = start("--model", "org/big", "--dry-run")
        assert code == 1
        assert "Too little memory for org/big on 1 GPU" in err
        assert "use a machine with 2 such GPUs" in err
        put_gpus(path, 23034, 23034)
        code, out, err = start("--model", "org/big", "--dry-run")
        assert code == 0, err
        assert yaml.safe_load(out)["applications"][-1]["args"]["model"] == "org/big"
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_the_engine_is_installed_before_the_weights_are_prepared(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from serve_app.engine.loading import loader

    folder = model_folders.save(tmp_path / "tiny")
    put_gpus(path, 23034)
    steps: list[str] = []
    monkeypatch.delenv("SERVE_APP_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(vllm_environment, "install", lambda folder, cuda, say: steps.append(f"cuda {cuda}"))
    monkeypatch.setattr(loader, "prepare", lambda settings, say: steps.append(settings.model))
    options = argparse.Namespace(
        home=tmp_path / "home", port="8000", config=ROOT / "config.yaml", ready_timeout=None, tls=False,
        model=str(folder), engine=None, gpus=None, context=None, quantization=None,
    )  # fmt: skip
    config = launcher.Launch(options)._for_one_model(CONFIG)
    assert steps == ["cuda True", str(folder)]
    assert config["applications"][-1]["args"]["engine"] == "vllm"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_passes_the_model_and_its_options() -> None:
    given = ["MODEL=org/my model", "GPUS=2", "ENGINE=vllm", "CONTEXT=8192", "QUANTIZATION=fp8_per_tensor"]
    printed = subprocess.run(
        ["make", "-n", "-o", ".venv/.base", "serve", *given], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for part in ("--model 'org/my model'", "--gpus '2'", "--engine 'vllm'", "--context '8192'", "fp8_per_tensor"):
        assert part in printed
    plain = subprocess.run(
        ["make", "-n", "-o", ".venv/.base", "serve"], cwd=ROOT, capture_output=True, text=True, check=True,
        env={name: value for name, value in os.environ.items() if name not in ("MODEL", "GPUS", "ENGINE")},
    ).stdout  # fmt: skip
    assert "--" not in plain.partition("serve_app.launch")[2]
