"""Writes docs/settings.md, the reference of all settings, from their declarations: `python -m docs.settings_page`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from serve_app.scaling.scaling_settings import ScalingSettings
from serve_app.settings import ConsoleArgs, GatewayArgs, GatewaySettings, LimiterSettings, ModelArgs, ModelSettings

PATH: Final = Path(__file__).parent / "settings.md"
SECTIONS: Final[dict[str, type[BaseModel]]] = {
    "Gateway application: `args`": GatewayArgs,
    "Gateway: `user_config`": GatewaySettings,
    "Limiter: `user_config`": LimiterSettings,
    "Model application: `args`": ModelArgs,
    "Model: `user_config`": ModelSettings,
    "Model: `policy_kwargs` of the autoscaling policy": ScalingSettings,
    "Console application: `args`": ConsoleArgs,
}
INTRODUCTION: Final = """# Settings

This page lists all settings of the service in `config.yaml`. `python -m docs.settings_page` generates it from their \
declarations in the code. [Configure](guides/configure.md) explains how to change a setting, and describes those \
settings that need more explanation.

The page does not list Ray Serve's own deployment options in the same file, such as the number of replicas, their \
resources and their timeouts."""
TYPES: Final = {"string": "text", "boolean": "true, false", "array": "list", "object": "mapping", "null": ""}


def page() -> str:
    """Returns the page."""
    return "\n\n".join([INTRODUCTION, *(_section(title, kind) for title, kind in SECTIONS.items())]) + "\n"


def _section(title: str, kind: type[BaseModel]) -> str:
    schema = kind.model_json_schema()
    rows = "\n".join(_rows(schema, schema.get("$defs", {}), ""))
    return f"## {title}\n\n| key | type | default | description |\n|---|---|---|---|\n{rows}"


def _rows(schema: dict[str, Any], defs: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, field in schema["properties"].items():
        inner, path = _nested(field, defs)
        default = "required" if name in schema.get("required", ()) else _value(field.get("default"))
        text = " ".join(field["description"].split())
        yield f"| `{prefix}{name}` | {_type(field)} | {default} | {text} |"
        if inner is not None:
            yield from _rows(inner, defs, f"{prefix}{name}{path}.")


def _nested(field: dict[str, Any], defs: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Returns the schema of the settings inside a field, and the path to them; None if there are none."""
    for part, path in (
        (field, ""),
        (field.get("additionalProperties"), ".ID"),
        (field.get("items"), "[]"),
        *((one, "") for one in field.get("anyOf", ())),
    ):
        if isinstance(part, dict) and "$ref" in part:
            return defs[part["$ref"].rpartition("/")[2]], path
    return None, ""


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(filter(None, map(_type, field["anyOf"])))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{one}`" for one in field.get("enum", [field.get("const")]))
    kind = TYPES.get(field.get("type", "object"), field.get("type"))
    return ", ".join(filter(None, (kind, _bounds(field))))


def _bounds(field: dict[str, Any]) -> str:
    if "minimum" in field and "maximum" in field:
        return f"{_value(field['minimum'])} to {_value(field['maximum'])}"
    words = {"exclusiveMinimum": "above", "minimum": "at least", "maximum": "at most"}
    return ", ".join(f"{words[bound]} {_value(field[bound])}" for bound in words if bound in field)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        gib, mib = value / 2**30, value / 2**20
        if gib >= 1 and gib.is_integer():
            return f"{gib:g} GiB"
        return f"{mib:g} MiB" if mib >= 1 and mib.is_integer() else f"{value:,.16g}"
    if isinstance(value, dict) or not value:  # a mapping's own rows have its defaults
        return ""
    return ", ".join(f"`{one}`" for one in (value if isinstance(value, list) else [value]))


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
