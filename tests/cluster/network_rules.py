"""Rules for the network: how requests get in, what else is open, and what Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit

from .manifests import Document, Manifests, Pool, selects

CLIENTS, OPERATOR, PROMETHEUS = "envoy-gateway-system", "kuberay-system", "monitoring"
NODE_DNS = "169.254.20.10"  # where Kubernetes' cache of names listens on each node
METADATA_SERVER = "169.254.169.254"  # credentials of the machine
RAY_METRICS, HAPROXY_METRICS = 8080, 9101
PUBLIC = {8000, 8080, 8265, 9101}
CONSOLE = (443, 587)  # webhooks, payments and sign-in; mail
ANYWHERE, INSIDE = "1.1.1.1", ("10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1")


def _peer(rule: Document, side: str, namespace: str | None, address: str | None) -> bool:
    for one in rule.get(side, []):
        name = one.get("namespaceSelector", {}).get("matchLabels", {}).get("kubernetes.io/metadata.name")
        if namespace is not None and name == namespace:
            return True
        block = one.get("ipBlock")
        if address is not None and block is not None and _within(address, block):
            return True
    return False


def _within(address: str, block: Document) -> bool:
    inside = ip_address(address) in ip_network(block["cidr"])
    return inside and not any(ip_address(address) in ip_network(one) for one in block.get("except", []))


def is_open(
    manifests: Manifests, labels: dict[str, str], side: str, port: int, protocol: str = "TCP", **peer: Any
) -> bool:
    """Returns whether a policy lets pods with `labels` talk `to` (or be asked `from`) a namespace or an address."""
    for policy in manifests.of("NetworkPolicy"):
        if selects(policy["spec"]["podSelector"], labels):
            for rule in policy["spec"].get("egress" if side == "to" else "ingress", []):
                ports = [(one.get("port"), one.get("protocol", "TCP")) for one in rule.get("ports", [])]
                if (port, protocol) in ports and _peer(rule, side, peer.get("namespace"), peer.get("address")):
                    return True
    return False


def policy_problems(manifests: Manifests) -> Iterator[str]:
    for pool in manifests.pools:
        yield from (f"NetworkPolicy/serve-app: {pool.name}: {one}" for one in _pod_problems(manifests, pool))
    for policy in manifests.of("NetworkPolicy"):
        name = f"NetworkPolicy/{policy['metadata']['name']}"
        for rule in policy["spec"].get("ingress", []):
            own = [{"podSelector": policy["spec"]["podSelector"]}]
            open_ports = {port["port"] for port in rule.get("ports", [{"port": None}])}
            if rule.get("from") != own and (not rule.get("from") or not open_ports <= PUBLIC):
                yield f"{name}: ports are open to others: {sorted(map(str, open_ports))}"
        for rule in policy["spec"].get("egress", []):
            if _peer(rule, "to", None, METADATA_SERVER):
                yield f"{name}: pods may ask {METADATA_SERVER} for the machine's credentials"


def _pod_problems(manifests: Manifests, pool: Pool) -> Iterator[str]:
    def opened(side: str, port: int, protocol: str = "TCP", **peer: str) -> bool:
        return is_open(manifests, pool.labels, side, port, protocol, **peer)

    closing: set[str] = set()
    for policy in manifests.of("NetworkPolicy"):
        if selects(policy["spec"]["podSelector"], pool.labels):
            closing |= set(policy["spec"]["policyTypes"])
    if closing != {"Ingress", "Egress"}:
        yield "no policy closes it"
    for protocol in ("UDP", "TCP"):
        if not opened("to", 53, protocol, namespace="kube-system"):
            yield f"no DNS of the cluster ({protocol} 53 in kube-system)"
        if not opened("to", 53, protocol, address=NODE_DNS):
            yield f"no DNS of the node's cache ({protocol} 53 at {NODE_DNS})"
    for port in (RAY_METRICS, HAPROXY_METRICS):
        if not opened("from", port, namespace=PROMETHEUS):
            yield f"Prometheus can't read port {port}"
    serve = manifests.serve["http_options"]["port"]
    reached = opened("from", serve, namespace=CLIENTS)
    if reached != takes_requests(manifests, pool):
        yield f"clients {'reach' if reached else 'cannot reach'} port {serve}"
    if not (opened("from", serve, namespace=OPERATOR) and opened("from", 8265, namespace=OPERATOR)):
        yield f"KubeRay's operator can't reach ports {serve} and 8265"
    database = 5432
    uses = "serve-app-database" in pool.sources("configMap")
    reaches = opened("to", database, namespace="database") and opened("to", database, address="10.0.0.1")
    if uses and not reaches:
        yield f"can't reach the database (TCP {database}: namespace and addresses)"
    if not uses and (opened("to", database, namespace="database") or opened("to", database, address="10.0.0.1")):
        yield "reaches the database without need"
    redis = manifests.cluster.get("gcsFaultToleranceOptions", {}).get("redisAddress")
    if pool.role == "head" and redis is not None and not opened("to", urlsplit(redis).port or 0, address="10.0.0.1"):
        yield f"the head can't reach Redis at {redis}"
    if pool.role == "head" and not opened("to", 443, address="10.0.0.1"):
        yield "the autoscaler can't reach the Kubernetes API"
    if any(one["name"] == "Console" and pool in manifests.pools_of(one) for _, one in manifests.deployments()):
        if closed := [port for port in CONSOLE if not opened("to", port, address=ANYWHERE)]:
            yield f"the console can't reach public addresses at {closed}"
        if inside := [one for one in INSIDE if any(opened("to", port, address=one) for port in CONSOLE)]:
            yield f"a customer's webhook may lead to {', '.join(inside)}"


def route_problems(manifests: Manifests) -> Iterator[str]:
    """A Gateway with a certificate, a route to the service that KubeRay makes, and the same port everywhere."""
    service, port = f"{manifests.rayservice['metadata']['name']}-serve-svc", manifests.serve["http_options"]["port"]
    yield from _service_problems(manifests, service, port)
    for pool in manifests.pools:
        ports = {one["name"]: one["containerPort"] for one in pool.container.get("ports", [])}
        # KubeRay makes the Service for the head's port, and excludes the head from it.
        wanted = port if takes_requests(manifests, pool) or pool.role == "head" else None
        if ports.get("serve") != wanted or ports.get("metrics") != RAY_METRICS:
            yield f"{pool.where}: ports serve and metrics must be {wanted} and {RAY_METRICS}, and are {ports}"
    for route in manifests.of("HTTPRoute"):
        name = f"HTTPRoute/{route['metadata']['name']}"
        for parent in route["spec"]["parentRefs"]:
            gateway = manifests.named("Gateway", parent["name"])
            listeners = {one["name"]: one for one in gateway["spec"]["listeners"]} if gateway else {}
            if listeners.get(parent["sectionName"], {}).get("hostname") not in route["spec"]["hostnames"]:
                yield f"{name}: no Gateway {parent['name']} with a listener {parent['sectionName']} for its host"
        for rule in route["spec"]["rules"]:
            for backend in rule.get("backendRefs", []):
                if backend != {"name": service, "port": port}:
                    yield f"{name}: goes to {backend['name']}:{backend['port']}, and the service is {service}:{port}"
            if "backendRefs" in rule:
                yield from (f"{name}: publishes {one}" for one in ("/admin", "/v1/admin", "/-/x") if serves(rule, one))
                yield from (f"{name}: no {one}" for one in ("/v1/chat/completions", "/ready") if not serves(rule, one))
    for kind in ("GCPBackendPolicy", "HealthCheckPolicy"):
        for policy in manifests.of(kind):
            if policy["spec"]["targetRef"]["name"] != service:
                yield f"{kind}/{policy['metadata']['name']}: the service is {service}"
    for gateway in manifests.of("Gateway"):
        yield from _tls_problems(manifests, gateway)


def takes_requests(manifests: Manifests, pool: Pool) -> bool:
    """Returns whether a pod of the pool is a gateway, so that requests of clients go to it."""
    return any(one["name"] == "Gateway" and pool in manifests.pools_of(one) for _, one in manifests.deployments())


def _service_problems(manifests: Manifests, service: str, port: int) -> Iterator[str]:
    """Yields problems of the Service. By number, its port would lead to the proxies of all pods, also of GPU pods."""
    given = manifests.rayservice["spec"].get("serveService", {})
    ports = [(one["name"], one["port"], one.get("targetPort")) for one in given.get("spec", {}).get("ports", ())]
    if given.get("metadata", {}).get("name") != service or ports != [("serve", port, "serve")]:
        yield f"RayService/serve-app serveService: must be {service}, from port {port} to the port named serve"


def serves(rule: Document, path: str) -> bool:
    """Returns whether a request for `path` passes a rule of an HTTPRoute."""
    for match in rule.get("matches", [{"path": {"type": "PathPrefix", "value": "/"}}]):
        wanted = match["path"]["value"]
        prefix = wanted.rstrip("/") + "/"
        if path == wanted or (match["path"]["type"] == "PathPrefix" and (path + "/").startswith(prefix)):
            return True
    return False


def _tls_problems(manifests: Manifests, gateway: Document) -> Iterator[str]:
    name = f"Gateway/{gateway['metadata']['name']}"
    certificates = {one["spec"]["secretName"]: one["spec"]["dnsNames"] for one in manifests.of("Certificate")}
    for listener in gateway["spec"]["listeners"]:
        if listener["protocol"] == "HTTPS":
            names = [certificates.get(one["name"], []) for one in listener.get("tls", {}).get("certificateRefs", [])]
            if not any(listener["hostname"] in one for one in names):
                yield f"{name}: no Certificate for {listener['hostname']}"
    routed = {
        parent["sectionName"]
        for route in manifests.of("HTTPRoute")
        if any("backendRefs" in rule for rule in route["spec"]["rules"])
        for parent in route["spec"]["parentRefs"]
    }
    for listener in gateway["spec"]["listeners"]:
        if listener["protocol"] == "HTTP" and listener["name"] in routed:
            yield f"{name}: serves requests without TLS"


def monitor_problems(manifests: Manifests) -> Iterator[str]:
    monitors = manifests.of("PodMonitor")
    for pool in manifests.pools:
        targets = set()
        for monitor in monitors:
            if selects(monitor["spec"]["selector"], pool.labels):
                ports = {one["name"]: one["containerPort"] for one in pool.container.get("ports", [])}
                for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                    moved = [one for one in endpoint["relabelings"] if one["targetLabel"] == "__address__"]
                    found = moved[-1]["replacement"].rpartition(":")[2] if moved else ports.get(endpoint["port"], 0)
                    targets.add(int(found))
        for port in (RAY_METRICS, HAPROXY_METRICS):
            if port not in targets:
                yield f"PodMonitor/serve-app: nothing reads port {port} of {pool.name}"
    if not manifests.of("PrometheusRule"):
        yield "PrometheusRule: there are no alerts"
