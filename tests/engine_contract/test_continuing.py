"""A reply that another engine has begun: given its tokens, the engine goes on as if it had made them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve_app.contracts.generation import Grammar, GrammarKind
from serve_app.engine.port import Promise

from .replies import Asker

pytestmark = pytest.mark.model

SCHEMA = '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 8}}, "required": ["a"]}'
EMOJI = Grammar(GrammarKind.REGEX, "[😀🎉]{4}")
REPLIES: dict[str, dict[str, Any]] = {
    "text": {"ignore_eos": True, "max_tokens": 12},
    "a stop string": {"ignore_eos": True, "stop": (" the", "s of")},
    "its end": {"prompt": "Name the capital of France.", "max_tokens": 40},
    "its least number of tokens": {"min_tokens": 8, "max_tokens": 12},
    "a seed": {"temperature": 1.3, "seed": 5, "top_p": 0.9, "ignore_eos": True, "max_tokens": 12},
    "penalties": {
        "frequency_penalty": 1.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.3,
        "ignore_eos": True,
        "max_tokens": 12,
    },
    "JSON": {"grammar": Grammar(GrammarKind.JSON_SCHEMA, SCHEMA), "max_tokens": 40},
    "characters of several tokens": {
        "grammar": Grammar(GrammarKind.REGEX, "[\U0001f600\U0001f389]{4}"),
        "max_tokens": 40,
    },
}


@pytest.mark.promise(Promise.CONTINUES)
@pytest.mark.parametrize("name", REPLIES)
async def test_a_reply_goes_on_from_its_deltas(asker: Asker, name: str) -> None:
    options = REPLIES[name]
    whole = await asker.ask(token_ids=True, tenant="one", **options)
    cuts = [at for at, delta in enumerate(whole.deltas, start=1) if not delta.is_last]
    assert len(cuts) > 2
    for at in {*cuts[:3], *cuts[::3], cuts[-1]}:
        begun = whole.deltas[:at]
        said = tuple(token for delta in begun for token in delta.token_ids)
        assert len(said) == begun[-1].completion_tokens
        request = replace(asker.request(token_ids=True, tenant="one", **options), said=said)
        rest = await asker.run(request)
        assert rest.started is not None
        assert rest.started.said == len(said)
        assert rest.started.said_text == "".join(delta.text for delta in begun)
        assert rest.started.said_text + rest.text == whole.text
        rest_ids = [token for delta in rest.deltas for token in delta.token_ids]
        assert [*said, *rest_ids] == [token for delta in whole.deltas for token in delta.token_ids]
        assert rest.end.reason is whole.end.reason
        assert rest.end.completion_tokens == whole.end.completion_tokens
        assert rest.end.prompt_tokens == whole.end.prompt_tokens >= rest.end.cached_tokens


async def test_token_ids_are_there_only_on_request(asker: Asker) -> None:
    assert not any(delta.token_ids or delta.is_last for delta in (await asker.ask()).deltas)


async def test_a_reply_that_has_ended_is_not_continued(asker: Asker) -> None:
    whole = await asker.ask(token_ids=True, max_tokens=5, ignore_eos=True)
    said = tuple(token for delta in whole.deltas for token in delta.token_ids)
    with pytest.raises(ValueError, match="has already ended"):
        await asker.run(replace(asker.request(max_tokens=5, ignore_eos=True), said=said))
