"""Evaluates the facts of a cluster for `serve-app doctor --cluster`. Each check gives one line. Has no side effects.

deployments/cluster_facts.py gathers the facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.contracts.units import DAY_S
from serve_app.times import DRAIN, HARD_STOP, RAY_DRAIN_S, RAY_HARD_STOP_S, Part, chain_problems

Facts = dict[str, Any]
CLOCK_LIMIT_S = 1.0
SOON_DAYS = 30
# Ray's services that run code for anyone who can connect, unless Ray requires a token.
CLOSED = ("GCS", "client server", "dashboard")
ANYWHERE = ("0.0.0.0", "::")
# Minimum driver by the CUDA major version of torch, from NVIDIA's compatibility table.
MIN_DRIVERS = {11: 450, 12: 525, 13: 580}
OWN_PER_NODE = ("_PORT", "_PATH", "_LOC", "_BASE", "_FILE")  # suffixes of flags that may differ by node, such as ports


@dataclass(frozen=True)
class Check:
    """One line of the report. `status` is `ok`, `warn` or `fail`."""

    name: str
    status: str
    detail: str
    hint: str = ""


@dataclass(frozen=True)
class Known:
    """Facts that only the operator knows: the expected flags of all nodes, a firewall, the pods' grace period."""

    flags: Mapping[str, str] = field(default_factory=dict)
    firewall: bool = False
    grace_period_s: float | None = None


def judge(facts: Facts, known: Known) -> list[Check]:
    """Returns all checks, in the order of printing."""
    nodes = [node for node in facts["nodes"] if "error" not in node]
    return [
        nodes_check(facts["nodes"]),
        flags_check(nodes, known.flags),
        versions_check(nodes),
        clocks_check(nodes),
        ports_check(nodes, known.firewall),
        files_check(nodes),
        tls_check(nodes),
        certificates_check(nodes, facts["now"]),
        applications_check(facts["applications"]),
        limiter_check(facts["limiters"]),
        ledger_check(nodes),
        weights_check(nodes),
        drivers_check(nodes),
        times_check(facts["times"], nodes, known.grace_period_s),
    ]


def nodes_check(nodes: Sequence[Facts]) -> Check:
    if silent := [f"{node['name']}: {node['error']}" for node in nodes if "error" in node]:
        return Check("nodes", "fail", "; ".join(silent), "the node must run this release; check its raylet's log")
    return Check("nodes", "ok", f"{len(nodes)} answer")


def flags_check(nodes: Sequence[Facts], expected: Mapping[str, str]) -> Check:
    """Fails if nodes differ. Only warns if all nodes differ from flags.env in the same way: that may be intended."""
    names = sorted({name for node in nodes for name in node["flags"]} | set(expected))
    names = [name for name in names if name in expected or not name.endswith(OWN_PER_NODE)]
    values = {name: {node["flags"].get(name) for node in nodes} for name in names}
    if differ := [name for name in names if len(values[name]) > 1]:
        detail = "; ".join(f"{name}: {_by_node(nodes, 'flags', name)}" for name in differ)
        return Check("flags", "fail", detail, "source cluster/flags.env before `ray start` on every node")
    others = [name for name in names if name in expected and values[name] - {expected[name]}]
    if others:
        detail = f"the same on all nodes, but not as in flags.env: {', '.join(others)}"
        return Check("flags", "warn", detail, "source cluster/flags.env before `ray start` on every node")
    if not expected:
        return Check("flags", "warn", "the same on all nodes; no flags.env to compare with", "name it with --flags")
    return Check("flags", "ok", f"{len(names)}, the same on all nodes")


def versions_check(nodes: Sequence[Facts]) -> Check:
    found = {name: {node["versions"][name] for node in nodes} for node in nodes for name in node["versions"]}
    differ = [f"{name}: {_by_node(nodes, 'versions', name)}" for name, versions in found.items() if len(versions) > 1]
    if differ:
        return Check("versions", "fail", "; ".join(differ), "install the same release on every node")
    return Check("versions", "ok", ", ".join(f"{name} {min(versions)}" for name, versions in found.items()))


def clocks_check(nodes: Sequence[Facts]) -> Check:
    """Fails only if a clock differs by more than the limit plus the error of the measurement."""
    late = [node for node in nodes if abs(node["clock_ahead_s"]) - node["clock_error_s"] > CLOCK_LIMIT_S]
    if late:
        detail = "; ".join(f"{node['name']} differs from the head by {node['clock_ahead_s']:+.1f} s" for node in late)
        return Check("clocks", "fail", detail, "run a time service (chrony) on every node")
    max_difference = max((abs(node["clock_ahead_s"]) + node["clock_error_s"] for node in nodes), default=0.0)
    status = "ok" if max_difference <= CLOCK_LIMIT_S else "warn"
    return Check("clocks", status, f"within {max_difference:.3f} s of the head's, {CLOCK_LIMIT_S:g} allowed")


