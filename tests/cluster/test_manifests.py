"""The sets of manifests: Kubernetes and its operators accept them, and nothing in them contradicts the rest.

test_mutations.py breaks them.
"""

import pytest
import yaml

from serve_app.api.doors import DOORS

from .checks import CLUSTER, flags
from .manifests import COMMON, SETS, read_all, read_set
from .network_rules import serves
from .set_rules import longest_reply
from .validate import object_problems, problems


@pytest.mark.parametrize("name", SETS)
def test_a_set_has_no_problem(name: str) -> None:
    assert problems(read_set(name)) == []


def test_every_manifest_belongs_to_a_set() -> None:
    own = {path.name for path in CLUSTER.glob("*.yaml")} - {"aws.yaml", "gcp.yaml", "serve-gpu.yaml"}
    assert own == set(COMMON)


def test_the_gateway_publishes_every_door_under_both_base_paths_and_no_other_exact_path() -> None:
    found = [one for one in read_all("gateway-api.yaml") if one["kind"] == "HTTPRoute"]
    [route] = [one for one in found if one["metadata"]["name"] == "serve-app"]
    paths = [match["path"] for rule in route["spec"]["rules"] for match in rule["matches"]]
    exact = {path["value"] for path in paths if path["type"] == "Exact"}
    assert exact == {prefix + door.path for door in DOORS for prefix in ("", "/v1")} | {"/health", "/ready"}


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
def test_a_set_offers_the_two_identifiers(name: str) -> None:
    gateway = read_set(name).serve["applications"][0]["deployments"][0]
    assert set(gateway["user_config"]["models"]) == {"svc-chat", "svc-coder"}
    assert gateway["user_config"]["trusted_proxies"] == 1


def test_the_longest_reply_is_what_the_header_of_the_manifests_says() -> None:
    for name in SETS:
        header = (CLUSTER / name / "rayservice.yaml").read_text(encoding="utf-8").split("apiVersion")[0]
        assert f"longest reply {longest_reply(read_set(name).serve):.0f} s <" in header


@pytest.mark.parametrize(
    "path", ["/chat/completions", "/models/svc-chat", "/user/balance", "/user/usage", "/account/keys"]
)
def test_clients_reach_both_base_forms(path: str) -> None:
    rule = read_set("production").named("HTTPRoute", "serve-app")["spec"]["rules"][0]  # type: ignore[index]
    assert serves(rule, path)
    assert serves(rule, "/v1" + path)


@pytest.mark.parametrize("path", ["/admin", "/admin/accounts", "/v1/admin/accounts", "/-/healthz", "/-/routes", "/"])
def test_the_operators_paths_are_not_published(path: str) -> None:
    rule = read_set("production").named("HTTPRoute", "serve-app")["spec"]["rules"][0]  # type: ignore[index]
    assert not serves(rule, path)


@pytest.mark.parametrize("file", [*COMMON, *(f"{name}/rayservice.yaml" for name in SETS)])
def test_an_unknown_key_is_found_in_every_object(file: str) -> None:
    for document in read_all(file):
        body = "spec" if "spec" in document else "metadata"
        document[body] |= {"unheardOf": 1}
        assert object_problems(document) != [], document["metadata"]["name"]


def test_the_manifests_are_plain_yaml_without_merge_keys() -> None:
    # kubectl and Python read anchors alike; they differ in merge keys.
    for path in CLUSTER.rglob("*.yaml"):
        tokens = [token for token in yaml.scan(path.read_text()) if isinstance(token, yaml.ScalarToken)]
        assert all(token.value != "<<" for token in tokens), path
