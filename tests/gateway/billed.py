"""Many billed requests at once, settled straight into the ledger."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from serve_app.contracts.books import Settled
from tests.accounting.books import settlement
from tests.gateway.world import NANO, World

START = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
BATCH = 1000


def bill(world: World, count: int, *, account_id: str = "", first: int = 0, every_s: float = 60.0, **of: Any) -> int:
    """`count` requests of different sizes, one every `every_s` seconds from START on; what they cost together."""
    account_id = account_id or world.account_id
    [key, *_] = world.ledger.list_keys(account_id)
    world.ledger.credit(account_id, 10 * NANO)
    charged = 0
    for begin in range(first, first + count, BATCH):
        answers = world.ledger.settle(
            [
                settlement(
                    f"{account_id}-{number:05}",
                    account_id,
                    key.key_id,
                    **{
                        "prompt_tokens": 10 + number % 7,
                        "completion_tokens": number % 11,
                        "started_at": START + number * every_s - 1.5,
                        "finished_at": START + number * every_s,
                        **of,
                    },
                )
                for number in range(begin, min(begin + BATCH, first + count))
            ]
        )
        charged += sum(one.charged for one in answers if isinstance(one, Settled))
    return charged
