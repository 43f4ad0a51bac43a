"""Makes the configuration that serves one model on this machine: `make serve MODEL=…`.

The configuration is config.yaml with one backend. Context, memory and the number of sequences are computed from the
model's files and the machine. A model that does not fit is refused before its weights are downloaded.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import psutil

from serve_app.contracts.units import GIB
from serve_app.engine.errors import ModelError
from serve_app.engine.loading import checkpoint
from serve_app.engine.loading.checkpoint import Tensor
from serve_app.engine.loading.progress import Say
from serve_app.launch.gpus import CPU_INSTEAD, Gpu
from serve_app.launch.preflight import LaunchError

MODEL = "deployments.apps:model"
MAX_CONTEXT = 32768  # tokens; the maximum if the operator does not set a context
MAX_OUTPUT = 4096
MAX_RUNNING, MIN_RUNNING = 256, 8  # sequences on a GPU
REQUIRED_SEQUENCES = 32  # a model fits if memory also has room for this many sequences
TYPICAL_TOKENS = 2048  # of KV cache per running sequence: most are far shorter than the context
CPU_RUNNING = 16
MAX_CPU_KV = 4 * GIB  # maximum KV cache on a CPU, which the engine allocates as needed
OTHER_PROCESSES = GIB  # memory of Ray's and the service's other processes
MIN_CONTEXT = 2048  # tokens; a shorter context is of little use
MIN_DRIVER = 580  # for CUDA 13, with which torch and vLLM are built
MIN_CAPABILITY = (7, 5)
#: Families that the native engine computes in int8 on a CPU (docs/models.md).
INT8 = {"llama", "mistral", "qwen2", "qwen3"}


@dataclass(frozen=True, slots=True)
class Facts:
    """A model as its config.json and the headers of its weights describe it."""

    model: str  # the setting `model`
    config: Mapping[str, Any]  # config.json
    tensors: Mapping[str, Tensor]
    download: int = 0  # bytes to download

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of config.json about the language model."""
        return self.config.get("text_config") or self.config

    @property
    def context(self) -> int | None:
        """The model's context in tokens, if config.json has it."""
        names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
        return next((int(self.text[name]) for name in names if self.text.get(name)), None)


@dataclass(frozen=True, slots=True)
class Wish:
    """The operator's options. `choose` decides on those that are None."""

    engine: str | None = None
    gpus: int | None = None
    context: int | None = None
    quantization: str | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    gpus: Sequence[Gpu]
    memory: int  # bytes that are available
    cores: int
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend for one model."""

    engine: str
    args: dict[str, Any]
    actor: dict[str, Any]  # ray_actor_options
    context: int
    max_ongoing: int
    max_replicas: int
    on_gpu: bool
    lines: list[str] = field(default_factory=list)  # for the operator


def machine(gpus: Sequence[Gpu], remark: str = "") -> Machine:
    """Returns this machine, with the GPUs that were found."""
    from serve_app.engine.loading.placement import available_memory

    return Machine(gpus, available_memory(), psutil.cpu_count(logical=False) or os.cpu_count() or 1, remark)


def hub_folder() -> Path:
    """Returns the folder that the hub's files are downloaded to. Creates it."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def facts_of(model: str, say: Say) -> Facts:
    """Reads a model's facts from a folder, the hub's cache, or the hub. Raises ModelError."""
    from serve_app.engine.loading import hub

    path = Path(model).expanduser()
    if path.is_dir():
        checkpoint.check(path)
        return _of_folder(str(path.absolute()), path)
    if path.is_file() or path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelError(
            f"MODEL={model} is not a folder with config.json and safetensors: name such a folder, or a model on the "
            "hub (organisation/name). For a .gguf file, set it as `model` in a copy of config.yaml."
        )
    try:
        folder = hub.cached(model)
        checkpoint.check(folder)
        return _of_folder(model, folder)
    except ModelError:
        config, tensors = hub.describe(model, say)
        return Facts(model, config, tensors, sum(tensor.num_bytes for tensor in tensors.values()))


def _of_folder(model: str, folder: Path) -> Facts:
    return Facts(model, json.loads((folder / "config.json").read_text(encoding="utf-8")), checkpoint.tensors(folder))


