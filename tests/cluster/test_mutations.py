"""Mistakes in a production set, one at a time: each is reported, with the object it is in."""

from __future__ import annotations

import copy

import pytest

from .checks import DRAIN, HARD_STOP
from .edit import Edit
from .manifests import Manifests, read_set
from .mutations import CERTIFICATES, CONNECTIONS, PLACES, SECRETS, TIMES
from .mutations_of_gateways import GATEWAYS
from .mutations_of_placement import DEFINITIONS, IMAGES, PLACEMENT, REQUESTS
from .mutations_of_pods import NETWORK, PODS
from .validate import problems

POOLS = ("head", "gateway", "accounting", "l40s", "h100", "h100x4")
MUTATIONS = {
    f"{part}: {name}": mutation
    for part, table in [
        ("times", TIMES),
        ("secrets", SECRETS),
        ("connections", CONNECTIONS),
        ("certificates", CERTIFICATES),
        ("places", PLACES),
        ("pods", PODS),
        ("network", NETWORK),
        ("placement", PLACEMENT),
        ("images", IMAGES),
        ("requests", REQUESTS),
        ("definitions", DEFINITIONS),
        ("gateways", GATEWAYS),
    ]
    for name, mutation in table.items()
}


@pytest.fixture(scope="module")
def production() -> Manifests:
    return read_set("production")


@pytest.mark.parametrize("formed", ["RayService", pytest.param("", marks=[pytest.mark.slow, pytest.mark.long])])
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_reported_with_its_object(production: Manifests, name: str, formed: str) -> None:
    change, expected = MUTATIONS[name]
    edit = Edit(production)
    change(edit)
    found = problems(edit.result(), formed=formed)
    assert any(expected in problem for problem in found), found
    assert all("/" in problem.split(" ")[0] or problem.startswith("PrometheusRule") for problem in found)


@pytest.mark.parametrize(("digest", "accepted"), [("sha256:" + "0a" * 32, True), ("sha256:0a", False)])
def test_an_image_may_be_pinned_by_its_digest(production: Manifests, digest: str, accepted: bool) -> None:
    edit = Edit(production)
    edit.container("h100").update(image=f"registry.example.com/serve-app-model@{digest}")
    found = problems(edit.result(), formed="RayService")
    assert any("is not pinned" in problem for problem in found) != accepted


def test_a_resource_of_ordinary_and_of_spot_machines_is_no_mistake(production: Manifests) -> None:
    edit = Edit(production)
    group = copy.deepcopy(edit.group("l40s")) | {"groupName": "l40s-spot", "replicas": 0, "minReplicas": 0}
    group["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-spot"] = "true"
    edit.of("RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"].append(group)
    assert problems(edit.result()) == []


def test_a_misspelt_key_of_a_pod_is_reported(production: Manifests) -> None:
    edit = Edit(production)
    edit.pod("l40s").update(toleration=[])
    [found] = problems(edit.result())
    assert found.startswith("RayService/serve-app: ")
    assert "'toleration' was unexpected" in found


def test_the_rules_of_kuberays_definition_are_evaluated(production: Manifests) -> None:
    edit = Edit(production)
    edit.of("RayService")["spec"]["managedBy"] = "somebody"
    edit.container("h100")["env"].append({"name": "HOME", "value": "/"})
    first, second = sorted(problems(edit.result()))
    assert first.startswith("RayService/serve-app: spec.managedBy: the managedBy field value must be either")
    assert second.endswith("there is another with the same name")


@pytest.mark.parametrize("variable", [DRAIN, HARD_STOP, "RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_HAPROXY_RETRY_ON"])
@pytest.mark.parametrize("pool", POOLS)
def test_a_flag_that_one_kind_of_pod_lacks_is_reported(production: Manifests, pool: str, variable: str) -> None:
    edit = Edit(production)
    edit.set_env(pool, variable, None)
    found = problems(edit.result(), formed="RayService")
    assert f"RayService/serve-app {pool}: {variable} is missing" in found
