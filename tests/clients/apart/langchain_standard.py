"""LangChain's standard tests over its OpenAI client, pointed at the service that the environment names.

With SERVICE_MODEL=bundled, tests that ask more understanding than a model of 135 million parameters has may fail; with
`scripted`, the service's model is scripted to do what a capable one would, and all must pass.
"""

import os
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

BUNDLED = os.environ["SERVICE_MODEL"] == "bundled"
VERSIONS = pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)


def too_small(asks: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(BUNDLED, reason=f"the bundled model is too small to {asks}")


class TestStandard(ChatModelIntegrationTests):
    """The service's models read text only, so the tests of pictures, sound and documents are left out."""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": os.environ["SERVICE_URL"],
            "api_key": os.environ["SERVICE_KEY"],
            "model": "svc-chat",
            "stream_usage": True,
            "max_retries": 0,
            # A small model repeats itself, and its calls, until it is cut.
            "temperature": 0,
            "frequency_penalty": 0.5,
            "max_tokens": 300,
            "model_kwargs": {"parallel_tool_calls": False},
        }

    @property
    def model_override_value(self) -> str:
        return "svc-coder"

    @property
    def supports_json_mode(self) -> bool:
        return True

    @too_small("choose by itself to call a tool")
    @VERSIONS
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @too_small("write the members that a message asks for")
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)

    @too_small("end a text that it has begun")
    def test_structured_output_optional_param(self, model: BaseChatModel) -> None:
        super().test_structured_output_optional_param(model)

    @too_small("leave out members that an open schema allows")
    def test_structured_output_pydantic_2_v1(self, model: BaseChatModel) -> None:
        super().test_structured_output_pydantic_2_v1(model)
