"""The GPUs of a vLLM replica: wrong ones are refused before the start, with the right ones in the message."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import yaml

from deployments import strict_config
from deployments.placement_groups import group_of

from .test_strict_config import GOOD, ROOT


def problems(args: dict[str, Any], **deployment: Any) -> list[str]:
    config = copy.deepcopy(GOOD)
    actor = {"runtime_env": {"py_executable": "/opt/vllm/bin/python"}, **deployment.pop("actor", {})}
    backend = config["applications"][1]
    backend["args"] = {"model": "m", "engine": "vllm", "vllm": args}
    backend["deployments"] = [{"name": "Model", "ray_actor_options": actor, **deployment}]
    return strict_config.find_problems(config)


def written(problem: str) -> dict[str, Any]:
    """Returns the options that a problem's text tells to write."""
    [bundles] = re.findall(r"placement_group_bundles: (\[.*?\])", problem)
    [strategy] = re.findall(r"placement_group_strategy: (\w+)", problem)
    return {"placement_group_bundles": yaml.safe_load(bundles), "placement_group_strategy": strategy}


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (8, 1), (4, 2), (1, 3)])
def test_the_bundles_for_parallel_sizes_are_valid(sizes: tuple[int, int]) -> None:
    tensor, pipeline = sizes
    bundles, strategy = group_of(tensor, pipeline, {"num_cpus": 2})
    assert [bundle["GPU"] for bundle in bundles] == [1] * (tensor * pipeline)  # vLLM takes bundles of one GPU
    assert strategy == ("STRICT_PACK" if pipeline == 1 else "PACK")
    args = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    group = {"placement_group_bundles": bundles, "placement_group_strategy": strategy}
    assert problems(args, **group, actor={"num_cpus": 2}) == []


def test_each_stage_fills_one_machine_of_its_pool() -> None:
    bundles, _ = group_of(4, 2, {"resources": {"h100": 0.25}})
    assert len(bundles) == 8
    assert sum(bundle["h100"] for bundle in bundles[:4]) == 1  # all of what a machine has


@pytest.mark.parametrize(
    ("args", "deployment", "wrong"),
    [
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {}, "set num_gpus to 4, or over several machines"),
        ({"tensor_parallel_size": 2}, {"actor": {"num_gpus": 4}}, "is 2, and num_gpus is 4: set it to 2"),
        (
            {"tensor_parallel_size": 2},
            {"placement_group_bundles": [{"CPU": 1, "GPU": 2}]},
            "each bundle must have one GPU or none",
        ),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            {"placement_group_bundles": [{"CPU": 1, "GPU": 1}] * 3},
            "vLLM has 4 workers, and the bundles have 3 GPUs",
        ),
        (
            {"pipeline_parallel_size": 2},
            {"placement_group_bundles": [{"CPU": 1}, {"GPU": 1}, {"GPU": 1}]},
            "the first bundle, which holds the replica, needs a GPU",
        ),
        (
            {"tensor_parallel_size": 2},
            {"placement_group_bundles": [{"CPU": 1, "GPU": 1}, {"GPU": 1}], "actor": {"num_gpus": 1}},
            "remove num_gpus",
        ),
        (
            {"tensor_parallel_size": 2},
            {"placement_group_bundles": [{"CPU": 1, "GPU": 1}, {"GPU": 1}], "actor": {"num_cpus": 4}},
            "the replica needs 4 CPU in the first bundle",
        ),
        (
            {"tensor_parallel_size": 2},
            {"placement_group_bundles": [{"CPU": 1, "GPU": 1}, {"GPU": 1}]},
            "placement_group_strategy: with PACK, the GPUs that share a layer may be on several machines",
        ),
        (
            {"pipeline_parallel_size": 2},
            {
                "placement_group_bundles": [{"CPU": 1, "GPU": 1, "h100": 1}, {"GPU": 1}],
                "actor": {"resources": {"h100": 1}},
            },
            "a bundle without the resource h100 may be placed in another pool",
        ),
    ],
)
def test_wrong_gpus_are_refused(args: dict[str, Any], deployment: dict[str, Any], wrong: str) -> None:
    found = problems(args, **copy.deepcopy(deployment))
    assert any(wrong in problem for problem in found), found
    assert all(problem.startswith("applications.1.deployments.0.") for problem in found)


def test_one_stage_is_never_advised_to_use_several_machines() -> None:
    [problem] = problems({"tensor_parallel_size": 2})
    assert problem.endswith("is 2: set num_gpus to 2")


@pytest.mark.parametrize("resources", [{}, {"h100": 1}])
def test_what_the_message_says_to_write_is_accepted(resources: dict[str, float]) -> None:
    args = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    actor = {"num_cpus": 2, "resources": resources}
    [problem] = problems(args, placement_group_bundles=[{"CPU": 2}, {"GPU": 4}], actor=actor)
    shares = dict.fromkeys(resources, 0.5)
    if resources:
        assert "resources: {h100: 0.5}" in problem
    assert problems(args, **written(problem), actor={"num_cpus": 2, "resources": shares}) == []


def test_the_cpu_build_needs_no_gpus() -> None:
    assert problems({}) == []
    assert problems({"tensor_parallel_size": 2}, actor={"num_gpus": 0}) == []


def applications() -> list[tuple[str, dict[str, Any]]]:
    files = [ROOT / "config.yaml", *sorted((ROOT / "cluster").rglob("*.yaml"))]
    found = []
    for file in files:
        for document in yaml.safe_load_all(file.read_text()):
            spec = (document or {}).get("spec") or {}
            served = yaml.safe_load(spec["serveConfigV2"]) if spec.get("serveConfigV2") else document or {}
            found += [(file.name, one) for one in served.get("applications") or []]
    return found


def test_no_shipped_file_divides_a_model_among_gpus_with_the_native_engine() -> None:
    """It would add memory and no speed."""
    models = [(file, one) for file, one in applications() if one["import_path"] == strict_config.MODEL]
    assert len(models) >= 3
    for file, application in models:
        if application["args"].get("engine", "native") == "native":
            for deployment in application.get("deployments") or []:
                assert (deployment.get("ray_actor_options") or {}).get("num_gpus", 0) <= 1, (file, application["name"])
