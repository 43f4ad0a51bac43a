from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from serve_app.engine import ChatRenderer, ContextLengthExceeded
from serve_app.engine.loading.loader import LoadedModel

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def renderer(loaded: LoadedModel) -> ChatRenderer:
    return ChatRenderer(loaded.tokenizer, max_context=32768)


def test_messages_are_rendered_by_the_models_template(renderer: ChatRenderer, loaded: LoadedModel) -> None:
    ids = renderer.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert loaded.tokenizer.decode(ids) == text


def test_developer_counts_as_system_and_no_content_as_empty(renderer: ChatRenderer) -> None:
    as_system = renderer.render([{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}])
    assert renderer.render([{"role": "developer", "content": None}, {"role": "user", "content": "Hi"}]) == as_system


def test_a_final_message_can_be_continued(renderer: ChatRenderer, loaded: LoadedModel) -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, two,"}]
    assert loaded.tokenizer.decode(renderer.render(messages, continue_final=True)).endswith("assistant\none, two,")


def test_a_prompt_far_too_long_is_refused_at_once(renderer: ChatRenderer) -> None:
    huge = "x" * 50_000_000
    start = time.perf_counter()
    with pytest.raises(ContextLengthExceeded) as refusal:
        renderer.render([{"role": "user", "content": huge}])
    assert time.perf_counter() - start < 2
    assert refusal.value.prompt_tokens > refusal.value.limit == 32768


def test_half_of_a_surrogate_pair_is_no_reason_to_fail(renderer: ChatRenderer, loaded: LoadedModel) -> None:
    assert "a?b" in loaded.tokenizer.decode(renderer.render([{"role": "user", "content": "a\ud800b"}]))


def test_many_threads_can_render_at_once(renderer: ChatRenderer) -> None:
    messages = [{"role": "user", "content": "one two three " * 50}]
    expected = renderer.render(messages)
    with ThreadPoolExecutor(8) as pool:
        assert all(ids == expected for ids in pool.map(lambda _: renderer.render(messages), range(64)))


def test_no_messages_are_refused(renderer: ChatRenderer) -> None:
    with pytest.raises(ValueError, match="no messages"):
        renderer.render([])
