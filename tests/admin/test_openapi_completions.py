"""The document's schema of a completion request agrees with the code that reads it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator

from serve_app.admin.document import build_document
from serve_app.api.completions_reply import Logprobs
from serve_app.api.completions_request import SHARED, CompletionFields, parse_completion_request
from serve_app.api.errors import ApiError
from serve_app.contracts.generation import TokenLogprob
from serve_app.settings import GatewaySettings
from tests.admin.test_openapi_request import BESIDE, UNTOLD
from tests.gateway.world import FULL_SETTINGS

MODELS = GatewaySettings.model_validate(FULL_SETTINGS).models
SERVED = {name: (model.context_length, model.max_output) for name, model in MODELS.items()}
DOCUMENT = build_document(MODELS)
VALIDATOR = Draft202012Validator(
    {"$ref": "#/components/schemas/CompletionRequest", "components": DOCUMENT["components"]}
)
FIELDS = DOCUMENT["components"]["schemas"]["CompletionRequest"]["properties"]
OPERATION = schemathesis.openapi.from_dict(DOCUMENT)["/completions"]["POST"]
# Rules that a schema can't express; the operation's description states them.
RULES = (
    *UNTOLD,
    "max_tokens must be at least 1 without echo",
    "best_of must be equal to n",
    "suffix is (not possible with echo|only possible with texts)",
    "stream_options.resume is not possible with echo or return_token_ids",
    "prompt and n ask for",
)


def is_untold(error: ApiError) -> bool:
    return any(re.search(rule, error.message) for rule in RULES)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "svc-chat", "prompt": "Hi", **fields}


def refusal(given: dict[str, Any]) -> ApiError | None:
    try:
        parse_completion_request(json.dumps(given).encode(), SERVED, 10**7)
    except ApiError as error:
        return error
    return None


def test_the_document_describes_each_field_that_the_code_reads_and_no_other() -> None:
    own = [field.alias or name for name, field in CompletionFields.model_fields.items()]
    assert list(FIELDS) == [*own, *SHARED]
    assert all(schema["description"] for schema in FIELDS.values())


@pytest.mark.parametrize(
    ("field", "value", "inside"),
    [
        ("logprobs", -1, False),
        ("logprobs", 0, True),
        ("logprobs", 5, True),
        ("logprobs", 6, False),
        ("max_tokens", -1, False),
        ("max_tokens", 1, True),
        ("max_tokens", 10**9, True),
        ("best_of", 0, False),
        ("best_of", 9, False),
        ("temperature", 2.1, False),
        ("n", 9, False),
    ],
)
def test_each_range_ends_where_the_document_says(field: str, value: int, inside: bool) -> None:
    error = refusal(body(**{field: value}))
    assert (error is None) is inside
    assert VALIDATOR.is_valid(body(**{field: value})) is inside
    if error is not None:
        assert (error.status, error.param) == (422, field)


PROMPTS: list[tuple[Any, bool]] = [
    ("", True),
    ([""], True),
    ([5], True),
    ([[5], [6]], True),
    (["a", [5]], True),
    (["a", 5], False),
    (["a", []], False),
    ([], False),
    ([[]], False),
    ([[5], []], False),
    ([-1], False),
    ([2**31], False),
    (["a"] * 64, True),
    (["a"] * 65, False),
    ([1.5], False),
    ([["a"]], False),
    ({}, False),
    (None, False),
]


@pytest.mark.parametrize(("prompt", "right"), PROMPTS)
def test_a_prompt_is_valid_by_the_document_where_the_code_accepts_it(prompt: Any, right: bool) -> None:
    given = body(prompt=prompt)
    assert (refusal(given) is None) is right
    assert VALIDATOR.is_valid(given) is right


@pytest.mark.parametrize("field", sorted(set(FIELDS) - {"model", "prompt"}))
def test_null_is_the_same_as_absent(field: str) -> None:
    given = body(**{field: None})
    assert refusal(given) is None
    assert VALIDATOR.is_valid(given)


@pytest.mark.parametrize("kind", [True, 1, 1.5, "x", ["x"], {"x": 1}])
@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_value_of_another_type_is_refused_exactly_where_the_document_refuses_it(field: str, kind: Any) -> None:
    given = body(**BESIDE.get(field, {})) | {field: kind}
    error = refusal(given)
    assert VALIDATOR.is_valid(given) is (error is None or is_untold(error))


@pytest.mark.parametrize("count", [10, pytest.param(250, marks=[pytest.mark.slow, pytest.mark.long])])
def test_a_request_that_the_document_allows_is_accepted_unless_it_breaks_a_rule_in_words(count: int) -> None:
    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(OPERATION.as_strategy())
    def check(case: schemathesis.Case) -> None:
        error = refusal(case.body)
        assert error is None or is_untold(error), error.message

    check()


def test_the_rules_that_no_schema_can_express_are_in_the_description() -> None:
    told = DOCUMENT["paths"]["/completions"]["post"]["description"]
    fields = ("`suffix`", "`min_tokens`", "`resume`", "`best_of`", "`max_tokens`")
    for words in ("decimal point", "equal", "context", "64 choices", *fields):
        assert words in told


def test_the_examples_are_requests_that_are_accepted() -> None:
    content = DOCUMENT["paths"]["/completions"]["post"]["requestBody"]["content"]["application/json"]
    for example in content["examples"].values():
        assert refusal(example["value"]) is None
        assert VALIDATOR.is_valid(example["value"])


def test_the_probabilities_of_a_reply_have_the_form_of_the_document() -> None:
    schema = {"$ref": "#/components/schemas/CompletionLogprobs", "components": DOCUMENT["components"]}
    tokens = [TokenLogprob(1, "a", b"a", 0.0), TokenLogprob(2, "�", b"\xff", float("-inf"))]
    made = Logprobs().add("a", tokens, of_prompt=True)
    Draft202012Validator(schema).validate(made)
    assert set(made) == set(DOCUMENT["components"]["schemas"]["CompletionLogprobs"]["properties"])
