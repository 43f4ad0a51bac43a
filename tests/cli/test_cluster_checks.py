"""Each check of `doctor --cluster`, over facts as a cluster gives them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli.cluster_checks import Check, Known, flags_of, judge
from serve_app.contracts.units import DAY_S

from .conftest import Run

NOW = 1_800_000_000.0
FLAGS = dict(flags_of((Path(__file__).parents[2] / "cluster/flags.env").read_text()))
KNOWN = Known(FLAGS, firewall=False, grace_period_s=780)
Facts = dict[str, Any]


def node(name: str, **other: Any) -> Facts:
    facts: Facts = {
        "name": name,
        "flags": dict(FLAGS),
        "versions": {"Ray": "2.60.0", "serve-app": "0.1.0", "Python": "3.11.9"},
        "listeners": [{"what": "GCS", "address": "10.0.0.1", "port": 6379}],
        "open_paths": [],
        "tls": {"used": True, "ends": {"RAY_TLS_SERVER_CERT": NOW + 90 * DAY_S}},
        "ledger": None,
        "weights": [{"model": "org/model", "error": "", "offline": True}],
        "driver": None,
        "cuda": "13.0",
        "gpus": 0.0,
        "model_replicas": 0,
        "clock_ahead_s": 0.01,
        "clock_error_s": 0.002,
    }
    return facts | other


GOOD: Facts = {
    "now": NOW,
    "nodes": [
        node("head"),
        node("books", ledger={"error": ""}),
        node("gpu", gpus=1.0, model_replicas=1, driver="580.95.05"),
    ],
    "applications": {"gateway": "RUNNING", "model": "RUNNING"},
    "limiters": {"Limiter": ""},
    "times": {
        "reply": [["the longest reply", 529.6]],
        "model": [["graceful_shutdown_timeout_s of model.Model", 600.0]],
        "gateway": [["graceful_shutdown_timeout_s of gateway.Gateway", 660.0]],
    },
}


def check(name: str, facts: Facts, known: Known = KNOWN) -> Check:
    return next(one for one in judge(facts, known) if one.name == name)


def changed(change: Callable[[Facts, list[Facts]], Any]) -> Facts:
    facts = copy.deepcopy(GOOD)
    change(facts, facts["nodes"])
    return facts


def test_a_cluster_that_is_well_passes_every_check() -> None:
    assert {one.name: one.status for one in judge(GOOD, KNOWN) if one.status != "ok"} == {}
    assert check("times", GOOD).detail == "529.6 < 600 < 660 < 720 < 750 < 780 s"


def test_flags_are_read_as_bash_reads_them() -> None:
    assert FLAGS["RAY_SERVE_HAPROXY_RETRY_ON"] == "conn-failure\n    timeout http-request 10s"
    assert FLAGS["RAY_SERVE_ENABLE_HA_PROXY"] == "1"


@pytest.mark.parametrize(
    ("name", "status", "change", "says"),
    [
        ("nodes", "fail", lambda f, n: n[2].update(error="ImportError: no module"), "gpu: ImportError"),
        ("flags", "fail", lambda f, n: n[1]["flags"].pop("RAY_SERVE_HAPROXY_MAXCONN"), "not set on books"),
        (
            "flags",
            "warn",
            lambda f, n: [one["flags"].update(RAY_SERVE_HAPROXY_MAXCONN="7") for one in n],
            "but not as in flags.env: RAY_SERVE_HAPROXY_MAXCONN",
        ),
        ("versions", "fail", lambda f, n: n[1]["versions"].update(Ray="2.59.0"), "2.59.0 on books"),
        ("versions", "fail", lambda f, n: n[1]["versions"].update({"serve-app": "0.2.0"}), "0.2.0 on books"),
        ("clocks", "fail", lambda f, n: n[2].update(clock_ahead_s=-1.5), "gpu differs from the head by -1.5 s"),
        ("clocks", "warn", lambda f, n: n[2].update(clock_ahead_s=1.5, clock_error_s=0.9), "within 2.400 s"),
        (
            "ports",
            "warn",
            lambda f, n: n[0].update(listeners=[{"what": "dashboard", "address": "0.0.0.0", "port": 8265}]),
            "dashboard on port 8265 of head",
        ),
        ("ports", "warn", lambda f, n: [one.update(listeners=[]) for one in n], "can't inspect"),
        ("files", "fail", lambda f, n: n[1].update(open_paths=["/tmp/ray"]), "other users can reach /tmp/ray on books"),
        ("TLS", "fail", lambda f, n: n[2].update(tls={"used": False, "ends": {}}), "not set on gpu"),
        (
            "certificates",
            "warn",
            lambda f, n: n[1]["tls"]["ends"].update(RAY_TLS_CA_CERT=NOW + 29 * DAY_S),
            "RAY_TLS_CA_CERT of books expires in 29 days",
        ),
        ("certificates", "fail", lambda f, n: n[1]["tls"]["ends"].update(RAY_TLS_CA_CERT=NOW - 1), "expired 0 days"),
        (
            "certificates",
            "fail",
            lambda f, n: n[1]["tls"]["ends"].update(RAY_TLS_CA_CERT=None),
            "can't be read as a certificate",
        ),
        ("applications", "fail", lambda f, n: f["applications"].update(model="UNHEALTHY"), "model UNHEALTHY"),
        ("applications", "warn", lambda f, n: f.update(applications={}), "Serve runs none"),
        ("limiter", "fail", lambda f, n: f["limiters"].update(Limiter="timed out"), "Limiter: timed out"),
        ("ledger", "fail", lambda f, n: n[1].update(ledger={"error": "at revision '0003'"}), "books: at revision"),
        ("ledger", "warn", lambda f, n: n[1].update(ledger=None), "no node has the address"),
        ("weights", "fail", lambda f, n: n[2]["weights"][0].update(error="not there"), "gpu: org/model: not there"),
        ("weights", "warn", lambda f, n: n[2]["weights"][0].update(error="not there", offline=False), "not there"),
        ("GPU drivers", "fail", lambda f, n: n[2].update(driver="570.172.08"), "570.172.08 is older than 580"),
        ("GPU drivers", "fail", lambda f, n: n[2].update(cuda=None), "torch has no CUDA"),
        ("GPU drivers", "fail", lambda f, n: n[2].update(cuda="9.0"), "the minimum driver for torch's CUDA version"),
        ("GPU drivers", "warn", lambda f, n: n[2].update(driver=None), "nvidia-smi reports no driver"),
        (
            "times",
            "fail",
            lambda f, n: [one["flags"].update(RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S="660") for one in n[:1]],
            "of head is 660 s, not longer than graceful_shutdown_timeout_s of gateway.Gateway (660 s): raise it to 661",
        ),
        ("times", "fail", lambda f, n: n[1]["flags"].pop("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"), "of books is 30 s"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(name: str, status: str, change: Callable[[Facts, list[Facts]], Any], says: str) -> None:
    found = check(name, changed(change))
    assert found.status == status
    assert says in found.detail


def test_a_firewall_is_taken_on_the_operators_word() -> None:
    facts = changed(lambda f, n: n[0].update(listeners=[{"what": "GCS", "address": "::", "port": 6379}]))
    assert check("ports", facts).status == "warn"
    assert check("ports", facts, Known(FLAGS, firewall=True)).status == "ok"


def test_when_pods_are_ended_counts_where_it_is_known() -> None:
    assert check("times", GOOD, Known(FLAGS, grace_period_s=750)).status == "fail"
    assert "--grace-period" in check("times", GOOD, Known(FLAGS)).detail


def test_a_missing_path_of_one_node_is_no_difference_of_flags() -> None:
    facts = changed(lambda f, n: n[0]["flags"].update(RAY_SERVE_HAPROXY_METRICS_PORT="1"))
    assert check("flags", facts).status == "ok"


def test_options_of_the_cluster_need_it(run: Run) -> None:
    assert "--cluster" in run("doctor", "--firewall").error_line
