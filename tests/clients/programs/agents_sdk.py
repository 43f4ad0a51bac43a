"""OpenAI's Agents SDK with its defaults, which is the Responses format: tools, streams, handoffs and output types."""

import os
from collections.abc import Iterator

import agents
import pytest
from agents import Agent, Runner, function_tool
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel


class Joke(BaseModel):
    setup: str
    punchline: str


@pytest.fixture(autouse=True)
def service() -> Iterator[None]:
    agents.set_tracing_disabled(True)
    agents.set_default_openai_client(AsyncOpenAI(base_url=os.environ["SERVICE_URL"], api_key=os.environ["SERVICE_KEY"]))
    yield
    agents.set_default_openai_api("responses")


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}."


ASKED = "What is the weather in Paris?"


def helper() -> Agent:
    return Agent(name="Helper", instructions="Be short.", model="svc-chat", tools=[get_weather])


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
async def test_a_tool_is_called_and_its_result_answers(api: str) -> None:
    agents.set_default_openai_api(api)
    result = await Runner.run(helper(), ASKED)
    assert result.final_output == "The answer is sunny in Paris."
    usage = result.context_wrapper.usage
    assert usage.requests == 2
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
async def test_a_streamed_run_tells_its_text_in_pieces(api: str) -> None:
    agents.set_default_openai_api(api)
    result = Runner.run_streamed(helper(), ASKED)
    events = [event async for event in result.stream_events()]
    deltas = [
        event.data.delta
        for event in events
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
    ]
    assert "".join(deltas) == result.final_output == "The answer is sunny in Paris."
    assert len(deltas) > 1


async def test_an_agent_hands_off_to_another() -> None:
    spanish = Agent(name="Spanish", instructions="Speak Spanish.", model="svc-chat")
    triage = Agent(name="Triage", instructions="Hand off.", model="svc-chat", handoffs=[spanish])
    result = await Runner.run(triage, "Hola")
    assert result.last_agent.name == "Spanish"
    assert result.final_output


async def test_a_second_turn_has_the_first_ones_items() -> None:
    first = await Runner.run(helper(), ASKED)
    second = await Runner.run(helper(), [*first.to_input_list(), {"role": "user", "content": "And in Rome?"}])
    assert second.final_output == "The answer is sunny in Rome."


async def test_a_second_turn_may_name_the_first_ones_response() -> None:
    first = await Runner.run(helper(), ASKED)
    second = await Runner.run(helper(), "And in Rome?", previous_response_id=first.last_response_id)
    assert second.final_output == "The answer is sunny in Rome."
    sizes = [response.usage.input_tokens for response in (first.raw_responses[-1], second.raw_responses[-1])]
    assert sizes[1] > sizes[0], "the second turn has the first one before it"


async def test_an_output_type_is_enforced() -> None:
    agent = Agent(name="Joker", model="svc-chat", output_type=Joke)
    assert isinstance((await Runner.run(agent, "Tell a joke.")).final_output, Joke)
