"""Figures of a load are wrk's own, processes are known by name, and an unexpected reply is reported."""

from __future__ import annotations

import json

import pytest

from bench.gateway import load
from bench.harness import parts
from bench.harness.stub_request import BODY, MAX_TOKENS, MODEL, PROMPT_TOKENS, REPLY, wrong_in
from serve_app.api.chat_reply import Choice, Usage, complete_reply
from serve_app.api.chat_request import parse_chat_request

FIGURES = {
    "requests": 300, "seconds": 2.0, "p50_ms": 5.1, "p90_ms": 6.0, "p99_ms": 9.5, "max_ms": 20.0, "non_2xx": 0,
    "broken": 0, "timeouts": 0,
}  # fmt: skip


def output(**more: int) -> str:
    return f"Running 2s test @ somewhere\n  300 requests in 2.00s\n\nfigures {json.dumps({**FIGURES, **more})}\n"


def test_figures_are_read_from_what_wrk_prints() -> None:
    seen = load.parse(output())
    assert (seen.requests_per_s, seen.p50_ms, seen.p99_ms, seen.problems) == (150.0, 5.1, 9.5, [])


def test_output_without_figures_is_an_error_with_its_end() -> None:
    with pytest.raises(load.LoadError, match="unable to connect"):
        load.parse("unable to connect to 127.0.0.1:1 Connection refused\n")


def test_each_kind_of_failure_is_a_problem() -> None:
    assert load.parse(output(non_2xx=2)).problems == ["2 replies that were not 2xx"]
    assert load.parse(output(broken=1)).problems == ["1 broken connections"]
    assert len(load.parse(output(timeouts=4)).problems) == 1
    assert load.parse(output(requests=0)).problems == ["there was no reply"]


def test_the_request_is_a_valid_one_whose_estimate_covers_what_the_stub_counts() -> None:
    chat = parse_chat_request(BODY.encode(), {MODEL: (32768, 4096)})
    assert (chat.model, chat.max_tokens, chat.stream) == (MODEL, MAX_TOKENS, False)
    # Otherwise every request would be admitted twice: with the estimate, and with the exact count.
    assert chat.estimated_prompt_tokens >= PROMPT_TOKENS


def test_only_the_expected_reply_passes() -> None:
    def reply(text: str, tokens: int) -> object:
        usage = Usage(PROMPT_TOKENS, tokens)
        body = complete_reply(
            id="x", created=1, model=MODEL, fingerprint="fp", choices=[Choice(text, "stop")], usage=usage
        )
        return json.loads(body)

    assert wrong_in(reply(REPLY, 20)) is None
    assert wrong_in(reply(REPLY, 0)) == "no usage"
    assert "unexpected text" in str(wrong_in(reply("Berlin", 20)))
    assert "no chat completion" in str(wrong_in({"error": {"message": "no"}}))
    assert "no chat completion" in str(wrong_in([]))


@pytest.mark.parametrize(
    ("name", "command", "part"),
    [
        ("ray::ServeRepli", ["ray::ServeReplica:gateway:Gateway"], "Gateway"),
        ("ray::ServeRepli", ["ray::ServeReplica:gateway:limiter-0.handle_request"], "limiter-0"),
        ("haproxy", ["/venv/bin/haproxy", "-f", "haproxy.cfg"], "HAProxy"),
        ("raylet", ["/venv/ray/core/src/ray/raylet/raylet"], parts.REST),
        ("python", ["python", "-m", "serve_app.launch", "--json"], parts.REST),
        ("litellm", ["/venv/bin/python", "/venv/bin/litellm", "--config", "c.yaml"], "litellm"),
        ("x", [], "x"),
    ],
)
def test_a_process_is_known_by_its_name(name: str, command: list[str], part: str) -> None:
    assert parts.part_of(name, command) == part


def test_processor_time_is_what_was_added_between_two_readings() -> None:
    added = parts.spent({"Gateway": 1.0, "gone": 5.0}, {"Gateway": 3.0, "new": 0.5})
    assert added == {"Gateway": 2.0, "new": 0.5}
    assert parts.per_request_ms(added, 1000) == {"Gateway": 2.0, "new": 0.5}
    assert parts.per_request_ms(added, 0) == {}
    assert parts.largest([{"a": 1.0, "b": 2.0}, {"c": 1.5}]) == ["b", "c", "a"]
