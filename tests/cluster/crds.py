"""Checks custom resources as the API server does: schema, CEL rules, defaults, keys of lists; and no unknown key.

The schemas are in schemas/.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from cel_expr_python import cel
from cel_expr_python.ext import ext_strings

Document = dict[str, Any]
SCHEMAS = Path(__file__).parent / "schemas"
KINDS = {
    ("ray.io", "RayService"),
    ("gateway.networking.k8s.io", "Gateway"),
    ("gateway.networking.k8s.io", "HTTPRoute"),
    ("cert-manager.io", "Certificate"),
    ("monitoring.coreos.com", "PodMonitor"),
    ("monitoring.coreos.com", "PrometheusRule"),
    ("external-secrets.io", "ExternalSecret"),
    ("networking.gke.io", "GCPBackendPolicy"),
    ("networking.gke.io", "HealthCheckPolicy"),
}
RULES = "x-kubernetes-validations"
# Kubernetes escapes property names that are reserved words of CEL.
RESERVED = {"as", "break", "const", "continue", "else", "false", "for", "function", "if", "import", "in", "let", "loop"}
RESERVED |= {"package", "namespace", "null", "return", "true", "var", "void", "while"}


def is_custom(document: Document) -> bool:
    """Returns whether the object's kind has a schema here."""
    return (str(document["apiVersion"]).partition("/")[0], document["kind"]) in KINDS


def problems(document: Document) -> list[str]:
    """Returns the problems of an object of one of KINDS."""
    schema = schema_of(document["kind"])
    found = [
        f"{'.'.join(map(str, error.absolute_path)) or document['kind']}: {error.message}"
        for error in _validator(document["kind"]).iter_errors(document)
    ]
    return found or list(_rule_problems(with_defaults(document, schema), schema, ""))


@cache
def schema_of(kind: str) -> Document:
    return json.loads((SCHEMAS / f"{kind.lower()}.schema.json").read_text(encoding="utf-8"))


@cache
def _validator(kind: str) -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(schema_of(kind))


def with_defaults(value: Any, schema: Document) -> Any:
    """Returns a copy with the schema's defaults, which the API server sets before it evaluates rules."""
    if isinstance(value, dict):
        result = dict(value)
        for name, one in schema.get("properties", {}).items():
            if name not in result and "default" in one:
                result[name] = copy.deepcopy(one["default"])
            if name in result:
                result[name] = with_defaults(result[name], one)
        others = schema.get("additionalProperties")
        if isinstance(others, dict):
            result |= {name: with_defaults(result[name], others) for name in value}
        return result
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return [with_defaults(one, schema["items"]) for one in value]
    return value


def _rule_problems(value: Any, schema: Document, path: str) -> Iterator[str]:
    for rule in schema.get(RULES, []):
        # A rule about oldSelf compares an update with what was there.
        if "oldSelf" not in rule["rule"] and not evaluate(rule["rule"], value):
            yield f"{path}: {rule.get('message', rule['rule'])}"
    if isinstance(value, dict):
        others = schema.get("additionalProperties")
        for name, one in value.items():
            inner = schema.get("properties", {}).get(name, others if isinstance(others, dict) else {})
            yield from _rule_problems(one, inner, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        if keys := schema.get("x-kubernetes-list-map-keys"):
            yield from _duplicates(value, keys, path)
        for index, one in enumerate(value):
            yield from _rule_problems(one, schema.get("items", {}), f"{path}.{index}")


def _duplicates(items: list[Document], keys: list[str], path: str) -> Iterator[str]:
    seen = set()
    for index, item in enumerate(items):
        identity = tuple(item.get(key) for key in keys)
        if identity in seen:
            yield f"{path}.{index}: there is another with the same {', '.join(keys)}"
        seen.add(identity)


def evaluate(rule: str, value: Any) -> bool:
    """Returns whether a CEL rule holds for a value, its `self`; one that fails, as at a missing key, does not."""
    return _compiled(rule).eval(data={"self": _escaped(value)}).value() is True


@cache
def _compiled(rule: str) -> cel.Expression:
    environment = cel.NewEnv(variables={"self": cel.Type.DYN}, extensions=[ext_strings.ExtStrings()])
    return environment.compile(rule, disable_check=True)


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {f"__{name}__" if name in RESERVED else name: _escaped(one) for name, one in value.items()}
    return [_escaped(one) for one in value] if isinstance(value, list) else value
