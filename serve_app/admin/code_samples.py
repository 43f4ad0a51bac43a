"""Generates the API reference's example requests in curl, Python and Node from the OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from serve_app.admin.guides import EXAMPLE
from serve_app.admin.values import Schema

BASE: Final = f"{EXAMPLE}/v1"
FIELD: Final = "x-codeSamples"
MAX_INLINE: Final = 72  # maximum characters of a list or object on one line
_KEYS: Final = {"apiKey": "YOUR_KEY", "managementKey": "MANAGEMENT_KEY", "operatorKey": "OPERATOR_KEY"}
#: Operations that an SDK supports, and the SDK's method for each. Samples of other operations use plain HTTP.
_OF_OPENAI: Final = {
    "post /chat/completions": "chat.completions.create",
    "post /completions": "completions.create",
    "post /responses": "responses.create",
    "get /models": "models.list",
    "get /models/{id}": "models.retrieve",
}
_OF_ANTHROPIC: Final = {"post /messages": "messages.create"}
#: Bodies of operations that have no example in the document.
_BODIES: Final[Mapping[str, Any]] = {"post /responses/input_tokens": {"model": "svc-chat", "input": "Say hello."}}
_PLACES: Final = {"id": "svc-chat", "month": "2026-11", "name": "chat-v1"}


def add_code_samples(document: Schema) -> Schema:
    """Returns the document with example requests at each operation."""
    paths = {
        path: {method: one | {FIELD: list(_samples(method, path, one, document))} for method, one in item.items()}
        for path, item in document["paths"].items()
    }
    return {**document, "paths": paths}


def _samples(method: str, path: str, operation: Schema, document: Schema) -> Iterator[dict[str, str]]:
    body = _BODIES.get(f"{method} {path}") or _body(operation, document)
    key = next((_KEYS[name] for one in operation["security"] for name in one), None)
    address = re.sub(r"{(\w+)}", lambda found: _PLACES.get(found[1], found[1].upper()), path)
    call = f"{method} {path}"
    if call in _OF_OPENAI or call in _OF_ANTHROPIC:
        python, node = _sdk(call, address.rpartition("/")[2] if "{" in path else None, body or {})
    else:
        python, node = _http(method, address, key, body)
    for language, label, source in (
        ("Shell", "curl", _curl(method, address, key, body)),
        ("Python", "Python", python),
        ("JavaScript", "Node", node),
    ):
        yield {"lang": language, "label": label, "source": source}


def _curl(method: str, address: str, key: str | None, body: Any) -> str:
    is_plain = method == "get" or (method == "post" and body is not None)
    parts = [f"curl {'' if is_plain else f'-X {method.upper()} '}{BASE}{address}"]
    if key is not None:
        parts.append(f'-H "Authorization: Bearer {key}"')
    if body is not None:
        text = literal(body, "json").replace("'", "'\\''")
        parts += ['-H "Content-Type: application/json"', f"-d '{text}'"]
    return " \\\n  ".join(parts)


def _sdk(call: str, argument: str | None, body: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the call in Python and in Node with the SDK that supports it."""
    is_openai = call in _OF_OPENAI
    name, package, base = ("OpenAI", "openai", BASE) if is_openai else ("Anthropic", "@anthropic-ai/sdk", EXAMPLE)
    function = (_OF_OPENAI if is_openai else _OF_ANTHROPIC)[call]
    if argument is not None:
        given = javascript = f'"{argument}"'
    elif body:
        given = "".join(f"\n    {field}={literal(value, 'python', 4)}," for field, value in body.items()) + "\n"
        javascript = literal(body, "node", inline=0)
    else:
        given = javascript = ""
    module = package if is_openai else "anthropic"
    python = (
        f"from {module} import {name}\n\n"
        f'client = {name}(base_url="{base}", api_key="YOUR_KEY")\n'
        f"reply = client.{function}({given})\nprint(reply)"
    )
    node = (
        f'import {name} from "{package}";\n\n'
        f'const client = new {name}({{ baseURL: "{base}", apiKey: "YOUR_KEY" }});\n'
        f"const reply = await client.{function}({javascript});\nconsole.log(reply);"
    )
    return python, node


def _http(method: str, address: str, key: str | None, body: Any) -> tuple[str, str]:
    """Returns the call in Python and in Node without an SDK."""
    url = f'"{BASE}{address}"'
    given = [url]
    options = [f'method: "{method.upper()}"'] if method != "get" else []
    if key is not None:
        given.append(f'headers={{"Authorization": "Bearer {key}"}}')
        typed = ', "Content-Type": "application/json"' if body is not None else ""
        options.append(f'headers: {{ Authorization: "Bearer {key}"{typed} }}')
    if body is not None:
        given.append(f"json={literal(body, 'python', 4)}")
        options.append(f"body: JSON.stringify({literal(body, 'node', 2)})")
    python = f"({url})" if len(given) == 1 else "(\n    " + ",\n    ".join(given) + ",\n)"
    node = f"{url}" if not options else f"{url}, {{\n  " + ",\n  ".join(options) + ",\n}"
    return (
        f"import httpx\n\nreply = httpx.{method}{python}\nprint(reply.text)",
        f"const reply = await fetch({node});\nconsole.log(await reply.text());",
    )


def literal(value: Any, language: str, indent: int = 0, inline: int = MAX_INLINE) -> str:
    """Returns a JSON value as a literal of `python`, `node` or `json`; long lists and objects on several lines."""
    if not isinstance(value, dict | list) or not value:
        names = {True: "True", False: "False", None: "None"} if language == "python" else {}
        found = names.get(value) if value is None or isinstance(value, bool) else None
        return found or json.dumps(value, ensure_ascii=False)
    step = 4 if language == "python" else 2
    before = [""] * len(value)
    if isinstance(value, dict):
        is_bare = language == "node"
        before = [f"{name if is_bare and name.isidentifier() else json.dumps(name)}: " for name in value]
    items = list(value.values()) if isinstance(value, dict) else value
    opens, closes = "{}" if isinstance(value, dict) else "[]"
    flat = [name + literal(one, language, 0, 10**6) for name, one in zip(before, items, strict=True)]
    space = " " if opens == "{" and language == "node" else ""
    line = f"{opens}{space}{', '.join(flat)}{space}{closes}"
    if len(line) <= inline:
        return line
    rows = [
        name + literal(one, language, indent + step, min(inline, MAX_INLINE) or MAX_INLINE)
        for name, one in zip(before, items, strict=True)
    ]
    pad, last = " " * (indent + step), "" if language == "json" else ","
    return f"{opens}\n{pad}" + f",\n{pad}".join(rows) + f"{last}\n{' ' * indent}{closes}"


def _body(operation: Schema, document: Schema) -> Any:
    """Returns the body of an example request: the first example of the operation, or else of the body's schema."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return None
    for one in content.get("examples", {}).values():
        return one["value"]
    return document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]["examples"][0]
