"""The parts in use of objects that Kubernetes itself does not know, typed: an unknown key or a wrong type is a problem.

Gateway API v1, cert-manager v1, Prometheus' operator v1, GKE's policies v1. KubeRay's RayService has a whole schema,
in schemas/.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


# Of Gateway API (GEP-2257), such as 720s or 12m.
Duration = Annotated[str, Field(pattern=r"^([0-9]{1,5}(h|m|s|ms)){1,4}$")]
Labels = dict[str, str]


class Selector(Part):
    match_labels: Labels


class CertificateRef(Part):
    name: str


class Tls(Part):
    mode: Literal["Terminate"]
    certificate_refs: Annotated[list[CertificateRef], Field(min_length=1)]


class From(Part):
    from_: Annotated[Literal["Same", "All", "Selector"], Field(alias="from")]


class AllowedRoutes(Part):
    namespaces: From


class Listener(Part):
    name: str
    hostname: str
    port: int
    protocol: Literal["HTTP", "HTTPS"]
    tls: Tls | None = None
    allowed_routes: AllowedRoutes


class Gateway(Part):
    gateway_class_name: str
    listeners: Annotated[list[Listener], Field(min_length=1)]


class ParentRef(Part):
    name: str
    section_name: str


class PathMatch(Part):
    type: Literal["Exact", "PathPrefix"]
    value: Annotated[str, Field(pattern="^/")]


class Match(Part):
    path: PathMatch


class Redirect(Part):
    scheme: Literal["https"]
    status_code: Literal[301, 302]


class Filter(Part):
    type: Literal["RequestRedirect"]
    request_redirect: Redirect


class Timeouts(Part):
    request: Duration
    backend_request: Duration


class BackendRef(Part):
    name: str
    port: int


class Rule(Part):
    matches: list[Match] | None = None
    filters: list[Filter] | None = None
    timeouts: Timeouts | None = None
    backend_refs: list[BackendRef] | None = None


class HttpRoute(Part):
    parent_refs: Annotated[list[ParentRef], Field(min_length=1)]
    hostnames: list[str]
    rules: Annotated[list[Rule], Field(min_length=1)]


class IssuerRef(Part):
    kind: Literal["ClusterIssuer", "Issuer"]
    name: str


class Certificate(Part):
    secret_name: str
    dns_names: Annotated[list[str], Field(min_length=1)]
    issuer_ref: IssuerRef


class Relabeling(Part):
    source_labels: list[str]
    target_label: str
    regex: str | None = None
    replacement: str | None = None


class Endpoint(Part):
    port: str
    interval: Duration
    relabelings: list[Relabeling]


class PodMonitor(Part):
    selector: Selector
    pod_metrics_endpoints: Annotated[list[Endpoint], Field(min_length=1)]


class PrometheusRule(Part):
    groups: list[dict[str, Any]]  # tests/dashboards looks into them


class TargetRef(Part):
    group: Literal[""]
    kind: Literal["Service"]
    name: str


class Draining(Part):
    draining_timeout_sec: int


class BackendDefault(Part):
    timeout_sec: int
    connection_draining: Draining


class BackendPolicy(Part):
    default: BackendDefault
    target_ref: TargetRef


class HttpHealthCheck(Part):
    port: int
    request_path: str


class HealthCheckConfig(Part):
    type: Literal["HTTP"]
    http_health_check: HttpHealthCheck


class HealthCheckDefault(Part):
    check_interval_sec: int
    config: HealthCheckConfig


class HealthCheckPolicy(Part):
    default: HealthCheckDefault
    target_ref: TargetRef


KINDS: dict[tuple[str, str], type[Part]] = {
    ("gateway.networking.k8s.io/v1", "Gateway"): Gateway,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): HttpRoute,
    ("cert-manager.io/v1", "Certificate"): Certificate,
    ("monitoring.coreos.com/v1", "PodMonitor"): PodMonitor,
    ("monitoring.coreos.com/v1", "PrometheusRule"): PrometheusRule,
    ("networking.gke.io/v1", "GCPBackendPolicy"): BackendPolicy,
    ("networking.gke.io/v1", "HealthCheckPolicy"): HealthCheckPolicy,
}


def problems(document: dict[str, Any]) -> list[str]:
    """Returns the problems of an object of one of KINDS."""
    unknown = [key for key in document if key not in ("apiVersion", "kind", "metadata", "spec")]
    unknown += [f"metadata.{key}" for key in document["metadata"] if key not in ("name", "namespace", "labels")]
    found = [f"{key}: unknown key" for key in unknown]
    try:
        KINDS[document["apiVersion"], document["kind"]].model_validate(document.get("spec"))
    except ValidationError as error:
        found += [f"spec.{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    return found
