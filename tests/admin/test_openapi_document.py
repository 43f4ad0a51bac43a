"""`/openapi.json` is complete: every route, every status, every error, as the code has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from starlette.routing import Route

from serve_app.admin.document import REFUSED_REQUESTS, build_document, customer_document, operator_document
from serve_app.api import errors
from serve_app.api.responses_chat import previous_response_not_found
from serve_app.gateway.backends import Catalogue
from serve_app.settings import GatewaySettings
from tests.gateway.world import FULL_SETTINGS, OPERATOR, World

DOCUMENT = build_document(GatewaySettings.model_validate(FULL_SETTINGS).models)
ERRORS = [
    errors.invalid_format("m", "f"),
    errors.body_too_large(1),
    errors.authentication("m"),
    errors.insufficient_balance("m"),
    errors.insufficient_balance("m", code="budget_exceeded"),
    errors.forbidden("m", code="address_not_allowed"),
    errors.not_found("m"),
    previous_response_not_found("resp_1"),
    errors.method_not_allowed("PUT", "/", ["GET"]),
    errors.body_timeout(1),
    errors.body_encoded("gzip"),
    errors.idempotency_in_progress("m", retry_after_s=0.5),
    errors.invalid_parameters("m", "f"),
    errors.idempotency_key_reused(),
    errors.model_not_found("m", ["a"]),
    errors.context_length_exceeded(2, 1),
    *(errors.rate_limit("m", code=code, retry_after_s=99) for code in ("requests", "tokens", "concurrency")),
    errors.rate_limit("m", code="wrong_keys", retry_after_s=0),
    errors.server_error("id"),
    errors.overloaded("m", retry_after_s=2),
]


def resolved(reference: dict[str, str]) -> Any:
    found: Any = DOCUMENT
    for step in reference["$ref"].removeprefix("#/").split("/"):
        found = found[step]
    return found


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Method and path of every route."""
    for path, item in app.openapi()["paths"].items():
        yield from ((method.upper(), path) for method in item)
    for route in app.router.routes:  # what FastAPI's own document leaves out
        if isinstance(route, Route):
            yield from ((method, route.path) for method in route.methods or ())


def test_the_document_is_valid_openapi_3_1() -> None:
    assert DOCUMENT["openapi"].startswith("3.1.")
    schemathesis.openapi.from_dict(DOCUMENT).validate()
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_the_example_of_a_reply_is_one() -> None:
    content = DOCUMENT["paths"]["/chat/completions"]["post"]["responses"]["200"]["content"]["application/json"]
    schema = {**content["schema"], "components": DOCUMENT["components"]}
    for one in content["examples"].values():
        Draft202012Validator(schema).validate(one["value"])


