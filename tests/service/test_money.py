"""Money with many requests at once: nothing is overspent."""

from __future__ import annotations

import pytest

from tests.service.crowd import Crowd
from tests.service.harness import FRANCE, HELD, Service
from tests.service.replies import prompt_tokens

pytestmark = pytest.mark.service


async def test_60_at_once_on_a_balance_for_15_spend_it_and_no_more(service: Service) -> None:
    await Crowd(HELD, FRANCE, prompt_tokens(FRANCE), 0, tokens=40, requests=60, paid=15).buy(service)
