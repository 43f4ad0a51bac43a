"""What a request is charged before it is known what it will use."""

from __future__ import annotations

from math import ceil
from typing import Final

from serve_app.limits.holds import Account

_FIRST_MEAN_OUTPUT: Final = 256.0  # tokens; what an account is taken to produce before it has produced anything


def output_budget(available: int, prompt_tokens: int, asked: int, prompt_price: int, output_price: int) -> int:
    """Tokens of output, at most `asked`, that `available` nano-units pay for after the prompt; below 1 if none."""
    left = available - prompt_tokens * prompt_price
    if left < 0:
        return 0
    return asked if output_price == 0 else min(asked, left // output_price)


def token_charge(prompt_tokens: int, budget: int, account: Account) -> int:
    """Tokens to charge before the output is known: its whole budget would refuse requests that would have fitted."""
    return prompt_tokens + min(budget, ceil(mean_output(account)))


def mean_output(account: Account) -> float:
    """Recent mean output. Before there is any, a modest guess, which alone never fills a small limit."""
    if account.mean_output is not None:
        return account.mean_output
    return min(_FIRST_MEAN_OUTPUT, account.contract.tpm / 2)
