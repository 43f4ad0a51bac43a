"""The RayService: KubeRay accepts it, Serve reads all of it, it cuts no stream; broken copies are rejected."""

from typing import Any

import pytest
import yaml

from .checks import CLUSTER, Document, flags, pod_templates, rayservice_problems, read
from .mutate import broken, renamed

CLUSTER_SPEC = "spec/rayClusterConfig"
HEAD_POD = f"{CLUSTER_SPEC}/headGroupSpec/template/spec"
GATEWAY_POD = f"{CLUSTER_SPEC}/workerGroupSpecs/0/template/spec"
GPU_POD = f"{CLUSTER_SPEC}/workerGroupSpecs/1/template/spec"


@pytest.fixture
def rayservice() -> Document:
    return read("rayservice.yaml")


def environment(pod: Document) -> dict[str, Any]:
    return {variable["name"]: variable for variable in pod["spec"]["containers"][0]["env"]}


def test_the_rayservice_is_valid(rayservice: Document) -> None:
    assert rayservice_problems(rayservice) == []


def test_the_serve_config_is_the_one_of_the_launcher_clusters(rayservice: Document) -> None:
    assert yaml.safe_load(rayservice["spec"]["serveConfigV2"]) == read("serve-gpu.yaml")


def test_every_pod_has_the_flags_of_the_launcher_clusters(rayservice: Document) -> None:
    for pod in pod_templates(rayservice).values():
        given = {name: variable.get("value") for name, variable in environment(pod).items()}
        assert {name: given.get(name) for name in flags()} == flags()