def choose(facts: Facts, wish: Wish, machine: Machine, python: str) -> Choice:
    """Chooses the backend. `python` is the interpreter of vLLM's environment.

    Raises LaunchError if the options or the model do not fit the machine. The message says what to change.
    """
    gpus = list(machine.gpus)
    if wish.gpus is not None and wish.gpus < 0:
        raise LaunchError(f"GPUS={wish.gpus}: must be at least 0")
    if wish.gpus is not None and wish.gpus > len(gpus):
        available = f"this machine has {len(gpus)}" if gpus else "no NVIDIA GPU was found"
        raise LaunchError(f"GPUS={wish.gpus}: {available}. {machine.remark}".strip())
    if wish.gpus == 0:
        gpus = []
    engine = wish.engine or ("vllm" if gpus else "native")
    if engine not in ("vllm", "native"):
        raise LaunchError(f"ENGINE={engine}: can only be started from a configuration (docs/guides/add-a-model.md)")
    if wish.quantization and (engine != "vllm" or not gpus):
        raise LaunchError("QUANTIZATION works only with vLLM on a GPU: leave it out")
    own = facts.context
    context = wish.context or min(own or MAX_CONTEXT, MAX_CONTEXT)
    if own is not None and context > own:
        raise LaunchError(f"CONTEXT={context}: the model's context is {own} tokens")
    if context < 2:
        raise LaunchError(f"CONTEXT={context}: must be at least 2")
    try:
        if engine == "vllm" and gpus:
            return _vllm_on_gpus(facts, wish, gpus, context, python)
        if engine == "vllm":
            return _vllm_on_cpu(facts, machine, context, python)
        if gpus:
            return _native_on_gpus(facts, gpus[: wish.gpus or 1], context)
        return _native_on_cpu(facts, machine, context)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise LaunchError(
            f"the config.json of {facts.model} has an unusual form ({error!r}): write a configuration for it by hand "
            "(docs/guides/add-a-model.md)"
        ) from None


