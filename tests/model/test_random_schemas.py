"""Random schemas and random sampling: every reply that finishes is valid. The model is tiny and its text is noise."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from serve_app.contracts.generation import Delta, Ending, Finished, FinishReason, GenerateCall, Grammar, GrammarKind
from serve_app.engine.engine import Engine
from serve_app.model.dialect import Dialect
from serve_app.model.replica import Replica
from serve_app.model.tools.format_table import TOOL_FORMATS
from tests.model.conftest import no_orphans
from tests.model.random_schemas import a_schema, an_object_schema, some_sampling, validate
from tests.model.test_format_on_the_model import BILL
from tests.model.test_tools_on_the_model import calls_of

pytestmark = pytest.mark.asyncio(loop_scope="session")  # the engine compiles grammars for one loop

MESSAGES = ({"role": "user", "content": "Answer in JSON."},)
AT_ONCE = 8


async def replies(
    engine: Engine, calls: Sequence[GenerateCall], dialect: Dialect | None = None
) -> list[tuple[list[Any], Finished]]:
    """The events and the end of each call; they run eight at once."""
    replica = Replica(engine, no_orphans, dialect=dialect)

    async def one(call: GenerateCall) -> tuple[list[Any], Finished]:
        events = [event async for event in replica.generate(call)]
        assert isinstance(events[-1], Finished), events[-1]
        return events, events[-1]

    found = []
    for start in range(0, len(calls), AT_ONCE):
        found += await asyncio.gather(*map(one, calls[start : start + AT_ONCE]))
    return found


async def check(engine: Engine, count: int, seed: int) -> None:
    rng = random.Random(seed)
    schemas = [a_schema(rng) for _ in range(count)]
    calls = []
    for number, schema in enumerate(schemas):
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), strict=number % 2 == 0)
        calls.append(GenerateCall(f"r{number}", MESSAGES, some_sampling(rng, grammar=grammar), 10**12, BILL))
    finished = 0
    for schema, call, (events, end) in zip(schemas, calls, await replies(engine, calls), strict=True):
        assert end.reason in (FinishReason.STOP, FinishReason.LENGTH), (schema, call.sampling)
        if end.reason is FinishReason.STOP:
            finished += 1
            validate("".join(event.text for event in events if isinstance(event, Delta)), schema)
    assert finished >= 0.6 * count


async def test_every_finished_reply_is_valid_for_its_random_schema(engine: Engine) -> None:
    await check(engine, 16, seed=101)


@pytest.mark.slow
async def test_64_random_schemas_with_random_sampling(engine: Engine) -> None:
    await check(engine, 64, seed=105)


@pytest.mark.slow
@pytest.mark.long
async def test_250_random_schemas_with_random_sampling(engine: Engine) -> None:
    await check(engine, 250, seed=102)


async def check_calls(engine: Engine, count: int, seed: int) -> None:
    """Required calls, of some functions or of a named one, in each format."""
    rng = random.Random(seed)
    formats = sorted(TOOL_FORMATS)
    whole = 0
    for number in range(0, count, AT_ONCE):
        schemas = [{f"f{i}": an_object_schema(rng) for i in range(rng.randint(1, 3))} for _ in range(AT_ONCE)]
        calls = [
            GenerateCall(
                f"r{i}",
                MESSAGES,
                some_sampling(rng),
                10**12,
                BILL,
                tools=tuple(
                    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
                    for name, schema in chosen.items()
                ),
                tool_choice="required",
                function=rng.choice([None, "f0"]),
                parallel_calls=rng.random() < 0.5,
            )
            for i, chosen in enumerate(schemas)
        ]
        dialect = Dialect(engine.chat, formats[number // AT_ONCE % len(formats)])
        for chosen, call, (events, end) in zip(schemas, calls, await replies(engine, calls, dialect), strict=True):
            made = calls_of(events)
            assert end.reason in (FinishReason.STOP, FinishReason.LENGTH), (chosen, call.sampling)
            for name, arguments, ending in made:
                assert name in ({call.function} if call.function else chosen)
                if ending is Ending.COMPLETE:
                    whole += 1
                    validate(json.dumps(arguments), chosen[name])
            if end.reason is FinishReason.STOP:
                assert made, "a call was compulsory"
                assert all(ending is Ending.COMPLETE for _, _, ending in made)
                assert len(made) == 1 or (call.parallel_calls and not call.function)
    assert whole >= 0.6 * count


async def test_the_arguments_of_compulsory_calls_are_valid_for_their_random_schemas(engine: Engine) -> None:
    await check_calls(engine, 8, seed=103)


@pytest.mark.slow
async def test_32_compulsory_calls_in_the_form_of_four_formats(engine: Engine) -> None:
    await check_calls(engine, 32, seed=106)


@pytest.mark.slow
@pytest.mark.long
async def test_112_compulsory_calls_in_the_form_of_every_format(engine: Engine) -> None:
    await check_calls(engine, 112, seed=104)
