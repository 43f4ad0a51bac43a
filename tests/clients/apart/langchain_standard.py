"""LangChain's standard tests over its OpenAI client, pointed at the service that the environment names.

The service's model is scripted to do what a capable one would.
"""

import os
from typing import Any

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


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
            "temperature": 0,
            "max_tokens": 300,
            "model_kwargs": {"parallel_tool_calls": False},
        }

    @property
    def model_override_value(self) -> str:
        return "svc-coder"

    @property
    def supports_json_mode(self) -> bool:
        return True
