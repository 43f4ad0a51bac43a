"""inspect-ai by `openai/` (Responses), `openai-api/NAME/` (chat) and `anthropic/`: an evaluation with a tool."""

import os
from pathlib import Path

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool

os.environ |= {
    "OPENAI_BASE_URL": os.environ["SERVICE_URL"],
    "OPENAI_API_KEY": os.environ["SERVICE_KEY"],
    "SVC_BASE_URL": os.environ["SERVICE_URL"],
    "SVC_API_KEY": os.environ["SERVICE_KEY"],
    "ANTHROPIC_BASE_URL": os.environ["SERVICE_URL"].removesuffix("/v1"),
    "ANTHROPIC_API_KEY": os.environ["SERVICE_KEY"],
}


@tool
def get_weather() -> Tool:
    async def execute(city: str) -> str:
        """The weather in a city.

        Args:
            city: A city.
        """
        return f"sunny in {city}."

    return execute


@pytest.mark.parametrize("model", ["openai/svc-chat", "openai-api/svc/svc-chat", "anthropic/svc-chat"])
def test_an_evaluation_with_a_tool_scores_every_sample(model: str, tmp_path: Path) -> None:
    samples = [
        Sample(input=f"What is the weather in {city}?", target=f"The answer is sunny in {city}.")
        for city in ("Paris", "Rome")
    ]
    task = Task(dataset=samples, solver=[use_tools(get_weather()), generate()], scorer=includes())
    [log] = eval(task, model=model, display="none", log_dir=str(tmp_path))
    assert log.status == "success", log.error
    assert log.results is not None
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    [usage] = log.stats.model_usage.values()
    assert usage.input_tokens > 0 < usage.output_tokens
