"""The GPUs of one vLLM replica: `num_gpus` on one machine, or a placement group on one or several.

vLLM's Ray executor needs bundles of one GPU each, at least one per worker. It numbers its workers node by node,
beginning with the replica's node, so the workers of a tensor-parallel group are consecutive. The first bundle also
holds the replica, whose process computes nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Bundle = dict[str, float]


def group_of(tensor: int, pipeline: int, actor: Mapping[str, Any]) -> tuple[list[Bundle], str]:
    """Returns the bundles and the strategy for these parallel sizes and the replica's ray_actor_options (`actor`).

    A tensor-parallel group must be on one machine, so a single group has the strategy STRICT_PACK. Several pipeline
    stages have the strategy PACK, because they may be on several machines. With a custom resource of which each machine
    has one unit, each bundle takes 1 / `tensor` of it. One machine then gets one whole stage.
    """
    pool: Bundle = dict.fromkeys(actor.get("resources") or {}, 1 / tensor)
    worker: Bundle = {"GPU": 1, **pool}
    first: Bundle = {"CPU": actor.get("num_cpus", 1), **worker}
    strategy = "STRICT_PACK" if pipeline == 1 else "PACK"
    return [first, *({**worker} for _ in range(tensor * pipeline - 1))], strategy


def find_problems(tensor: int, pipeline: int, deployment: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yields the problems with the GPUs of a vLLM deployment in a config file, each with the right options."""
    actor: Mapping[str, Any] = deployment.get("ray_actor_options") or {}
    bundles, gpus = deployment.get("placement_group_bundles"), actor.get("num_gpus")
    number = tensor * pipeline
    size = f"vllm.tensor_parallel_size × pipeline_parallel_size is {number}"
    if bundles is None:
        # A replica of size 1 without num_gpus is valid, because it may run vLLM's CPU build.
        if gpus is None and number > 1:
            other = f", or over several machines {_text(tensor, pipeline, actor)}" if pipeline > 1 else ""
            yield f"{where}.ray_actor_options: {size}: set num_gpus to {number}{other}"
        elif gpus and gpus != number:
            yield f"{where}.ray_actor_options.num_gpus: {size}, and num_gpus is {gpus:g}: set it to {number}"
        return
    right = _text(tensor, pipeline, actor)
    if gpus:
        yield (
            f"{where}.ray_actor_options.num_gpus: the replica would take the GPU of vLLM's first worker from the "
            "placement group: remove num_gpus"
        )
    if wrong := _wrong_bundles(tensor, pipeline, bundles, actor):
        yield f"{where}.placement_group_bundles: {wrong}: write {right}"
    strategy = deployment.get("placement_group_strategy", "PACK")
    wanted = group_of(tensor, pipeline, actor)[1]
    if pipeline == 1 and tensor > 1 and strategy != wanted:
        yield (
            f"{where}.placement_group_strategy: with {strategy}, the GPUs that share a layer may be on several "
            f"machines: set it to {wanted}"
        )
    if pipeline > 1 and strategy not in ("PACK", "STRICT_PACK"):
        yield f"{where}.placement_group_strategy: {strategy} divides a stage among machines: set it to {wanted}"


def _wrong_bundles(tensor: int, pipeline: int, bundles: Any, actor: Mapping[str, Any]) -> str | None:
    if not isinstance(bundles, list) or not all(isinstance(bundle, dict) for bundle in bundles):
        return "must be a list of resources"
    gpus = [bundle.get("GPU", 0) for bundle in bundles]
    if any(number not in (0, 1) for number in gpus):
        return "each bundle must have one GPU or none"
    if sum(gpus) != tensor * pipeline:
        return f"vLLM has {tensor * pipeline} workers, and the bundles have {sum(gpus):g} GPUs"
    if not gpus[0] and pipeline > 1:
        return "the first bundle, which holds the replica, needs a GPU, so that vLLM's first worker is beside it"
    if bundles[0].get("CPU", 0) < actor.get("num_cpus", 1):
        return f"the replica needs {actor.get('num_cpus', 1):g} CPU in the first bundle"
    pools: Mapping[str, float] = actor.get("resources") or {}
    if lacking := [name for name, amount in pools.items() if bundles[0].get(name, 0) < amount]:
        return f"the replica needs more {lacking[0]} (ray_actor_options.resources) than the first bundle has"
    if pipeline > 1 and (missing := [name for bundle in bundles for name in sorted(pools.keys() - bundle.keys())]):
        return f"a bundle without the resource {missing[0]} may be placed in another pool"
    return None


def _text(tensor: int, pipeline: int, actor: Mapping[str, Any]) -> str:
    """Returns the right options as they are written in YAML."""
    bundles, strategy = group_of(tensor, pipeline, actor)
    items = ", ".join("{" + ", ".join(f"{name}: {amount:g}" for name, amount in one.items()) + "}" for one in bundles)
    text = f"placement_group_bundles: [{items}], placement_group_strategy: {strategy}"
    if pools := actor.get("resources"):
        shares = ", ".join(f"{name}: {1 / tensor:g}" for name in pools)
        text += f", and ray_actor_options with resources: {{{shares}}}"
    return text
