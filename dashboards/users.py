"""User health: do users get answers, and in time?"""

from __future__ import annotations

from typing import Final

from dashboards.layout import board
from dashboards.panels import Board, Thresholds, graph, high_is_bad, low_is_bad, single
from dashboards.promql import ALL_SHOWN, NOW, or_zero, quantile, quantiles, rate_of, share
from dashboards.rules.slo import SLOS
from serve_app.contracts import metrics

ERRORS: Final = 'status=~"5.."'
COUNTED: Final = 'status!~"4.."'  # excludes 4xx: the client's error or limit, or a client that hung up (499)
# All backends, and requests that were refused before they had one. REFUSALS has no label `backend`, so its share must
# not be of the selected backend's requests.
ANY_BACKEND: Final = 'backend=~".+"'
NO_TRAFFIC: Final = "no traffic"


def in_time(target: str) -> str:
    """Returns an expression for the share of served requests that met a latency target of their identifier."""
    met = rate_of(metrics.LATENCY_TARGETS, where=f'target="{target}", met="yes"', over=NOW)
    return share(met, rate_of(metrics.LATENCY_TARGETS, where=f'target="{target}"', over=NOW))


def availability(over: str) -> str:
    errors, counted = (rate_of(metrics.REQUESTS, where=where, over=over) for where in (ERRORS, COUNTED))
    return f"1 - {share(or_zero(errors), counted)}"


def promised(slo: str) -> Thresholds:
    """Returns thresholds. Green: the objective is met. Red: the error budget is spent ten times too fast."""
    target = next(one.target for one in SLOS if one.name == slo)
    return low_is_bad(round(1 - 10 * (1 - target), 6), target)


NOW_ROW = [
    single(
        "Do requests get an answer?", availability(NOW), "percentunit", promised("availability"), empty=NO_TRAFFIC,
        good="99.9% of the requests of the last 5 minutes end without a 5xx. 4xx does not count.",
        otherwise="'Which errors do users get?' says whether capacity is missing (503) or code is wrong (500).",
        then=Board.CAPACITY,
    ),
    single(
        "Did requests get an answer, over the time shown?", availability(ALL_SHOWN), "percentunit",
        promised("availability"), empty=NO_TRAFFIC,
        good="99.9%: the objective, if 30 days are shown.",
        otherwise="The error budget is spent: make no risky changes until it has recovered.",
        then=Board.CLUSTER,
    ),
    single(
        "Does the first token come in time?", in_time("first_token"), "percentunit", promised("first_token"),
        empty=NO_TRAFFIC,
        good="99% of the served requests get it within their identifier's target.",
        otherwise="'Where does a request spend its time?' shows whether it is the queue or the prefill.",
        then=Board.CAPACITY,
    ),
    single(
        "Do the other tokens come in time?", in_time("output_token"), "percentunit", promised("output_token"),
        empty=NO_TRAFFIC,
        good="99% of the served requests get their tokens at the target's pace.",
        otherwise="Batches are too large or steps are slow.",
        then=Board.ENGINE,
    ),
    single(
        "What share of the replies meets both targets?", in_time("all"), "percentunit", low_is_bad(0.8, 0.98),
        empty=NO_TRAFFIC,
        good="98% of the served requests. Goodput is the rate of requests that meet both.",
        otherwise="The lower of the two previous numbers is the cause.",
        then=Board.CAPACITY,
    ),
    single(
        "How long do the slowest 5% wait for a first token?", quantile(0.95, metrics.FIRST_TOKEN_SECONDS, over=NOW),
        "s", high_is_bad(2.5, 5), empty=NO_TRAFFIC,
        good="Below half of first_token_target_s, which is 5 s if nothing is set.",
        otherwise="Replicas are too few, or prompts are long.",
        then=Board.CAPACITY,
    ),
    single(
        "How slow are the tokens of the slowest 5%?", quantile(0.95, metrics.OUTPUT_TOKEN_SECONDS, over=NOW), "s",
        high_is_bad(0.1, 0.2), empty=NO_TRAFFIC,
        good="Below half of output_token_target_s, which is 0.2 s a token if nothing is set.",
        otherwise="Check the engine's step time and batch size.",
        then=Board.ENGINE,
    ),
    single(
        "What share is refused for lack of capacity?",
        share(
            rate_of(metrics.REFUSALS, where='reason="overloaded_error"', over=NOW),
            rate_of(metrics.REQUESTS, where=ANY_BACKEND, over=NOW),
        ),
        "percentunit", high_is_bad(0.001, 0.01), empty=NO_TRAFFIC,
        good="None.",
        otherwise="Add replicas, or raise max_replicas. While a part of the service restarts, its requests get the "
        "same error (503 overloaded_error) and are counted here.",
        then=Board.CAPACITY,
    ),
]  # fmt: skip

