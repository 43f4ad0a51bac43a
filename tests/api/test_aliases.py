"""Further names of identifiers: what each stands for, and what is not possible."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.api.chat_request import parse_chat_request
from serve_app.api.errors import ApiError
from serve_app.api.served_names import ServedNames
from serve_app.contracts.served import check_aliases
from serve_app.settings import GatewaySettings
from tests.api.requests import SERVED, body
from tests.gateway.world import FULL_SETTINGS

ALIASES = [("gpt-4o", "svc-chat"), ("claude-*", "svc-chat"), ("claude-opus*", "svc-coder"), ("svc-coder", "svc-chat")]
NAMES = ServedNames(SERVED, ALIASES)


@pytest.mark.parametrize(
    ("name", "identifier"),
    [
        ("gpt-4o", "svc-chat"),
        ("claude-sonnet", "svc-chat"),
        ("claude-", "svc-chat"),
        ("claude-opus-4", "svc-coder"),  # the longer wildcard
        ("svc-coder", "svc-coder"),  # an identifier goes before an alias
        ("svc-chat", "svc-chat"),
    ],
)
def test_a_request_has_the_identifier_that_its_name_stands_for(name: str, identifier: str) -> None:
    request = parse_chat_request(json.dumps(body(model=name)).encode(), NAMES)
    assert request.model == identifier


@pytest.mark.parametrize("name", ["gpt-4o-mini", "GPT-4o", "claude", "gpt-4o "])
def test_another_name_is_not_found_and_the_identifiers_are_listed(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat_request(json.dumps(body(model=name)).encode(), NAMES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "svc-chat, svc-coder." in caught.value.message


def test_an_alias_for_every_name_is_possible() -> None:
    names = ServedNames(SERVED, [("*", "svc-coder"), ("gpt-*", "svc-chat")])
    assert [names.identifier_of(name) for name in ("anything", "gpt-5", "svc-chat")] == [
        "svc-coder", "svc-chat", "svc-chat",
    ]  # fmt: skip


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"a": ["b"], "b": []}, "b is an identifier"),
    ({"a": ["a"]}, "a is an identifier"),
    ({"a": ["x"], "b": ["x"]}, "x is already an alias of a"),
    ({"a": ["x", "x"]}, "x is already an alias of a"),
    ({"a": ["x*y"]}, "may end with"),
    ({"a": [""]}, "begins with a letter or digit"),
    ({"a": ["x" * 101]}, "begins with a letter or digit"),
    ({"a": ["x y"]}, "begins with a letter or digit"),
    ({"a": [f"x{n}" for n in range(51)]}, "at most 50"),
]


@pytest.mark.parametrize(("aliases", "told"), WRONG)
def test_unclear_aliases_are_refused(aliases: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_aliases(aliases)


def test_clear_aliases_are_possible() -> None:
    check_aliases({"a": ["gpt-4o", "gpt-4o*", "*", "openai/gpt-4o:free", "llama3:8b"], "b": ["gpt-*"]})


def test_the_configuration_is_checked() -> None:
    models = {**FULL_SETTINGS["models"]}
    models["svc-chat"] = {**models["svc-chat"], "aliases": ["svc-coder"]}
    with pytest.raises(ValueError, match="svc-coder is an identifier"):
        GatewaySettings.model_validate({**FULL_SETTINGS, "models": models})
