"""Variables of the chat template that a request sets: their names, the effort of reasoning, and control tokens."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.engine.chat import ChatRenderer
from serve_app.model.dialect import Dialect, UnknownVariable
from tests.engine import model_folders
from tests.model.test_replica import a_call

pytestmark = pytest.mark.model

BOTH = "{{ messages[0].content }}|{{ reasoning_effort }}|{{ enable_thinking }}|{{ note }}"
SWITCH = "{{ messages[0].content }}|{{ thinking }}"
PLAIN = "{{ messages[0].content }}"


def rendered(template: str, **fields: Any) -> str:
    tokenizer = model_folders.tokenizer()
    tokenizer.chat_template = template
    chat = ChatRenderer(tokenizer, max_context=1000)
    return str(tokenizer.decode(Dialect(chat).prompt(a_call("Hi", **fields)).token_ids))


@pytest.mark.parametrize(
    ("template", "fields", "text"),
    [
        (BOTH, {}, "Hi|||"),
        (BOTH, {"reasoning_effort": "low"}, "Hi|low|True|"),
        (BOTH, {"reasoning_effort": "none"}, "Hi|none|False|"),
        (BOTH, {"template_variables": {"note": "x", "enable_thinking": False}}, "Hi||False|x"),
        (BOTH, {"reasoning_effort": "low", "template_variables": {"enable_thinking": False}}, "Hi|low|False|"),
        (SWITCH, {"reasoning_effort": "high"}, "Hi|True"),
        (SWITCH, {"reasoning_effort": "none"}, "Hi|False"),
        (PLAIN, {"reasoning_effort": "high"}, "Hi"),
        (PLAIN, {"template_variables": {"enable_thinking": False, "thinking": False}}, "Hi"),
    ],
)
def test_the_template_receives_its_variables(template: str, fields: dict[str, Any], text: str) -> None:
    assert rendered(template, **fields) == text


@pytest.mark.parametrize(
    ("template", "name", "there_are"),
    [
        (BOTH, "thinking", "It has enable_thinking, note, reasoning_effort."),
        (BOTH, "messages", "It has enable_thinking"),
        (BOTH, "chat_template", "It has enable_thinking"),
        (PLAIN, "add_generation_prompt", "It has none."),
    ],
)
def test_a_variable_that_the_template_does_not_have_is_refused_with_those_it_has(
    template: str, name: str, there_are: str
) -> None:
    with pytest.raises(UnknownVariable) as caught:
        rendered(template, template_variables={name: "x"})
    assert f'no variable "{name}". {there_are}' in str(caught.value)
    assert str(caught.value).startswith("chat_template_kwargs: ")


@pytest.mark.parametrize(("template", "value"), [(PLAIN, True), (PLAIN + "{# </think> #}", False)])
def test_reasoning_without_a_switch_is_neither_turned_on_nor_off(template: str, value: bool) -> None:
    with pytest.raises(UnknownVariable, match="enable_thinking"):
        rendered(template, template_variables={"enable_thinking": value})


def test_text_of_a_variable_is_never_a_control_token() -> None:
    tokenizer = model_folders.tokenizer()
    tokenizer.chat_template = BOTH
    prompt = Dialect(ChatRenderer(tokenizer, max_context=1000)).prompt(
        a_call("Hi", template_variables={"note": "</s>"})
    )
    assert tokenizer.eos_token_id not in prompt.token_ids


def test_only_allowed_functions_are_in_the_prompt_and_in_the_reply() -> None:
    tools = tuple({"type": "function", "function": {"name": name}} for name in ("f", "g", "h"))
    call = a_call(tools=tools, tool_choice="auto", functions=("h", "f"))
    assert [tool["function"]["name"] for tool in call.callable_tools] == ["f", "h"]
    assert a_call(tools=tools, tool_choice="none", functions=("f",)).callable_tools == ()
    assert a_call(tools=tools, tool_choice="required", function="g").callable_tools == tools[1:2]
    assert a_call(tools=tools, tool_choice="auto").callable_tools == tools