ANSWERS = [
    graph(
        "What do users get back?", {"{{status}}": rate_of(metrics.REQUESTS, "status")}, "reqps", stacked=True,
        good="Nearly all 200. 499: the client disconnected. 429: an account is over its limits.",
        otherwise="Search the gateways' log for the status that grows.",
        then=Board.CLUSTER,
    ),
    graph(
        "Which errors do users get?",
        {"{{status}} {{model}} {{backend}}": rate_of(metrics.REQUESTS, "status, model, backend", ERRORS)}, "reqps",
        good="None.",
        otherwise="503: no capacity, a lost replica, or an unavailable ledger. 500: a fault, search the log for its "
        "request id. Only one backend: check its replicas.",
        then=Board.CLUSTER,
    ),
    graph(
        "Why are requests refused?", {"{{reason}}": rate_of(metrics.REFUSALS, "reason")}, "reqps",
        good="A few, caused by the clients' own requests or limits.",
        otherwise="requests, tokens, concurrency: accounts are over their limits. overloaded_error: no capacity. "
        "server_error: a fault. docs/api.md explains every code.",
        then=Board.MONEY,
    ),
    graph(
        "How many requests are served, and how many in time?",
        {
            "all": rate_of(metrics.REQUESTS),
            "served": rate_of(metrics.REQUESTS, where='status="200"'),
            "served within all targets (goodput)": rate_of(metrics.LATENCY_TARGETS, where='target="all", met="yes"'),
        },
        "reqps",
        good="The three lines coincide.",
        otherwise="Served below all: refusals and errors. Goodput below served: users wait.",
        then=Board.CAPACITY,
    ),
    graph(
        "How do replies end?", {"{{reason}}": rate_of(metrics.FINISHES, "reason")}, "reqps", stacked=True,
        good="stop and tool_calls. length: max_tokens or the context was used up.",
        otherwise="Many cancelled: users do not wait, check the first token. Failed: replicas or GPUs are lost.",
        then=Board.ENGINE,
    ),
    graph(
        "How many requests run again after the loss of a replica?",
        {"{{backend}}": rate_of(metrics.RERUNS, "backend")}, "reqps",
        good="None.",
        otherwise="A replica or its node died. If it continues: requests crash the replicas.",
        then=Board.ENGINE,
    ),
    graph(
        "How much demand is turned away?", {"{{reason}}": rate_of(metrics.REJECTED_DEMAND, "reason")}, "short",
        good="None for overloaded_error. Unit: tokens per second, prompt and maximum output.",
        otherwise="overloaded_error is demand that more replicas would serve. The other reasons need higher limits.",
        then=Board.CAPACITY,
    ),
]  # fmt: skip

TIMES = [
    graph(
        "How long do users wait for the first token?", quantiles(metrics.FIRST_TOKEN_SECONDS, "model"), "s",
        good="Flat, and p99 within a few times p50.",
        otherwise="All rise: capacity is missing. p99 alone: long prompts, or one slow replica.",
        then=Board.CAPACITY,
    ),
    graph(
        "How fast do tokens come?", quantiles(metrics.OUTPUT_TOKEN_SECONDS, "model"), "s",
        good="Seconds per token, mean of each reply: flat below 0.1 s.",
        otherwise="The time rises with the batch size. If the batch is small and steps are slow, check the GPUs.",
        then=Board.ENGINE,
    ),
    graph(
        "Do replies stall?", quantiles(metrics.INTER_TOKEN_SECONDS, "model"), "s",
        good="The time between two chunks: p99 within a few times p50.",
        otherwise="Long pauses while the mean is good: prefills of long prompts, preemption, or a blocked event loop.",
        then=Board.ENGINE,
    ),
    graph(
        "Where does a request spend its time?",
        {"p95 {{phase}}": quantile(0.95, metrics.PHASE_SECONDS, "phase")}, "s",
        good="Decode takes most of it. Admit takes milliseconds, queue nearly nothing.",
        otherwise="admit: limiter or ledger. queue: replicas are missing. prefill: long prompts, few cache hits.",
        then=Board.CAPACITY,
    ),
    graph(
        "What share meets its latency targets?",
        {
            "{{target}}": share(
                rate_of(metrics.LATENCY_TARGETS, "target", 'met="yes"'), rate_of(metrics.LATENCY_TARGETS, "target")
            )
        },
        "percentunit",
        good="Each at 99% or more.",
        otherwise="first_token falls: capacity. output_token falls: batch size or GPUs.",
        then=Board.CAPACITY,
    ),
    graph(
        "How long does a whole request take?", quantiles(metrics.REQUEST_SECONDS, "model"), "s",
        good="It follows the length of replies. Refused requests are included.",
        otherwise="It rises but replies are not longer: check which phase is slower.",
        then=Board.ENGINE,
    ),
]  # fmt: skip

REQUESTS = [
    graph(
        "How many requests come?", {"{{model}}": rate_of(metrics.REQUESTS, "model")}, "reqps",
        good="The day's usual shape.",
        otherwise="A sudden fall without errors: clients do not reach the service.",
        then=Board.CLUSTER,
    ),
    graph(
        "Through which doors do requests come?", {"{{door}}": rate_of(metrics.DOOR_REQUESTS, "door")}, "reqps",
        stacked=True,
        good="The formats that your clients use. The filters for identifier and backend do not apply to this panel.",
        otherwise="A door falls to 0: clients of this format do not reach the service, or were changed.",
        then=Board.CLUSTER,
    ),
    graph(
        "How long are prompts?", quantiles(metrics.PROMPT_LENGTH, "model"), "short",
        good="Tokens: stable.",
        otherwise="Longer prompts need more prefill and KV cache: expect later first tokens.",
        then=Board.ENGINE,
    ),
    graph(
        "How long are replies?", quantiles(metrics.REPLY_LENGTH, "model"), "short",
        good="Tokens: stable.",
        otherwise="Longer replies hold their place in the batch for longer: expect a queue.",
        then=Board.ENGINE,
    ),
]  # fmt: skip

BOARD: Final = board(
    Board.USERS,
    "Do users get answers, and in time?",
    ("identifier", "backend"),
    {"Now": NOW_ROW, "Answers": ANSWERS, "Times": TIMES, "Requests": REQUESTS},
)
