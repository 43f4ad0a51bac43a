"""Namespace, Secret, NetworkPolicy, Ingress, disruption budget: Kubernetes accepts them; nothing else is open."""

import pytest

from .checks import Document, kubernetes_problems, pod_templates, read
from .mutate import broken, renamed

FILES = ["namespace.yaml", "secret.template.yaml", "networkpolicy.yaml", "ingress.yaml", "disruption-budget.yaml"]


@pytest.mark.parametrize("name", FILES)
def test_each_manifest_is_valid(name: str) -> None:
    assert list(kubernetes_problems(read(name))) == []


@pytest.mark.parametrize("name", FILES[1:])
def test_each_manifest_belongs_to_the_namespace(name: str) -> None:
    assert read(name)["metadata"]["namespace"] == read("namespace.yaml")["metadata"]["name"]


@pytest.mark.parametrize(
    ("name", "path", "misspelt"),
    [
        ("namespace.yaml", "metadata/labels", "label"),
        ("secret.template.yaml", "stringData", "stringdata"),
        ("networkpolicy.yaml", "spec/policyTypes", "policyType"),
        ("networkpolicy.yaml", "spec/ingress/1/ports/0/port", "prot"),
        ("ingress.yaml", "spec/tls/0/secretName", "secret"),
        ("ingress.yaml", "spec/rules/0/http/paths/0/pathType", "type"),
        ("disruption-budget.yaml", "spec/minAvailable", "minimum"),
    ],
)
def test_a_misspelt_key_is_found(name: str, path: str, misspelt: str) -> None:
    assert list(kubernetes_problems(renamed(read(name), path, misspelt))) != []


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("namespace.yaml", "metadata/labels", ["enforce"]),
        ("secret.template.yaml", "stringData/operator-key", 5),
        ("networkpolicy.yaml", "spec/podSelector", "all"),
        ("ingress.yaml", "spec/tls/0/hosts", "api.example.com"),
        ("ingress.yaml", "spec/rules/0/http/paths/0/backend/service/port", 8000),
        ("disruption-budget.yaml", "spec/minAvailable", [1]),
    ],
)
def test_a_wrong_type_is_found(name: str, path: str, value: object) -> None:
    assert list(kubernetes_problems(broken(read(name), path, value))) != []


def reachable(ingress: Document, path: str) -> bool:
    """Whether a request for `path` passes the Ingress (Kubernetes' rules for Exact and Prefix)."""
    for rule in ingress["spec"]["rules"][0]["http"]["paths"]:
        prefix = rule["path"].rstrip("/")
        if path == rule["path"] or (rule["pathType"] == "Prefix" and (path + "/").startswith(prefix + "/")):
            return True
    return False


@pytest.mark.parametrize("path", ["/chat/completions", "/models/svc-chat", "/user/balance", "/user/usage"])
def test_clients_reach_both_base_forms(path: str) -> None:
    assert reachable(read("ingress.yaml"), path)
    assert reachable(read("ingress.yaml"), "/v1" + path)


@pytest.mark.parametrize("path", ["/admin", "/admin/accounts", "/v1/admin/accounts", "/-/healthz", "/-/routes", "/"])
def test_the_operators_paths_are_not_published(path: str) -> None:
    assert not reachable(read("ingress.yaml"), path)
    opened = broken(read("ingress.yaml"), "spec/rules/0/http/paths/0/path", "/")
    assert reachable(broken(opened, "spec/rules/0/http/paths/0/pathType", "Prefix"), path)


def test_the_ingress_ends_tls_for_the_host_that_it_serves() -> None:
    spec = read("ingress.yaml")["spec"]
    assert spec["tls"][0]["hosts"] == [spec["rules"][0]["host"]]
    service = spec["rules"][0]["http"]["paths"][0]["backend"]["service"]
    rayservice = read("rayservice.yaml")["metadata"]["name"]
    assert service == {"name": f"{rayservice}-serve-svc", "port": {"number": 8000}}


def test_the_ingress_waits_longer_than_the_longest_stream() -> None:
    seconds = int(read("ingress.yaml")["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-read-timeout"])
    model = read("serve-gpu.yaml")["applications"][1]["deployments"][0]
    assert seconds > model["graceful_shutdown_timeout_s"]


def test_the_network_policy_covers_every_pod_of_the_cluster() -> None:
    selector = read("networkpolicy.yaml")["spec"]["podSelector"]["matchLabels"]
    for name, template in pod_templates(read("rayservice.yaml")).items():
        assert selector.items() <= template["metadata"]["labels"].items(), name


def test_from_outside_the_cluster_only_named_ports_are_open() -> None:
    policy = read("networkpolicy.yaml")["spec"]
    for rule in policy["ingress"]:
        assert rule["from"]
        own = [{"podSelector": policy["podSelector"]}]
        assert rule["from"] == own or {port["port"] for port in rule["ports"]} <= {8000, 8080, 8265, 9101}
