"""Divides what one step can take: prompt tokens among tenants and prompts, rows for guesses among sequences."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq


def share_evenly(needs: Seq[int], budget: int) -> list[int]:
    """Max-min fair: nobody gets more than he needs, nor less than another unless he needs less, but for one.

    The first gets one at least where there is any budget, so that who is named first never starves.
    """
    shares = [0] * len(needs)
    order = sorted(range(len(needs)), key=lambda i: needs[i])
    for done, index in enumerate(order):
        shares[index] = min(needs[index], budget // (len(needs) - done))
        budget -= shares[index]
    if needs and needs[0] and not shares[0] and any(shares):
        shares[shares.index(max(shares))] -= 1
        shares[0] = 1
    return shares


def share_prefill(remaining: Seq[int], budget: int) -> list[int]:
    """Divide prefill tokens among one tenant's prompts, oldest first in `remaining`.

    The oldest gets at least half, so that it always advances; the rest goes to the prompts nearest to their first
    token, so that a short question does not wait behind a book; what they leave goes to the oldest.
    """
    if not remaining:
        return []
    shares = [0] * len(remaining)
    shares[0] = min(remaining[0], budget if len(remaining) == 1 else -(-budget // 2))
    left = budget - shares[0]
    for index in sorted(range(1, len(remaining)), key=lambda i: remaining[i]):
        shares[index] = min(remaining[index], left)
        left -= shares[index]
    shares[0] += min(remaining[0] - shares[0], left)
    return shares


def share_prefill_among_tenants(
    prompts: Seq[tuple[str, int]], budget: int, streaming: Container[str] = ()
) -> list[int]:
    """Divide a step's prefill tokens among `prompts`, (tenant, tokens that remain), oldest first.

    Evenly among tenants, so that a flood of one's prompts does not slow down another's only one, but two thirds go to
    those that are not `streaming`, who see nothing happen yet. Within a tenant see `share_prefill`.
    """
    members: dict[str, list[int]] = {}
    for index, (tenant, _) in enumerate(prompts):
        members.setdefault(tenant, []).append(index)
    needs = {tenant: sum(prompts[i][1] for i in indices) for tenant, indices in members.items()}
    silent = [tenant for tenant in needs if tenant not in streaming]
    others = [tenant for tenant in needs if tenant in streaming]
    rest = budget - sum(needs[tenant] for tenant in others)
    first = min(sum(needs[tenant] for tenant in silent), max(budget * 2 // 3, rest)) if others else budget
    shares = [0] * len(prompts)
    for tenants, part in ((silent, first), (others, budget - first)):
        for tenant, share in zip(tenants, share_evenly([needs[t] for t in tenants], part), strict=True):
            indices = members[tenant]
            for index, tokens in zip(indices, share_prefill([prompts[i][1] for i in indices], share), strict=True):
                shares[index] = tokens
    return shares
