"""Text completions over the running service: raw prompts and their scores cross its processes."""

from __future__ import annotations

import pytest

from tests.service.harness import Service, charge, nano

pytestmark = pytest.mark.service


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_are_scored_and_continued_and_billed_as_one_request(service: Service, stream: bool) -> None:
    account = service.account("scorer")
    before = account.nano
    client = account.client()
    prompts = ["The capital of France is", "The capital of Italy is"]
    asked = {"model": "svc-chat", "prompt": prompts, "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 1}
    texts, scores = ["", ""], [[], []]
    if stream:
        chunks = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        for chunk in chunks:
            usage = chunk.usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                scores[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
    else:
        reply = client.completions.create(**asked)
        usage = reply.usage
        texts = [choice.text for choice in reply.choices]
        scores = [choice.logprobs.token_logprobs for choice in reply.choices]
    assert "Paris" in texts[0]
    assert "Rome" in texts[1]
    assert all(text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True))
    assert [len(found) for found in scores] == [5 + 3, 5 + 3]
    assert all(found[0] is None and max(found[1:]) <= 0 for found in scores)
    assert (usage.prompt_tokens, usage.completion_tokens) == (10, 6)
    view = account.settled(1)
    assert before - nano(view["balance"]) == charge(usage)
