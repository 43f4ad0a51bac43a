"""What is stored of a response continues a conversation, and lists its items as the SDK's types have them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import ResponseItemList

from serve_app.api.errors import ApiError
from serve_app.api.responses_chat import StoredConversation, read_responses_request, stored_ids, to_chat
from serve_app.api.stored_responses import MAX_JSON, TooLarge, decode_stored, encode_stored, list_items
from tests.api.responses import CUSTOM, FUNCTION, SERVED, parsed

FIRST = "resp_" + "a" * 32
CALL = {"id": f"fc_{'a' * 32}_1", "type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
THOUGHT = {"id": f"rs_{'a' * 32}_0", "type": "reasoning", "summary": [], "content": [], "status": "completed"}
ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"role": "assistant", "content": "Well,"},
    {"type": "custom_tool_call", "call_id": "0", "name": "patch", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "0", "output": "ok"},
]


def stored() -> StoredConversation:
    items = parsed(input=ITEMS).items
    response = {"id": FIRST, "output": [THOUGHT, CALL]}
    return decode_stored(encode_stored(items, response))


def continued(**fields: Any) -> Any:
    body = json.dumps({"model": "svc-chat", **fields}).encode()
    given, request = read_responses_request(body, SERVED, 10**6, 10**5)
    found = {FIRST: stored()} if FIRST in stored_ids(request) else {}
    return to_chat(given, request, SERVED, found)


def test_a_response_that_continues_another_has_its_input_its_output_and_the_new_input() -> None:
    output = {"type": "function_call_output", "call_id": "1", "output": "seen"}
    chat = continued(previous_response_id=FIRST, instructions="New.", input=[output], tools=[FUNCTION])
    assert [message["role"] for message in chat.messages] == [
        "system", "user", "assistant", "tool", "assistant", "tool",
    ]  # fmt: skip
    assert chat.messages[0]["content"] == "New.\n\nBe brief."
    assert chat.messages[4]["tool_calls"][0]["function"]["name"] == "look"
    assert [item.get("id") for item in chat.items[-3:]] == [THOUGHT["id"], CALL["id"], None]


def test_a_reference_stands_for_an_item_of_the_input_or_output_of_a_stored_response() -> None:
    user = stored().items[1]["id"]
    chat = continued(input=[{"type": "item_reference", "id": user}, {"id": CALL["id"]}])
    assert chat.messages[0] == {"role": "user", "content": "Hi"}
    assert chat.messages[1]["tool_calls"][0]["id"] == "1"
    for unknown in (f"fc_{'a' * 32}_9", f"fc_{'b' * 32}_1", "x"):
        with pytest.raises(ApiError, match=r"input\[0\].id must be the id of an item") as caught:
            continued(input=[{"type": "item_reference", "id": unknown}])
        assert caught.value.status == 422


def test_every_stored_item_has_an_id_and_keeps_one_that_it_has() -> None:
    kept = stored()
    ids = [item["id"] for item in kept.items]
    assert len(set(ids)) == len(ITEMS)
    again = decode_stored(encode_stored(kept.items, {"id": "resp_" + "b" * 32, "output": []}))
    assert [item["id"] for item in again.items] == ids
    odd = [{"role": "user", "content": "Hi", "id": given} for given in ({}, 5, None, "")]
    found = decode_stored(encode_stored(odd, {"id": FIRST, "output": []})).items
    assert [item["id"] for item in found] == [f"msg_{'a' * 32}_i{at}" for at in range(4)]


def test_items_with_the_same_id_are_stored_as_several_items() -> None:
    twice = [{"id": "msg_1", "role": "user", "content": text} for text in ("Hi", "Bye")]
    found = decode_stored(encode_stored(parsed(input=twice).items, {"id": FIRST, "output": []})).items
    assert [item["content"] for item in found] == ["Hi", "Bye"]
    assert found[0]["id"] == "msg_1" != found[1]["id"]


def test_a_conversation_that_compresses_well_is_not_stored_if_it_is_long() -> None:
    items = [{"role": "user", "content": "Hi", "unknown": "a" * (MAX_JSON // 3)}]
    assert len(decode_stored(encode_stored(items, {"id": FIRST, "output": []})).items) == 1
    with pytest.raises(TooLarge):
        encode_stored(items * 3, {"id": FIRST, "output": []})


def test_a_response_whose_tools_are_nested_as_deeply_as_a_body_may_be_is_read() -> None:
    deep: Any = []
    for _ in range(196):
        deep = [deep]
    chat = parsed(tools=[CUSTOM | {"format": {"x": deep}}])
    response = {"id": FIRST, "output": [], "tools": chat.tool_names.echoed}
    assert decode_stored(encode_stored(chat.items, response)).response == response


def test_a_short_body_cannot_refer_to_a_long_item_thousands_of_times() -> None:
    long = {"id": f"msg_{'a' * 32}_i0", "role": "assistant", "content": "x" * 2**20}
    given: Any = {"model": "svc-chat", "input": [{"type": "item_reference", "id": long["id"]}] * 20_000}
    body, request = read_responses_request(json.dumps(given).encode(), SERVED, 2**22, 10**5)
    with pytest.raises(ApiError, match="must not refer to items of more than") as caught:
        to_chat(body, request, SERVED, {FIRST: StoredConversation([long], {"id": FIRST, "output": []})})
    assert (caught.value.status, caught.value.param) == (422, "input")


def test_listed_items_fit_the_sdk_in_both_orders_and_page_by_page() -> None:
    items = [*stored().items, *stored().response["output"]]
    everything = list_items(items, order="asc", limit=100)
    assert everything is not None
    ResponseItemList.model_validate(everything)
    ids = [item["id"] for item in everything["data"]]
    assert ids == [item["id"] for item in items]
    seen: list[str] = []
    after = None
    while True:
        page = list_items(items, after=after, limit=2)
        assert page is not None
        seen += [item["id"] for item in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert seen == ids[::-1]
    assert list_items(items, after="x") is None