def ports_check(nodes: Sequence[Facts], firewall: bool) -> Check:
    """Checks where Ray listens. A node can't see which ports a firewall closes."""
    listeners = [(node["name"], one) for node in nodes for one in node["listeners"] if one["what"] in CLOSED]
    if not listeners:
        hint = "run this command as the user that runs Ray"
        return Check("ports", "warn", "can't inspect Ray's processes, which another user runs", hint)
    wide = [(name, one) for name, one in listeners if one["address"] in ANYWHERE]
    if not wide:
        return Check("ports", "ok", "dashboard, GCS and client server do not listen on all addresses")
    listed = ", ".join(sorted({f"{one['what']} on port {one['port']} of {name}" for name, one in wide}))
    if firewall:
        return Check("ports", "ok", f"closed by a firewall, as --firewall confirms: {listed}")
    return Check(
        "ports",
        "warn",
        f"listen on all addresses, and this command can't see who can reach them: {listed}",
        "close them to other machines (a firewall, cluster/kubernetes), then confirm with --firewall",
    )


def files_check(nodes: Sequence[Facts]) -> Check:
    """Checks that other users of a node can't reach the sockets of Ray and HAProxy or the state folder."""
    if reached := [f"{path} on {node['name']}" for node in nodes for path in node["open_paths"]]:
        hint = "source cluster/private-tmp.sh before `ray start`; for a state folder, `chmod go=`"
        return Check("files", "fail", f"other users can reach {', '.join(reached)}", hint)
    return Check("files", "ok", "sockets and state folders are closed to other users")


def tls_check(nodes: Sequence[Facts]) -> Check:
    users = [node["name"] for node in nodes if node["tls"]["used"]]
    if 0 < len(users) < len(nodes):
        others = [node["name"] for node in nodes if not node["tls"]["used"]]
        detail = f"RAY_USE_TLS is not set on {', '.join(others)}"
        return Check("TLS", "fail", detail, "set it on every node, or on none")
    return Check("TLS", "ok", "between all nodes" if users else "RAY_USE_TLS is set on no node: traffic is plain text")


def certificates_check(nodes: Sequence[Facts], now: float) -> Check:
    missing, expired, soon, min_days = [], [], [], None
    for node in nodes:
        for name, ends in node["tls"]["ends"].items():
            if ends is None:
                missing.append(f"{name} of {node['name']} can't be read as a certificate")
                continue
            days = (ends - now) / DAY_S
            min_days = days if min_days is None else min(min_days, days)
            if days <= 0:
                expired.append(f"{name} of {node['name']} expired {-days:.0f} days ago")
            elif days < SOON_DAYS:
                soon.append(f"{name} of {node['name']} expires in {days:.0f} days")
    hint = (
        "on machines: `serve-app cluster certificates --renew`, copy the files, restart the node; a pod makes its own "
        "when it starts, so start a second cluster (docs/deploy/cluster.md, Upgrade)"
    )
    if missing or expired:
        return Check("certificates", "fail", "; ".join([*missing, *expired]), hint)
    if soon:
        return Check("certificates", "warn", "; ".join(soon), hint)
    return Check(
        "certificates", "ok", "none are used" if min_days is None else f"the first expires in {min_days:.0f} days"
    )


def applications_check(applications: Mapping[str, str]) -> Check:
    if not applications:
        return Check("applications", "warn", "Serve runs none on this cluster", "deploy the service (`serve deploy`)")
    listed = ", ".join(f"{name} {status}" for name, status in applications.items())
    well = all(status == "RUNNING" for status in applications.values())
    return Check("applications", "ok" if well else "fail", listed, "" if well else "see `serve status` for the reason")


def limiter_check(limiters: Mapping[str, str]) -> Check:
    if not limiters:
        return Check("limiter", "warn", "none is deployed", "deploy the service (`serve deploy`)")
    if failing := [f"{name}: {error}" for name, error in limiters.items() if error]:
        return Check("limiter", "fail", "; ".join(failing), "check its log on the node of accounting")
    return Check("limiter", "ok", f"{', '.join(limiters)} answers")