def _vllm_on_gpus(facts: Facts, wish: Wish, gpus: list[Gpu], context: int, python: str) -> Choice:
    from serve_app.engine.loading import vllm_memory
    from serve_app.engine.loading.memory_plan import Device

    for gpu in gpus:
        _check_gpu(gpu)
    if wish.gpus is not None and not vllm_memory.can_divide(facts.config, wish.gpus):
        raise LaunchError(
            f"GPUS={wish.gpus}: vLLM can't divide the model's {facts.text['num_attention_heads']} attention heads "
            "among them: use a number of GPUs that divides the number of heads"
        )
    fullest = min(gpus, key=lambda gpu: gpu.free)
    smallest = min(gpu.memory for gpu in gpus)
    budget = vllm_memory.budget(smallest, fullest.free)
    step = vllm_memory.step_tokens(smallest, fullest.name)
    weights = vllm_memory.weight_bytes(facts.tensors, wish.quantization)

    def plan(count: int, sequences: int = REQUIRED_SEQUENCES) -> Any:
        demand = vllm_memory.demand_of(
            facts.model, facts.config, weights, context=context, gpus=count, sequences=sequences, step=step
        )
        return vllm_memory.plan(demand, [Device(f"GPU {gpu.index}", budget) for gpu in gpus[:count]])

    counts = [wish.gpus] if wish.gpus else [n for n in (1, 2, 4, 8, 16) if n <= len(gpus)]
    counts = [count for count in counts if vllm_memory.can_divide(facts.config, count)]
    refusal = None
    for count in counts:
        try:
            found = plan(count)
            break
        except ModelError as error:
            refusal = error
    else:
        changes = vllm_memory.changes(
            facts.model,
            facts.config,
            facts.tensors,
            context=context,
            step=step,
            sequences=REQUIRED_SEQUENCES,
            budget=budget,
            gpus=counts[-1],
            computes_fp8=all(gpu.capability >= vllm_memory.FP8_CAPABILITY for gpu in gpus) and not wish.quantization,
        )
        raise LaunchError(f"{refusal}: {_advice(changes, len(gpus), fullest)}")
    running = _running(found.kv // found.demand.kv_token)
    found = plan(count, running)
    tokens = found.kv // found.demand.kv_token
    options: dict[str, Any] = {"tensor_parallel_size": count}
    if wish.quantization:
        options["quantization"] = wish.quantization
    if fullest.free < smallest * vllm_memory.UTILIZATION:  # vLLM does not start if its share is not free
        options["gpu_memory_utilization"] = max(0.01, int(100 * fullest.free / smallest) / 100 - 0.01)
    args = {
        "model": facts.model,
        "engine": "vllm",
        "max_context": context,
        "max_output": _max_output(context),
        "max_running": running,
        "max_waiting": 2 * running,
        "vllm": options,
    }
    actor = {"num_cpus": 2, "num_gpus": count, "runtime_env": {"py_executable": python}}
    lines = [f"{facts.model} on vLLM: {count} of {len(gpus)} GPUs ({fullest.name})", *found.lines()]
    lines += [f"room for {running} sequences of {tokens // running:,} tokens, or {tokens // context} of {context:,}"]
    if fullest.is_shared:
        lines.append(
            f"other programs use {(fullest.memory - fullest.free) / GIB:.1f} GiB of GPU {fullest.index}; the service "
            "uses the rest"
        )
    return Choice("vllm", args, actor, context, _ongoing(args), len(gpus) // count, True, lines)


def _check_gpu(gpu: Gpu) -> None:
    if gpu.driver < MIN_DRIVER:
        raise LaunchError(
            f"the NVIDIA driver has version {gpu.driver}, and vLLM's build needs {MIN_DRIVER}: update the driver, "
            + CPU_INSTEAD
        )
    if gpu.capability < MIN_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (gpu.capability, MIN_CAPABILITY))
        raise LaunchError(
            f"GPU {gpu.index} ({gpu.name}) has compute capability {have}, and CUDA 13 needs {need}: hide it with "
            f"CUDA_VISIBLE_DEVICES, {CPU_INSTEAD}"
        )


def _advice(changes: Sequence[Any], num_gpus: int, gpu: Gpu) -> str:
    """Returns the changes as text, each with the variable of `make serve` for it."""
    texts = []
    for change in changes:
        name, _, value = change.variable.partition("=")
        if name == "GPUS" and int(value) > num_gpus:
            texts.append(f"use a machine with {value} such GPUs")
        else:
            texts.append(change.text + (f" ({change.variable})" if change.variable else ""))
    if gpu.is_shared:
        hide = ", or hide it with CUDA_VISIBLE_DEVICES" if num_gpus > 1 else ""
        texts.insert(0, f"end the programs that use {(gpu.memory - gpu.free) / GIB:.1f} GiB of GPU {gpu.index}{hide}")
    return ", or ".join([*texts, "choose a smaller model"])


def _vllm_on_cpu(facts: Facts, machine: Machine, context: int, python: str) -> Choice:
    from serve_app.engine.loading import vllm_memory

    if sys.platform != "linux":
        raise LaunchError("ENGINE=vllm needs Linux: leave it out")
    weights = vllm_memory.weight_bytes(facts.tensors)
    demand = vllm_memory.demand_of(facts.model, facts.config, weights, context=context, step=2048)
    kv = _cpu_kv(facts, context, demand, weights + demand.step, machine)
    args = {
        "model": facts.model,
        "engine": "vllm",
        "kv_cache_memory": kv,
        "max_context": context,
        "max_output": _max_output(context),
        "max_running": CPU_RUNNING,
        "max_waiting": 2 * CPU_RUNNING,
    }
    actor = {"num_cpus": max(1, machine.cores), "runtime_env": {"py_executable": python}}
    lines = [*filter(None, [machine.remark]), f"{facts.model} on vLLM's CPU build; the native engine is faster there"]
    return Choice("vllm", args, actor, context, _ongoing(args), 1, False, lines)


def _native_on_gpus(facts: Facts, gpus: list[Gpu], context: int) -> Choice:
    from serve_app.engine.loading import memory_plan, placement
    from serve_app.engine.loading.memory_plan import Device

    for gpu in gpus:
        _check_gpu(gpu)
    args = {
        "model": facts.model,
        "dtype": "bfloat16",
        "device_map": "auto",
        "kv_cache_memory": "auto",
        "max_context": context,
        "max_output": _max_output(context),
        "max_running": 64,
        "max_waiting": 128,
    }
    settings = _settings(args)
    sizes = {name: tensor.elements for name, tensor in facts.tensors.items()}
    weights = placement.weight_bytes(sizes, "bfloat16")
    demand = memory_plan.demand_of(facts.model, facts.config, sizes, weights, settings)
    try:
        found = memory_plan.plan(demand, [Device(f"cuda:{index}", gpu.free) for index, gpu in enumerate(gpus)], None)
    except ModelError as error:
        raise LaunchError(str(error)) from None
    lines = [f"{facts.model} on the native engine: {len(gpus)} GPUs ({gpus[0].name})", *found.lines()]
    lines.append("vLLM is several times as fast on a GPU: leave ENGINE out")
    if len(gpus) > 1:
        lines.append("with the native engine, several GPUs add memory but no speed")
    actor = {"num_cpus": 2, "num_gpus": len(gpus)}
    return Choice("native", args, actor, context, _ongoing(args), 1, True, lines)


def _native_on_cpu(facts: Facts, machine: Machine, context: int) -> Choice:
    from serve_app.engine.loading import memory_plan, placement, vllm_memory

    in_int8 = facts.text.get("model_type") in INT8 and not vllm_memory.is_quantized(facts.config)
    sizes = {name: tensor.elements for name, tensor in facts.tensors.items()}
    refusal = None
    for dtype in ("int8",) if in_int8 else ("float32", "bfloat16"):
        args = {
            "model": facts.model,
            "dtype": dtype,
            "device_map": "cpu",
            "num_threads": max(1, machine.cores),
            "kv_cache_memory": 1,
            "max_context": context,
            "max_output": _max_output(context),
            "max_running": CPU_RUNNING,
            "max_waiting": 4 * CPU_RUNNING,
        }
        weights = placement.weight_bytes(sizes, dtype)
        demand = memory_plan.demand_of(facts.model, facts.config, sizes, weights, _settings(args))
        try:
            args["kv_cache_memory"] = _cpu_kv(facts, context, demand, weights + demand.step, machine)
        except LaunchError as error:
            refusal = error
            continue
        lines = [*filter(None, [machine.remark]), f"{facts.model} on the CPU, with weights as {dtype}"]
        return Choice("native", args, {"num_cpus": 1}, context, _ongoing(args), 1, False, lines)
    assert refusal is not None
    raise refusal


def _cpu_kv(facts: Facts, context: int, demand: Any, other: int, machine: Machine) -> str:
    """Returns kv_cache_memory on the CPU. Raises LaunchError if one sequence of `context` tokens does not fit."""
    free = machine.memory - other - OTHER_PROCESSES
    if free < demand.least_kv:
        shorter = context // 2
        while shorter >= MIN_CONTEXT and shorter * demand.kv_token > free:
            shorter //= 2
        needed = other + demand.least_kv + OTHER_PROCESSES
        changes = [f"lower the context to {shorter} (CONTEXT={shorter})"] if shorter >= MIN_CONTEXT else []
        raise LaunchError(
            f"Too little memory for {facts.model} on the CPU: {machine.memory / GIB:.1f} GiB are available, about "
            f"{needed / GIB:.1f} GiB are needed: "
            + ", or ".join([*changes, "close other programs", "choose a smaller model"])
        )
    chosen = max(demand.least_kv, min(context * CPU_RUNNING * demand.kv_token, MAX_CPU_KV, free // 2))
    return f"{-(-chosen // 2**20)}MiB"


def _settings(args: Mapping[str, Any]) -> Any:
    from serve_app.engine.config import EngineSettings

    return EngineSettings.model_validate(args)


def _max_output(context: int) -> int:
    return min(MAX_OUTPUT, max(1, context // 2))


def _running(tokens: int) -> int:
    """Returns the number of concurrent sequences for a KV cache of `tokens`: a power of two."""
    wanted = max(MIN_RUNNING, min(MAX_RUNNING, tokens // TYPICAL_TOKENS))
    return 1 << (wanted.bit_length() - 1)


def _ongoing(args: Mapping[str, Any]) -> int:
    """Returns max_ongoing_requests. Requests above it would wait without fair queueing (docs/guides/vllm.md)."""
    return int(args["max_running"]) + ceil(args["max_running"] / 8) + int(args["max_waiting"])


def backend_name(model: str) -> str:
    """Returns the application's name for a model: the last part of the model's name, in lower case."""
    return re.sub(r"[^a-z0-9]+", "-", Path(model).name.lower()).strip("-") or "model"


def configuration(base: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """Returns `base` with the choice as its only backend, which serves all of its identifiers."""
    config = copy.deepcopy(dict(base))
    name = backend_name(choice.args["model"])
    applications = [one for one in config.get("applications") or [] if isinstance(one, dict)]
    models = [one for one in applications if one.get("import_path") == MODEL]
    others = [one for one in applications if one.get("import_path") != MODEL]
    if name in {one.get("name") for one in others}:
        name = f"{name}-model"
    for application in others:
        for one in application.get("deployments") or []:
            settings = one.get("user_config") or {}
            for identifier in (settings.get("models") or {}).values():
                identifier["backends"] = {name: 100}
                identifier.pop("fallback", None)
                identifier["context_length"] = choice.context
                identifier["max_output"] = choice.args["max_output"]
            if choice.on_gpu:
                settings.pop("pressure", None)  # these targets are for a laptop's CPU
    given = next((one for model in models for one in model.get("deployments") or []), {"name": "Model"})
    deployment: dict[str, Any] = copy.deepcopy(given)
    deployment["max_ongoing_requests"] = choice.max_ongoing
    if isinstance(scaling := deployment.get("autoscaling_config"), dict):
        scaling |= {"min_replicas": 1, "max_replicas": choice.max_replicas}
    deployment["ray_actor_options"] = choice.actor
    backend = {"name": name, "route_prefix": None, "import_path": MODEL, "args": choice.args}
    config["applications"] = [*others, {**backend, "deployments": [deployment]}]
    return config
