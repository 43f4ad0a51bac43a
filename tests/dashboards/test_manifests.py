"""Tests that PrometheusRule and PodMonitor have the Prometheus operator's keys and find the service's pods."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.manifests import SETS, read_set

ROOT = Path(__file__).parents[2]
# Of monitoring.coreos.com/v1, those that are of use here.
METADATA = {"name", "namespace", "labels"}
RULE = {"record", "alert", "expr", "for", "labels", "annotations"}
ENDPOINT = {"port", "interval", "relabelings"}
RELABELING = {"sourceLabels", "regex", "targetLabel", "replacement"}

Document = dict[str, Any]


def read(name: str) -> Document:
    document: Document = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    return document


RULES = "cluster/kubernetes/components/monitoring/prometheus-rules.yaml"
MONITOR = "cluster/kubernetes/components/monitoring/podmonitor.yaml"
ENDPOINTS = read(MONITOR)["spec"]["podMetricsEndpoints"]


@pytest.mark.parametrize(("name", "kind"), [(RULES, "PrometheusRule"), (MONITOR, "PodMonitor")])
def test_a_manifest_belongs_to_the_operator_and_to_the_namespace(name: str, kind: str) -> None:
    manifest = read(name)
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    assert (manifest["apiVersion"], manifest["kind"]) == ("monitoring.coreos.com/v1", kind)
    assert set(manifest["metadata"]) == METADATA
    assert manifest["metadata"]["namespace"] == read("cluster/kubernetes/base/namespace.yaml")["metadata"]["name"]


def test_the_manifest_has_the_rules_of_the_plain_file() -> None:
    spec = read(RULES)["spec"]
    assert spec == read("serve_app/boards/rules.yaml")
    assert set(spec) == {"groups"}
    for group in spec["groups"]:
        assert set(group) == {"name", "interval", "rules"}
        for rule in group["rules"]:
            assert rule.keys() <= RULE
            assert len(rule.keys() & {"record", "alert"}) == 1
            texts = [*rule.get("labels", {}).values(), *rule.get("annotations", {}).values(), rule["expr"]]
            assert all(isinstance(text, str) for text in texts)


def test_the_monitor_has_the_operators_keys() -> None:
    assert set(read(MONITOR)["spec"]) == {"selector", "podMetricsEndpoints"}
    for endpoint in ENDPOINTS:
        assert set(endpoint) == ENDPOINT
        for relabeling in endpoint["relabelings"]:
            assert {"sourceLabels", "targetLabel"} <= relabeling.keys() <= RELABELING


@pytest.mark.parametrize("name", SETS)
def test_the_monitor_finds_every_pod_of_the_service(name: str) -> None:
    wanted = read(MONITOR)["spec"]["selector"]["matchLabels"]
    for pool in read_set(name).pools:
        assert wanted.items() <= pool.labels.items()
        ports = {port["name"]: port["containerPort"] for port in pool.container["ports"]}
        assert {ports[endpoint["port"]] for endpoint in ENDPOINTS} == {8080}


def relabelled(found: dict[str, str], relabelings: list[Document]) -> dict[str, str]:
    """As Prometheus does it, with the action `replace`."""
    labels = dict(found)
    for one in relabelings:
        value = ";".join(labels.get(name, "") for name in one["sourceLabels"])
        match = re.fullmatch(one.get("regex", "(.*)"), value)
        if match:
            labels[one["targetLabel"]] = match.expand(one.get("replacement", "$1").replace("$", "\\"))
    return {name: value for name, value in labels.items() if name == "__address__" or not name.startswith("__")}


@pytest.mark.parametrize("host", ["10.0.0.7", "[fd00::7]"])
def test_both_exporters_of_a_pod_are_read_with_the_labels_of_the_service(host: str) -> None:
    pod = {
        "__address__": f"{host}:8080",
        "__meta_kubernetes_namespace": "serve-app",
        "__meta_kubernetes_pod_label_app_kubernetes_io_name": "serve-app",
        "__meta_kubernetes_pod_label_ray_io_cluster": "serve-app-x7k2p",
    }
    targets = [relabelled(pod, endpoint["relabelings"]) for endpoint in ENDPOINTS]
    assert [target.pop("__address__") for target in targets] == [f"{host}:8080", f"{host}:9101"]
    service = {"cluster": "serve-app", "namespace": "serve-app", "ray_io_cluster": "serve-app-x7k2p"}
    assert targets == [service, service]


def test_both_ports_are_open_to_prometheus() -> None:
    policies = yaml.safe_load_all((ROOT / "cluster/kubernetes/base/networkpolicy.yaml").read_text(encoding="utf-8"))
    rules = [rule for policy in policies for rule in policy["spec"].get("ingress", [])]
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert {port["port"] for rule in rules if monitoring in rule["from"] for port in rule["ports"]} == {8080, 9101}
