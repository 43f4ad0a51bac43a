"""Makes schemas/*.schema.json of the definitions in a folder: `python -m tests.cluster.make_schemas FOLDER`.

What a cluster would ignore is a problem here: keys that a definition does not name are forbidden. Descriptions and the
status are left out; defaults and CEL rules (x-kubernetes-validations) stay, for crds.py. schemas/README.md lists the
definitions and their versions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).parent / "schemas"
VERSIONS = {"RayService": "v1"}  # of a definition with several; else the one that is stored
DROPPED = ("description", "format", "title", "x-kubernetes-map-type")
METADATA = {"type": "object", "properties": {"name": {"type": "string"}, "namespace": {"type": "string"}}}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema as JSON schema, without descriptions, and closed to keys that it does not name."""
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            result[key] = {name: closed(one) for name, one in value.items()}
        elif key in ("items", "additionalProperties", "not") and isinstance(value, dict):
            result[key] = closed(value)
        elif key in ("anyOf", "allOf", "oneOf"):
            result[key] = value  # only adds conditions to keys that are named elsewhere
        elif key not in DROPPED:
            result[key] = value
    if result.pop("x-kubernetes-int-or-string", False):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if result.pop("nullable", False) and "type" in result:
        result["type"] = [result["type"], "null"]
    open_ = result.pop("x-kubernetes-preserve-unknown-fields", False)
    if "properties" in result and "additionalProperties" not in result and not open_:
        result["additionalProperties"] = False
    return result


def schema_of(definition: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of the objects of a CustomResourceDefinition."""
    kind, versions = definition["spec"]["names"]["kind"], definition["spec"]["versions"]
    wanted = VERSIONS.get(kind)
    version = next(one for one in versions if (one["name"] == wanted if wanted else one["storage"]))
    full = version["schema"]["openAPIV3Schema"]
    full["properties"].pop("status", None)
    result = closed(full)
    properties = METADATA["properties"] | {"labels": TEXTS, "annotations": TEXTS}  # type: ignore[operator]
    result["properties"] |= {
        "apiVersion": {"const": f"{definition['spec']['group']}/{version['name']}"},
        "kind": {"const": kind},
        "metadata": METADATA | {"properties": properties, "additionalProperties": False},
    }
    return result | {"required": ["apiVersion", "kind", "metadata", "spec"]}


def main(folder: str) -> None:
    for path in sorted(Path(folder).glob("*.yaml")):
        definition = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
        schema = schema_of(definition)
        name = f"{definition['spec']['names']['singular']}.schema.json"
        (SCHEMAS / name).write_text(json.dumps(schema, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
