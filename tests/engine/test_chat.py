"""Messages and tools rendered by a model's own template."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from serve_app.engine.chat import ChatRenderer
from serve_app.engine.errors import ContextLengthExceeded
from tests.engine import model_folders

pytestmark = pytest.mark.model

WITH_TOOLS = (
    "{% for t in tools or [] %}<tool>{{ t | tojson }}</tool>{% endfor %}"
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments }}</call>{% endfor %}</s>"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def renderer_with(template: Any) -> ChatRenderer:
    tokenizer = model_folders.tokenizer()
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer, max_context=1000)


@pytest.fixture(scope="module")
def renderer(bundled_tokenizer: Any) -> ChatRenderer:
    return ChatRenderer(bundled_tokenizer, max_context=32768)


def test_messages_are_rendered_by_the_models_template(renderer: ChatRenderer, bundled_tokenizer: Any) -> None:
    ids = renderer.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert bundled_tokenizer.decode(ids) == text


def test_developer_counts_as_system_and_no_content_as_empty(renderer: ChatRenderer) -> None:
    as_system = renderer.render([{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}])
    assert renderer.render([{"role": "developer", "content": None}, {"role": "user", "content": "Hi"}]) == as_system


def test_a_final_message_can_be_continued(renderer: ChatRenderer, bundled_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, two,"}]
    assert bundled_tokenizer.decode(renderer.render(messages, continue_final=True)).endswith("assistant\none, two,")


def test_a_prompt_far_too_long_is_refused_before_it_is_rendered_and_tokenized(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("_core", "_tokenizer"):
        monkeypatch.setattr(renderer, part, None)
    with pytest.raises(ContextLengthExceeded) as refusal:
        renderer.render([{"role": "user", "content": "x" * 6_000_000}])
    assert (refusal.value.prompt_tokens, refusal.value.limit) == (0, 32768)  # nothing was counted


def test_half_of_a_surrogate_pair_is_no_reason_to_fail(renderer: ChatRenderer, bundled_tokenizer: Any) -> None:
    assert "a?b" in bundled_tokenizer.decode(renderer.render([{"role": "user", "content": "a\ud800b"}]))


def test_many_threads_can_render_at_once(renderer: ChatRenderer) -> None:
    messages = [{"role": "user", "content": "one two three " * 50}]
    expected = renderer.render(messages)
    with ThreadPoolExecutor(8) as pool:
        assert all(ids == expected for ids in pool.map(lambda _: renderer.render(messages), range(64)))


def test_no_messages_are_refused(renderer: ChatRenderer) -> None:
    with pytest.raises(ValueError, match="no messages"):
        renderer.render([])


def test_tools_and_earlier_calls_reach_the_template() -> None:
    renderer = renderer_with(WITH_TOOLS)
    call: dict[str, Any] = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "R\ud800"}'},
    }
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    text = renderer.text(messages, tools=[TOOL])
    (tool,) = json.loads("[" + text.split("<tool>")[1].split("</tool>")[0] + "]")
    assert tool == TOOL
    assert text.endswith('<s>assistant: <call>weather {"city": "R?"}</call></s><s>assistant: ')
    assert renderer.tokenize(text) == renderer.render(messages, tools=[TOOL])
    assert renderer.text(messages) == renderer.text(messages, tools=[]) != text
    assert renderer.text(messages[:1], continue_final=True).endswith("<s>user: Hi")


def test_tools_far_too_long_are_refused_like_messages() -> None:
    huge = {"type": "function", "function": {"name": "weather", "description": "x" * 1_000_000}}
    with pytest.raises(ContextLengthExceeded):
        renderer_with(WITH_TOOLS).text([{"role": "user", "content": "Hi"}], tools=[huge])


def test_what_is_nested_too_deeply_is_a_plain_refusal() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(ValueError, match="nested too deeply"):
        renderer_with(WITH_TOOLS).text([{"role": "user", "content": "Hi"}], tools=[deep])


def test_of_several_templates_the_one_for_tools_is_used() -> None:
    assert renderer_with(WITH_TOOLS).template == WITH_TOOLS
    assert renderer_with({"default": "plain", "tool_use": WITH_TOOLS}).template == WITH_TOOLS
    assert renderer_with({"default": "plain", "rag": "other"}).template == "plain"
    assert renderer_with(None).template is None


THINKING = (
    "{% set enable_thinking = enable_thinking if enable_thinking is defined else true %}{{ bos_token }}"
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    "{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}{% for d in documents or [] %}{{ d }}{% endfor %}"
    "{% if not enable_thinking %}<no>{% endif %}{{ strftime_now('') }}{% set ns = namespace(a=1) %}"
)


def test_a_request_may_set_the_variables_that_the_template_reads_and_nothing_else_sets() -> None:
    assert renderer_with(THINKING).variables == {"enable_thinking", "reasoning_effort"}
    assert renderer_with({"default": "{{ a }}", "tool_use": "{{ b }}{{ tools }}"}).variables == {"a", "b"}
    assert renderer_with("{{ chat_template }}{{ tokenize }}{{ messages }}").variables == frozenset()
    assert renderer_with("{% if %}").variables == frozenset()
    assert renderer_with(None).variables == frozenset()


def test_variables_reach_the_template() -> None:
    renderer = renderer_with("{% for m in messages %}{{ m.content }}{% endfor %}{{ effort }}{{ off is false }}")
    assert (
        renderer.text([{"role": "user", "content": "Hi"}], variables={"effort": "low\ud800", "off": False})
        == "Hilow?True"
    )
    with pytest.raises(ContextLengthExceeded):
        renderer.text([{"role": "user", "content": "Hi"}], variables={"effort": "x" * 1_000_000})


def test_special_tokens_are_listed_by_name(renderer: ChatRenderer) -> None:
    assert {"<|im_start|>", "<|im_end|>"} <= renderer.special_names
    assert renderer_with(None).special_names == {"<s>", "</s>"}