def test_one_gateway_node_may_fail(rayservice: Document) -> None:
    gateway = rayservice["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert gateway["minReplicas"] >= 2
    assert "nvidia.com/gpu" not in str(gateway["template"])
    assert rayservice["spec"]["excludeHeadPodFromServeSvc"] is True


def test_a_gpu_worker_has_room_for_a_replica(rayservice: Document) -> None:
    gpu = rayservice["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]
    limits = gpu["template"]["spec"]["containers"][0]["resources"]["limits"]
    serve = yaml.safe_load(rayservice["spec"]["serveConfigV2"])
    replica = serve["applications"][1]["deployments"][0]
    assert int(limits["nvidia.com/gpu"]) >= replica["ray_actor_options"]["num_gpus"]
    assert int(limits["cpu"]) >= replica["ray_actor_options"]["num_cpus"]
    assert gpu["maxReplicas"] >= replica["autoscaling_config"]["max_replicas"]


def test_every_secret_that_is_used_is_in_the_template(rayservice: Document) -> None:
    template = read("secret.template.yaml")
    used = set()
    for pod in pod_templates(rayservice).values():
        for variable in environment(pod).values():
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference:
                used.add((reference["name"], reference["key"]))
    password = rayservice["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisPassword"]
    used.add(tuple(password["valueFrom"]["secretKeyRef"].values()))
    assert used == {(template["metadata"]["name"], key) for key in template["stringData"]}


def test_the_templates_hold_no_secret() -> None:
    assert set(read("secret.template.yaml")["stringData"].values()) == {"REPLACE_ME"}
    lines = (CLUSTER / "secrets.env.template").read_text(encoding="utf-8").splitlines()
    values = {line.split("=", 1)[0]: line.split("=", 1)[1] for line in lines if not line.startswith("#")}
    assert set(values.values()) == {"REPLACE_ME", "token"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec/serveConfigV2", {"applications": []}),
        (f"{CLUSTER_SPEC}/workerGroupSpecs/1/maxReplicas", "four"),
        (f"{CLUSTER_SPEC}/authOptions/mode", "tokens"),
        (f"{CLUSTER_SPEC}/authOptions/mode", "disabled"),
        (f"{CLUSTER_SPEC}/gcsFaultToleranceOptions/redisPassword", None),
        (f"{CLUSTER_SPEC}/headGroupSpec/rayStartParams/num-cpus", "4"),
        (f"{HEAD_POD}/containers/0/resources/limits/cpu", ["2"]),
        (f"{GPU_POD}/containers/0/env/0/value", "0"),
        (f"{GPU_POD}/volumes/0", {"name": "shm", "emptyDir": {}}),
        (f"{GPU_POD}/terminationGracePeriodSeconds", 30),
        (f"{GATEWAY_POD}/containers/0/env/2/value", "120"),
        ("spec/rayClusterDeletionDelaySeconds", 60),
    ],
)
def test_a_wrong_value_is_found(rayservice: Document, path: str, value: object) -> None:
    assert rayservice_problems(broken(rayservice, path, value)) != []


@pytest.mark.parametrize(
    "path",
    [
        f"{CLUSTER_SPEC}/headGroupSpec",
        f"{CLUSTER_SPEC}/authOptions",
        f"{CLUSTER_SPEC}/gcsFaultToleranceOptions/redisPassword",
        f"{CLUSTER_SPEC}/workerGroupSpecs/0/groupName",
        f"{GATEWAY_POD}/terminationGracePeriodSeconds",
        f"{GATEWAY_POD}/volumes/1",
        f"{HEAD_POD}/containers/0/volumeMounts/0",
        "spec/rayClusterDeletionDelaySeconds",
    ],
)
def test_a_missing_part_is_found(rayservice: Document, path: str) -> None:
    assert rayservice_problems(broken(rayservice, path)) != []


@pytest.mark.parametrize(
    ("pod", "position"),
    [(pod, position) for pod in (HEAD_POD, GATEWAY_POD, GPU_POD) for position in range(5)]
    + [(GATEWAY_POD, position) for position in (7, 8, 9)],
)
def test_a_flag_or_secret_that_one_kind_of_pod_lacks_is_found(rayservice: Document, pod: str, position: int) -> None:
    assert rayservice_problems(broken(rayservice, f"{pod}/containers/0/env/{position}")) != []


@pytest.mark.parametrize("pod", [HEAD_POD, GPU_POD])
@pytest.mark.parametrize("position", [7, 8, 9])
def test_a_secret_that_reaches_the_head_or_a_gpu_pod_is_found(rayservice: Document, pod: str, position: int) -> None:
    gateway = rayservice["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]
    secret = gateway["spec"]["containers"][0]["env"][position]
    assert "secretKeyRef" in secret["valueFrom"]
    assert rayservice_problems(broken(rayservice, f"{pod}/containers/0/env/6", secret)) != []
    everything = [{"secretRef": {"name": "serve-app"}}]
    assert rayservice_problems(broken(rayservice, f"{pod}/containers/0/envFrom", everything)) != []


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("spec/excludeHeadPodFromServeSvc", "excludeHeadPodFromServeService"),
        (f"{CLUSTER_SPEC}/enableInTreeAutoscaling", "enableInTreeAutoscaler"),
        (f"{CLUSTER_SPEC}/workerGroupSpecs/1/minReplicas", "min_replicas"),
        (f"{GPU_POD}/containers/0/volumeMounts", "volumeMount"),
        (f"{GPU_POD}/tolerations", "toleration"),
        (f"{HEAD_POD}/containers/0/env/0/value", "valeu"),
    ],
)
def test_a_misspelt_key_is_found(rayservice: Document, path: str, name: str) -> None:
    assert rayservice_problems(renamed(rayservice, path, name)) != []


def test_a_misspelt_key_inside_the_serve_config_is_found(rayservice: Document) -> None:
    text = rayservice["spec"]["serveConfigV2"]
    for right, wrong in (("num_gpus", "num_gpu"), ("max_replicas:", "max_replica:"), ("contract:", "contracts:")):
        assert right in text
        copy = broken(rayservice, "spec/serveConfigV2", text.replace(right, wrong))
        assert any(problem.startswith("serveConfigV2.applications.") for problem in rayservice_problems(copy))
