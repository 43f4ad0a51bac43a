"""The sets of manifests: Kubernetes and its operators accept them, and nothing in them contradicts the rest.

test_mutations.py breaks them.
"""

import re
from pathlib import Path

import pytest
import yaml

from serve_app.api.doors import DOORS, TOKEN_DOORS

from .checks import CLUSTER, flags
from .crds import evaluate
from .manifests import BESIDE, KUBERNETES, SETS, read_all, read_set, render
from .network_rules import serves, takes_requests
from .set_rules import longest_reply
from .validate import object_problems, problems


@pytest.mark.parametrize("name", SETS)
def test_a_set_has_no_problem(name: str) -> None:
    assert problems(read_set(name)) == []


def test_every_file_is_part_of_a_set_or_a_component() -> None:
    named = {KUBERNETES / file for file in BESIDE}
    for path in KUBERNETES.rglob("kustomization.yaml"):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        files = [*content.get("resources", []), *(one["path"] for one in content.get("patches", []))]
        files += [file for one in content.get("configMapGenerator", []) for file in one["files"]]
        named |= {path, *(path.parent / file for file in files)}
    assert {path for path in KUBERNETES.rglob("*.yaml") if path not in named} == set()
    assert {path for path in named if not path.exists()} == set()


def folder_with(tmp_path: Path, *components: str) -> Path:
    """A copy of cluster/kubernetes/ whose set `production` has more components. Returns the folder of the set."""
    copy = tmp_path / "kubernetes"
    for path in KUBERNETES.rglob("*.yaml"):
        target = copy / path.relative_to(KUBERNETES)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    file = copy / "production" / "kustomization.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    content["components"] += [f"../components/{name}" for name in components]
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return copy / "production"


@pytest.mark.parametrize(
    "component", sorted(path.parent.name for path in KUBERNETES.glob("components/*/kustomization.yaml"))
)
def test_each_component_can_be_added_to_a_set(tmp_path: Path, component: str) -> None:
    given = yaml.safe_load((KUBERNETES / "production/kustomization.yaml").read_text(encoding="utf-8"))["components"]
    more = [] if f"../components/{component}" in given else [component]
    for document in render(folder_with(tmp_path, *more)):
        assert object_problems(document) == []


@pytest.mark.parametrize(
    ("component", "key"), [("spot-gke", "cloud.google.com/gke-spot"), ("spot-eks", "eks.amazonaws.com/capacityType")]
)
def test_only_gpu_pods_go_to_spot_machines_and_stay_on_their_card(tmp_path: Path, component: str, key: str) -> None:
    [service] = [one for one in render(folder_with(tmp_path, component)) if one["kind"] == "RayService"]
    cluster = service["spec"]["rayClusterConfig"]
    pods = {one["groupName"]: one["template"]["spec"] for one in cluster["workerGroupSpecs"]}
    on_spot = {name for name, pod in pods.items() if key in pod.get("nodeSelector", {})}
    assert on_spot == {"l40s", "h100", "h100x4"}
    assert all("nvidia.com/gpu.product" in pods[name]["nodeSelector"] for name in on_spot)
    assert all(any(one["key"] == "nvidia.com/gpu" for one in pods[name]["tolerations"]) for name in on_spot)


