"""The gate costs an engine with chunked prefill no throughput, and keeps a light account's waits short. Simulated."""

from __future__ import annotations

from math import ceil

import pytest
from _pytest.mark import ParameterSet

from bench.fair_gate import LIGHT_EVERY, Load, loads, simulate


def _case(load: Load) -> ParameterSet:
    everyday = load.delay == 2 and not (load.cached and load.step_tokens > 2048 and load.accounts > 1)
    name = f"{load.step_tokens} {load.delay} {load.prompt} {load.cached} {load.accounts} {load.output}"
    return pytest.param(load, id=name, marks=() if everyday else pytest.mark.slow)


@pytest.mark.parametrize("load", map(_case, loads()))
def test_prompts_are_computed_as_fast_as_without_the_gate(load: Load) -> None:
    steps = 20 if load.output == 1 else 110  # longer than a reply
    assert simulate(load, steps=steps).rate >= 0.95 * simulate(load, None, steps=steps).rate


@pytest.mark.parametrize("load", map(_case, (load for load in loads() if load.output == 1)))
def test_a_light_account_waits_for_one_prompt_of_each_busy_account_at_most(load: Load) -> None:
    uncached = load.prompt - load.cached
    waits = simulate(load, has_light=True, steps=3 * LIGHT_EVERY).waits
    assert max(waits) <= load.delay + 1 + ceil(load.accounts * uncached / load.step_tokens)
