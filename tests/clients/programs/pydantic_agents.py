"""pydantic-ai by `openai:` (Responses), `openai-chat:` and `anthropic:`: tools, streams and output types."""

import os

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models import Model, infer_model

os.environ |= {
    "OPENAI_BASE_URL": os.environ["SERVICE_URL"],
    "OPENAI_API_KEY": os.environ["SERVICE_KEY"],
    "ANTHROPIC_BASE_URL": os.environ["SERVICE_URL"].removesuffix("/v1"),
    "ANTHROPIC_API_KEY": os.environ["SERVICE_KEY"],
}
MODELS = ["openai:svc-chat", "openai-chat:svc-chat", "anthropic:svc-chat"]
ASKED = "What is the weather in Paris?"


class Joke(BaseModel):
    setup: str
    punchline: str


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}."


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return infer_model(request.param)


async def test_a_tool_is_called_and_its_result_answers(model: Model) -> None:
    result = await Agent(model, instructions="Be short.", tools=[get_weather]).run(ASKED)
    assert result.output == "The answer is sunny in Paris."
    usage = result.usage
    assert usage.requests == 2
    assert usage.input_tokens > 0 < usage.output_tokens


async def test_a_stream_ends_with_the_answer(model: Model) -> None:
    async with Agent(model, tools=[get_weather]).run_stream(ASKED) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == "The answer is sunny in Paris."
    assert len(pieces) > 1


async def test_an_output_type_is_a_call_that_fits(model: Model) -> None:
    assert isinstance((await Agent(model, output_type=Joke).run("Tell a joke.")).output, Joke)


async def test_a_second_run_has_the_first_ones_messages(model: Model) -> None:
    agent = Agent(model, tools=[get_weather])
    first = await agent.run(ASKED)
    second = await agent.run("And in Rome?", message_history=first.all_messages())
    assert second.output == "The answer is sunny in Rome."
