"""Limits and money: do the books balance, is all delivered usage billed, and who is limited?"""

from __future__ import annotations

from typing import Final

from dashboards.layout import board
from dashboards.panels import Board, bad_from, graph, high_is_bad, low_is_bad, single
from dashboards.promql import SERVICE, increase_of, least, most, or_zero, quantiles, rate_of, share, total
from serve_app.contracts import metrics

ANY: Final = 1e-9  # the smallest amount of money above 0
SHARD: Final = f"{SERVICE}, shard"
SHARD_LEGEND: Final = "{{cluster}} {{namespace}} shard {{shard}}"
NOT_ASKED: Final = "not exported"


def an_hour(rate: str) -> str:
    return f"{rate} * 3600"


NOW_ROW = [
    single(
        "Do the books balance?", most(metrics.BOOKS_DIFFERENCES), "short", bad_from(1), empty="not checked",
        good="0 differences at the last check.",
        otherwise="Run `serve-app ledger check`: it names each difference. Keep a copy of the database before changing "
        "anything.",
        then=Board.CLUSTER,
    ),
    single(
        "How long ago were the books checked?", f"time() - min({most(metrics.BOOKS_CHECKED, SERVICE)})", "s",
        high_is_bad(1800, 3600), empty="not checked",
        good="Within the last quarter of an hour: books_check_s.",
        otherwise="Run `serve-app ledger check`, and see in accounting's log why its own check does not run.",
        then=Board.CLUSTER,
    ),
    single(
        "How many settlements are stuck?", most(metrics.STUCK), "short", bad_from(1), empty=NOT_ASKED,
        good="0.",
        otherwise="Their replies were delivered and are not billed. `serve-app ledger stuck` shows the reason. Fix it, "
        "then settle them with --all.",
        then=Board.CLUSTER,
    ),
    single(
        "What was not covered in the last hour?", or_zero(increase_of(metrics.UNCOLLECTED, over="1h")), "short",
        bad_from(ANY),
        good="0 units of currency: holds cover every charge.",
        otherwise="Search accounting's log for 'more than the balance held', then look for expired holds and a second "
        "limiter.",
        then=Board.CLUSTER,
    ),
    single(
        "How old is the oldest usage in a spool?", most(metrics.SPOOL_AGE), "s", high_is_bad(15, 60), empty=NOT_ASKED,
        good="A few seconds, in replicas.",
        otherwise="The ledger is unavailable or slow: restore the database. Keep pods of gateways and models until "
        "the spools are empty.",
        then=Board.CLUSTER,
    ),
    single(
        "Does every limiter shard admit?", f"min({most(metrics.LIMITER_EPOCH, SHARD)})", "short", low_is_bad(1, 1),
        empty="no limiter",
        good="Above 0: the lowest epoch under which a shard admits.",
        otherwise="0 for more than half a minute: check the limiter's log. It needs the ledger, and waits for the "
        "lease of a predecessor that is silent (docs/design/limiter-leases.md).",
        then=Board.CLUSTER,
    ),
    single(
        "How old is the limiters' data about keys?", f"max({least(metrics.FEED_AGE_SECONDS, SHARD)})", "s",
        high_is_bad(2, 5), empty="no limiter",
        good="Below 2 s.",
        otherwise="Above key_staleness_s all keys get 503: check accounting and the ledger's database.",
        then=Board.CLUSTER,
    ),
    single(
        "Does revenue cover the cost of replicas?",
        share(an_hour(rate_of(metrics.REVENUE, over="1h")), total(metrics.REPLICA_COST)), "percentunit",
        low_is_bad(1, 1.5), empty="no cost set",
        good="150% or more, over the last hour.",
        otherwise="Replicas idle, or prices are low: compare the two in 'Does revenue exceed the cost?'.",
        then=Board.CAPACITY,
    ),
]  # fmt: skip

EARNINGS = [
    graph(
        "Does revenue exceed the cost?",
        {
            "earned with {{model}}": an_hour(rate_of(metrics.REVENUE, "model")),
            "cost of {{application}}": total(metrics.REPLICA_COST, "application"),
        },
        "short",
        good="Units of currency per hour: revenue is above the cost, except in quiet hours.",
        otherwise="Lower min_replicas in quiet hours, or review the prices.",
        then=Board.CAPACITY,
    ),
    graph(
        "How many tokens are billed?",
        {
            "{{model}} prompt": rate_of(metrics.PROMPT_TOKENS, "model"),
            "{{model}} prompt, cached": rate_of(metrics.CACHED_TOKENS, "model"),
            "{{model}} output": rate_of(metrics.COMPLETION_TOKENS, "model"),
        },
        "short",
        good="Tokens per second: the usual shape of the day.",
        otherwise="Tokens without revenue: usage waits in a spool, or settlements fail.",
        then=Board.ENGINE,
    ),
    graph(
        "What was delivered and not paid for?",
        {"uncollected in an hour": increase_of(metrics.UNCOLLECTED, over="1h"), "stuck": most(metrics.STUCK)},
        "short",
        good="0 units of currency, 0 settlements.",
        otherwise="See the single values above.",
        then=Board.CLUSTER,
    ),
]  # fmt: skip

