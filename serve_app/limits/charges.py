"""What a request is charged before it is known what it will use."""

from __future__ import annotations

from math import ceil
from typing import Final

from serve_app.limits.accounts import Account
from serve_app.limits.keys import Key

_FIRST_MEAN_OUTPUT: Final = 256.0  # tokens; what is taken to be produced before anything has been
_MEAN_WEIGHT: Final = 0.2  # of the newest reply in the moving average: about the last ten replies count


def output_budget(available: int, prompt_tokens: int, asked: int, prompt_price: int, output_price: int) -> int:
    """Tokens of output, at most `asked`, that `available` nano-units pay for after the prompt; below 1 if none."""
    left = available - prompt_tokens * prompt_price
    if left < 0:
        return 0
    return asked if output_price == 0 else min(asked, left // output_price)


def token_charge(prompt_tokens: int, budget: int, key: Key) -> int:
    """Tokens to charge before the output is known: its whole budget would refuse requests that would have fitted."""
    expected = ceil(_expected_output(key))
    return prompt_tokens + (budget if budget < expected else expected)


def learn_output(key: Key, completion_tokens: int) -> None:
    """Moves the means towards one reply's tokens."""
    if key.tokens is not None:
        mean = _expected_output(key)
        key.mean_output = mean + _MEAN_WEIGHT * (completion_tokens - mean)
    account = key.account
    mean = _expected_output_of(account)
    account.mean_output = mean + _MEAN_WEIGHT * (completion_tokens - mean)


def _expected_output(key: Key) -> float:
    """The recent mean: the key's where it has a token limit of its own, else its account's.

    Before there is any, a modest guess, which alone never fills a small limit.
    """
    mean = key.account.mean_output if key.tokens is None else key.mean_output
    if mean is not None:
        return mean
    if key.tokens is None:
        return _expected_output_of(key.account)
    return min(_expected_output_of(key.account), key.tokens.limit / 2)


def _expected_output_of(account: Account) -> float:
    mean = account.mean_output
    return mean if mean is not None else min(_FIRST_MEAN_OUTPUT, account.tokens.limit / 2)