def test_a_value_of_the_settings_reaches_every_place(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    file = folder / "settings.yaml"
    settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    given = {name: f"given-{name.lower()}" for name in settings["data"]}
    file.write_text(yaml.safe_dump(settings | {"data": given}), encoding="utf-8")
    documents = render(folder)
    text = yaml.safe_dump_all(documents)
    hosts = [one["spec"]["hostnames"] for one in documents if one["kind"] == "HTTPRoute"]
    [gateway] = [one["spec"] for one in documents if one["kind"] == "Gateway"]
    assert hosts == [["given-host"], ["given-host"]]
    assert {one["hostname"] for one in gateway["listeners"]} == {"given-host"}
    claims = [one for one in documents if one["kind"] == "PersistentVolumeClaim"]
    classes = {one["metadata"]["name"]: one["spec"]["storageClassName"] for one in claims}
    assert classes == {
        "serve-app-models": "given-sharedclass",
        "serve-app-compiled": "given-sharedclass",
    }
    assert set(given.values()) <= {word.strip("'\"") for word in text.split()}


def test_nothing_that_is_only_for_rendering_is_sent_to_the_cluster() -> None:
    for name in SETS:
        assert {"PodTemplate"}.isdisjoint(one["kind"] for one in render(KUBERNETES / name))
        assert "settings" not in {one["metadata"]["name"] for one in render(KUBERNETES / name)}


def test_the_objects_that_are_applied_first_are_all_that_the_download_needs() -> None:
    first = [
        one for one in render(KUBERNETES / "production") if one["metadata"].get("labels", {}).get("apply") == "first"
    ]
    names = {f"{one['kind']}/{one['metadata']['name']}" for one in first}
    assert {"Namespace/serve-app", "Job/fetch-models", "NetworkPolicy/serve-app-downloads"} <= names
    assert {"PersistentVolumeClaim/serve-app-models", "PriorityClass/serve-app-batch"} <= names
    assert "RayService/serve-app" not in names


@pytest.mark.parametrize("name", SETS)
def test_no_client_reaches_a_gpu_pod(name: str) -> None:
    manifests = read_set(name)
    takers = {pool.role for pool in manifests.pools if takes_requests(manifests, pool)}
    assert takers == {"gateway"}


def test_the_head_and_workers_share_their_settings() -> None:
    for component in ("pods", "tls"):
        pods = []
        for file in ("head.yaml", "workers.yaml"):
            [document] = read_all(f"components/{component}/{file}")
            pod = document["template"]["spec"]
            pod.pop("topologySpreadConstraints", None)  # there is one head
            pod.pop("automountServiceAccountToken", None)  # the autoscaler, beside the head, asks Kubernetes
            pod["containers"][0].pop("name")
            for maker in pod.get("initContainers", []):
                maker["args"] = [maker["args"][0].removesuffix(",$(FQ_RAY_IP)")]
            pods.append(pod)
        assert pods[0] == pods[1]


def test_a_rule_that_cannot_be_evaluated_does_not_hold() -> None:
    assert evaluate("self.a == 1", {"a": 1})
    assert not evaluate("self.a == 1", {})
    assert evaluate("!has(self.__namespace__)", {})
    assert not evaluate("!has(self.__namespace__)", {"namespace": "x"})


def test_the_gateway_publishes_every_door_under_both_base_paths_and_no_other_exact_path() -> None:
    found = [one for one in read_all("base/gateway-api.yaml") if one["kind"] == "HTTPRoute"]
    [route] = [one for one in found if one["metadata"]["name"] == "serve-app"]
    paths = [match["path"] for rule in route["spec"]["rules"] for match in rule["matches"]]
    exact = {path["value"] for path in paths if path["type"] == "Exact"}
    doors = {door.path for door in (*DOORS, *TOKEN_DOORS)}
    formats = {prefix + path for path in doors for prefix in ("", "/v1")}
    assert exact == formats | {"/", "/openapi.json", "/favicon.ico", "/health", "/ready"}
    [proxy] = re.findall(
        r"@public path (.*)", (CLUSTER.parent / "docs/deploy/one-gpu-machine.md").read_text(encoding="utf-8")
    )
    published = proxy.split()
    prefixes = tuple(one.removesuffix("*") for one in published if one.endswith("*"))
    assert all(path in published or path.startswith(prefixes) for path in exact)
    assert not any(one.startswith(("/admin", "/v1/admin", "/*")) for one in published)


@pytest.mark.parametrize("name", SETS)
def test_every_pod_has_the_flags_of_the_launchers_clusters(name: str) -> None:
    for pool in read_set(name).pools:
        assert flags().items() <= {key: one.get("value") for key, one in pool.env.items()}.items()


@pytest.mark.parametrize("name", SETS)
def test_every_secret_that_is_used_is_in_the_template_and_no_other(name: str) -> None:
    manifests = read_set(name)
    used = {secret for pool in manifests.pools for secret in pool.sources("secret")}
    if "gcsFaultToleranceOptions" in manifests.cluster:
        password = manifests.cluster["gcsFaultToleranceOptions"]["redisPassword"]
        used.add(password["valueFrom"]["secretKeyRef"]["name"])
    there = {secret["metadata"]["name"] for secret in read_all("secrets.template.yaml")}
    assert used <= there
    assert not manifests.production or used == there


def test_the_templates_hold_no_secret() -> None:
    for secret in read_all("secrets.template.yaml"):
        assert set(secret["stringData"].values()) == {"REPLACE_ME"}
    lines = (CLUSTER / "secrets.env.template").read_text(encoding="utf-8").splitlines()
    values = {line.split("=", 1)[0]: line.split("=", 1)[1] for line in lines if not line.startswith("#")}
    assert set(values.values()) == {"REPLACE_ME", "token"}


@pytest.mark.parametrize("name", SETS)
def test_a_set_offers_the_two_identifiers_and_production_a_large_model(name: str) -> None:
    gateway = read_set(name).serve["applications"][0]["deployments"][0]
    large = set() if name == "small" else {"svc-large"}
    assert set(gateway["user_config"]["models"]) == {"svc-chat", "svc-coder"} | large
    assert gateway["user_config"]["trusted_proxies"] == 1


def test_the_longest_reply_is_what_the_header_of_the_manifests_says() -> None:
    header = (KUBERNETES / "base/rayservice.yaml").read_text(encoding="utf-8").split("apiVersion")[0]
    for name in SETS:
        assert f"longest reply {longest_reply(read_set(name).serve):.0f} s <" in header


@pytest.mark.parametrize(
    "path", ["/chat/completions", "/models/svc-chat", "/user/balance", "/user/usage", "/account/keys"]
)
def test_clients_reach_both_base_forms(path: str) -> None:
    rule = read_set("production").named("HTTPRoute", "serve-app")["spec"]["rules"][0]  # type: ignore[index]
    assert serves(rule, path)
    assert serves(rule, "/v1" + path)


@pytest.mark.parametrize(
    "path", ["/admin", "/admin/accounts", "/v1/admin/accounts", "/admin/docs", "/-/healthz", "/-/routes"]
)
def test_the_operators_paths_are_not_published(path: str) -> None:
    rule = read_set("production").named("HTTPRoute", "serve-app")["spec"]["rules"][0]  # type: ignore[index]
    assert not serves(rule, path)


@pytest.mark.parametrize("name", SETS)
def test_an_unknown_key_is_found_in_every_object(name: str) -> None:
    for document in read_set(name).documents:
        body = "spec" if "spec" in document else "metadata"
        document[body] |= {"unheardOf": 1}
        assert object_problems(document) != [], document["metadata"]["name"]


def test_the_manifests_are_plain_yaml_without_merge_keys() -> None:
    # kubectl and Python read anchors alike; they differ in merge keys.
    for path in CLUSTER.rglob("*.yaml"):
        tokens = [token for token in yaml.scan(path.read_text()) if isinstance(token, yaml.ScalarToken)]
        assert all(token.value != "<<" for token in tokens), path