def ledger_check(nodes: Sequence[Facts]) -> Check:
    """Checks that the database can be reached, and that its schema matches this release."""
    readers = [node for node in nodes if node["ledger"] is not None]
    if not readers:
        hint = "set SERVE_APP_DATABASE_URL on the nodes of accounting"
        return Check("ledger", "warn", "no node has the address of the database in its environment", hint)
    if wrong := [f"{node['name']}: {node['ledger']['error']}" for node in readers if node["ledger"]["error"]]:
        return Check("ledger", "fail", "; ".join(wrong), "check SERVE_APP_DATABASE_URL and the network of that node")
    return Check("ledger", "ok", f"reachable from {_names(readers)}, with this release's schema")


def weights_check(nodes: Sequence[Facts]) -> Check:
    """Fails if weights are missing on a node with HF_HUB_OFFLINE. Only warns if the node may download them."""
    hosts = [node for node in nodes if node["gpus"] or node["model_replicas"]]
    if not hosts:
        return Check("weights", "warn", "no node has GPUs or runs model replicas: nothing to check")
    bad: dict[str, list[str]] = {"warn": [], "fail": []}
    for node in hosts:
        for one in node["weights"]:
            if one["error"]:
                bad["fail" if one["offline"] else "warn"].append(f"{node['name']}: {one['model']}: {one['error']}")
    hint = "`serve-app models fetch` on that node, with the HF_HOME of its replicas"
    if lines := [*bad["fail"], *bad["warn"]]:
        return Check("weights", "fail" if bad["fail"] else "warn", "; ".join(lines), hint)
    models = sorted({one["model"] for node in hosts for one in node["weights"]})
    return Check("weights", "ok", f"{', '.join(models) or 'no model is deployed'} on {_names(hosts)}")


def drivers_check(nodes: Sequence[Facts]) -> Check:
    hosts = [node for node in nodes if node["gpus"]]
    problems, unknown = [], []
    for node in hosts:
        min_driver = MIN_DRIVERS.get(int((node["cuda"] or "0").partition(".")[0]))
        if node["cuda"] is None:
            problems.append(f"{node['name']}: torch has no CUDA")
        elif min_driver is None:
            problems.append(
                f"{node['name']}: the minimum driver for torch's CUDA version ({node['cuda']}) is not known"
            )
        elif node["driver"] is None:
            unknown.append(f"{node['name']}: nvidia-smi reports no driver")
        elif int(node["driver"].partition(".")[0]) < min_driver:
            problems.append(
                f"{node['name']}: {node['driver']} is older than {min_driver}, which CUDA {node['cuda']} needs"
            )
    if problems or unknown:
        status = "fail" if problems else "warn"
        hint = "install a newer driver, or torch for another CUDA version"
        return Check("GPU drivers", status, "; ".join([*problems, *unknown]), hint)
    return Check("GPU drivers", "ok", ", ".join(f"{node['name']} {node['driver']}" for node in hosts) or "no GPUs")


def times_check(times: Facts, nodes: Sequence[Facts], grace_period_s: float | None) -> Check:
    """Checks that each timeout in the chain of serve_app/times.py exceeds the previous one.

    `grace_period_s` is that of the pods, if the operator named it.
    """
    chain = [[Part(*one) for one in times[link]] for link in ("reply", "model", "gateway")]
    for flag, default in ((HARD_STOP, RAY_HARD_STOP_S), (DRAIN, RAY_DRAIN_S)):
        try:
            chain.append([Part(f"{flag} of {n['name']}", float(n["flags"].get(flag, default))) for n in nodes])
        except ValueError:
            return Check("times", "fail", f"{flag} is not a number of seconds", "see cluster/flags.env")
    if grace_period_s is not None:
        chain.append([Part("the grace period", grace_period_s)])
    if problems := list(chain_problems(chain)):
        return Check("times", "fail", "; ".join(problems), "see Times in docs/deploy/cluster.md")
    known = [max(part.seconds for part in link) for link in chain if link]
    unknown = "" if grace_period_s is not None else "; add --grace-period to check that of pods or units"
    return Check("times", "ok", " < ".join(f"{seconds:g}" for seconds in known) + " s" + unknown)


def flags_of(text: str) -> Iterator[tuple[str, str]]:
    """Yields names and values of a flags.env, a file for bash. A value is plain text, or $'…' with escapes."""
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if not equals or name.startswith("#"):
            continue
        if value.startswith("$'") and value.endswith("'"):
            value = value[2:-1].encode().decode("unicode_escape")
        yield name, value


def _names(nodes: Sequence[Facts]) -> str:
    return ", ".join(node["name"] for node in nodes)


def _by_node(nodes: Sequence[Facts], fact: str, name: str) -> str:
    return ", ".join(f"{node[fact].get(name, 'not set')} on {node['name']}" for node in nodes)