SETTLEMENTS = [
    graph(
        "How do settlements end?", {"{{outcome}}": rate_of(metrics.SETTLEMENTS, "outcome")}, "ops", stacked=True,
        good="Nearly all completed.",
        otherwise="spooled: the ledger did not answer in time. rejected: it could not be settled, see "
        "`serve-app ledger stuck`. failed: the request failed and is not billed.",
        then=Board.USERS,
    ),
    graph(
        "How long does the last chunk wait for the ledger?", quantiles(metrics.SETTLEMENT_SECONDS), "s",
        good="p99 below 0.1 s. The last chunk of every reply waits for it.",
        otherwise="Check the ledger's database: its disk, its locks, the network.",
        then=Board.USERS,
    ),
    graph(
        "How far behind is the ledger?", quantiles(metrics.LEDGER_LAG), "s",
        good="From a request's end to its commit: below a second.",
        otherwise="Minutes: spools are replayed after an outage. Until then, balances are out of date.",
        then=Board.CLUSTER,
    ),
]  # fmt: skip

BOOKS = [
    graph(
        "How much usage waits in spools?", {"{{holder}}": total(metrics.SPOOL_SETTLEMENTS, "holder")}, "short",
        good="0 in gateways, a few in replicas (their last seconds).",
        otherwise="It grows while the ledger is unavailable, then falls. If it does not fall, see how long "
        "settlements take.",
        then=Board.CLUSTER,
    ),
    graph(
        "How long has usage waited?", {"{{holder}}": most(metrics.SPOOL_AGE, "holder")}, "s",
        good="Seconds.",
        otherwise="It rises for as long as the ledger is unavailable.",
        then=Board.CLUSTER,
    ),
    graph(
        "How large is the largest spool?", {"{{holder}}": most(metrics.SPOOL_BYTES, "holder")}, "bytes",
        good="Far below spool_max_bytes.",
        otherwise="At nine tenths of spool_max_bytes a gateway admits nothing: restore the database before that.",
        then=Board.CLUSTER,
    ),
    graph(
        "Have the books ever differed?", {"differences": most(metrics.BOOKS_DIFFERENCES)}, "short",
        good="0 at every check.",
        otherwise="Search the log for the time between the last check without a difference and the rise.",
        then=Board.CLUSTER,
    ),
]  # fmt: skip

LIMITS = [
    graph(
        "Which limits refuse requests?", {"{{reason}} {{model}}": rate_of(metrics.REFUSALS, "reason, model")}, "reqps",
        good="requests, tokens, concurrency in proportion to traffic.",
        otherwise="insufficient_balance, budget_exceeded: customers who want to pay more. invalid_api_key, wrong_keys: "
        "someone is guessing keys. address_not_allowed: a key is used from elsewhere.",
        then=Board.USERS,
    ),
    graph(
        "How high is the pressure?", {"{{backend}} shard {{shard}}": most(metrics.PRESSURE, "shard, backend")},
        "short",
        good="0: nothing waits. The value is the larger of two ratios: queueing delay to its target, and work in "
        "queued prompts to its target.",
        otherwise="Around 1 for minutes: limits fall to keep it there. Add replicas (docs/guides/pressure.md).",
        then=Board.CAPACITY,
    ),
    graph(
        "How much of its limits does an account keep?",
        {"{{backend}} shard {{shard}}": least(metrics.EFFECTIVE_SHARE, "shard, backend")}, "percentunit",
        good="100%, for an account with the default contract.",
        otherwise="Pressure has lowered the limits. Accounts with more weight keep more.",
        then=Board.CAPACITY,
    ),
    graph(
        "For how many requests is money held?", {"shard {{shard}}": total(metrics.HOLDS, "shard")}, "short",
        good="The number of running requests.",
        otherwise="More than that: settlements wait, or a gateway died and its holds have not expired yet.",
        then=Board.CAPACITY,
    ),
    graph(
        "How much money is held?", {"shard {{shard}}": total(metrics.HELD, "shard")}, "short",
        good="Units of currency: it follows the running requests.",
        otherwise="It grows without traffic: holds are not released.",
        then=Board.USERS,
    ),
    graph(
        "How many holds expire in an hour?",
        {"shard {{shard}}": increase_of(metrics.EXPIRED_HOLDS, "shard", over="1h")}, "short",
        good="0.",
        otherwise="A gateway died or hung for longer than lease_s: check its log. Its usage is settled anyway.",
        then=Board.CLUSTER,
    ),
    graph(
        "Under which epoch does each shard admit?", {SHARD_LEGEND: most(metrics.LIMITER_EPOCH, SHARD)}, "short",
        good="One line for each shard, which steps up when its limiter is replaced.",
        otherwise="Many steps: limiters die, or two services compete for one ledger.",
        then=Board.CLUSTER,
    ),
    graph(
        "When did limiters last read changes?", {SHARD_LEGEND: least(metrics.FEED_AGE_SECONDS, SHARD)}, "s",
        good="Below 2 s.",
        otherwise="Revoked keys may still work, until the limiter refuses all of them.",
        then=Board.CLUSTER,
    ),
]  # fmt: skip

BOARD: Final = board(
    Board.MONEY,
    "Do the books balance, is all delivered usage paid, and who is limited?",
    ("identifier", "backend"),
    {"Now": NOW_ROW, "Earnings": EARNINGS, "Settlements": SETTLEMENTS, "Books and spools": BOOKS, "Limits": LIMITS},
)