def test_the_document_and_the_guide_say_alike_which_refused_requests_count() -> None:
    assert REFUSED_REQUESTS in DOCUMENT["paths"]["/chat/completions"]["post"]["description"]
    assert REFUSED_REQUESTS in (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def test_every_route_is_described_under_both_base_forms_and_nothing_else_is(world: World) -> None:
    served = {
        (method, path)
        for method, path in routes(world.app())
        if not path.removeprefix("/v1").startswith(("/docs", "/openapi.json", "/admin/openapi.json"))
    }
    plain = {(method.upper(), path) for path, item in DOCUMENT["paths"].items() for method in item}
    assert served == plain | {(method, f"/v1{path}") for method, path in plain}
    assert [server["url"] for server in DOCUMENT["servers"]] == ["/v1", "/"]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{error.status}-{error.code}")
def test_every_error_is_as_its_status_says(error: errors.ApiError) -> None:
    responses = {
        status: resolved(response) if "$ref" in response else response
        for item in DOCUMENT["paths"].values()
        for operation in item.values()
        for status, response in operation["responses"].items()
        if operation["tags"] != ["Messages"]  # its errors have their own form
    } | {"405": DOCUMENT["components"]["responses"]["MethodNotAllowed"]}
    response = responses[str(error.status)]
    schema = response["content"]["application/json"]["schema"]
    Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(error.body())
    told = {name for name, header in response["headers"].items() if resolved(header).get("required")}
    # `connection` is between two ends of a connection, and no part of the answer.
    assert told - {"x-request-id"} <= set(error.headers) - {"connection"} <= set(response["headers"])


def test_no_error_is_left_out_of_these_tests() -> None:
    assert {error.status for error in ERRORS} == set(errors.ERROR_TYPES)
    documented = resolved({"$ref": "#/components/schemas/Error"})["properties"]["error"]["properties"]
    assert {error.code for error in ERRORS} == set(documented["code"]["enum"])
    assert {error.type for error in ERRORS} == set(documented["type"]["enum"])


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_customers_read_their_document_without_a_key_and_operators_the_whole_one_with_theirs(
    http: httpx.AsyncClient, prefix: str
) -> None:
    answer = await http.get(f"{prefix}/openapi.json")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json() == json.loads(json.dumps(customer_document(DOCUMENT)))
    assert (await http.get(f"{prefix}/admin/openapi.json")).status_code == 401
    whole = await http.get(f"{prefix}/admin/openapi.json", headers={"authorization": f"Bearer {OPERATOR}"})
    assert whole.json() == json.loads(json.dumps(DOCUMENT))


def test_the_customers_document_is_whole_and_says_nothing_about_operators() -> None:
    document = customer_document(DOCUMENT)
    schemathesis.openapi.from_dict(document).validate()
    assert "operator" not in json.dumps(document).lower().replace("operator of this service", "")
    customers = {path for path in DOCUMENT["paths"] if not path.startswith("/admin")}
    assert document["paths"].keys() == customers
    assert {"apiKey", "managementKey"} == document["components"]["securitySchemes"].keys()
    shown = {tag for item in document["paths"].values() for one in item.values() for tag in one["tags"]}
    assert shown == {tag["name"] for tag in document["tags"]}
    operators = operator_document(DOCUMENT)
    assert operators["info"]["title"] != customer_document(DOCUMENT)["info"]["title"]
    schemathesis.openapi.from_dict(operators).validate()
    assert operators["paths"].keys() == DOCUMENT["paths"].keys() - customers
    assert {"operatorKey"} == operators["components"]["securitySchemes"].keys()


async def test_the_document_follows_the_configuration_of_the_running_service(
    world: World, http: httpx.AsyncClient
) -> None:
    await http.get("/openapi.json")
    models = {"other": {**FULL_SETTINGS["models"]["svc-chat"], "max_output": 100}}
    world.services.catalogue = Catalogue(GatewaySettings.model_validate({"models": models}))
    fields = (await http.get("/openapi.json")).json()["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert fields["model"]["enum"] == ["other"]
    assert fields["min_tokens"]["maximum"] == 100
    models["other"]["aliases"] = ["gpt-4o", "claude-*"]
    world.services.catalogue = Catalogue(GatewaySettings.model_validate({"models": models}))
    fields = (await http.get("/openapi.json")).json()["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert fields["model"]["anyOf"] == [{"enum": ["other", "gpt-4o"]}, {"pattern": "^(claude\\-)"}]


def test_operations_have_unique_ids_a_summary_and_their_security() -> None:
    operations = [operation for item in DOCUMENT["paths"].values() for operation in item.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    tags = {tag["name"] for tag in DOCUMENT["tags"]}
    for operation in operations:
        assert operation["summary"]
        assert set(operation["tags"]) <= tags
        assert "security" in operation
        assert "500" in operation["responses"]
        assert bool(operation["security"]) is ("401" in operation["responses"])


async def test_a_405_lists_the_methods_of_the_path(http: httpx.AsyncClient) -> None:
    for path, item in DOCUMENT["paths"].items():
        answer = await http.put(path)
        assert answer.status_code == 405
        assert set(answer.headers["allow"].split(", ")) == {method.upper() for method in item}, path
