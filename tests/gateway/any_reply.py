"""A scripted model that answers every call with all that the call asks for: choices, tools, reasoning, logprobs."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from serve_app.contracts.generation import (
    BackendEvent,
    CallArguments,
    CallEnded,
    CallStarted,
    ChoiceEnded,
    Delta,
    Ending,
    Finished,
    FinishReason,
    GenerateCall,
    Part,
    PromptEcho,
    Reasoning,
    ReplyParts,
    Started,
    Text,
    TokenLogprob,
)

PROMPT = 10  # tokens of every prompt


async def any_reply(backend: str, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
    """BackendPort.generate without a model. Plain text comes as from a model without tools or reasoning."""
    reason = FinishReason.LENGTH if call.sampling.max_tokens < 4 else FinishReason.STOP
    calls = bool(call.callable_tools)
    yield Started(PROMPT, 4)
    if call.raw is not None and call.raw.echo:
        for prompt in range(call.num_prompts):
            echo = PromptEcho("Grüße, ", (1, 2))
            yield ReplyParts((echo,), 0, _told(call, "Grüße, "), prompt * call.n // call.num_prompts)
    if call.sampling.max_tokens == 0:
        yield Finished(reason, PROMPT, 4, 0)
        return
    if call.n == 1 and not calls:
        yield Delta("Grüße, ", 1, _told(call, "Grüße, "))
        yield Delta("世界\u2028", 2, _told(call, "世界\u2028"))
        yield Finished(reason, PROMPT, 4, 2)
        return
    produced = 0
    for choice in range(call.n):
        for part in _parts(call, calls):
            produced += 1
            text = getattr(part, "text", "")
            yield ReplyParts((part,), produced, _told(call, text) if text else (), choice)
        if call.n > 1:
            yield ChoiceEnded(choice, reason)
    yield Finished(reason, PROMPT, 4, produced, marked_tokens=call.n)


def _parts(call: GenerateCall, calls: bool) -> list[Part]:
    parts: list[Part] = [Reasoning("Hm."), Text("Well: ")]
    if calls:
        name = call.callable_tools[0]["function"]["name"]
        parts = [Reasoning("Hm."), CallStarted(0, "call_0", name), CallArguments(0, '{"a"'), CallArguments(0, ":1}")]
        parts.append(CallEnded(0, Ending.COMPLETE))
    return parts


def _told(call: GenerateCall, text: str) -> tuple[TokenLogprob, ...]:
    if call.sampling.logprobs is None:
        return ()
    other = TokenLogprob(2, "�", b"\xe4", float("-inf"))
    return (TokenLogprob(1, text, text.encode(), -0.25, (other,) * min(1, call.sampling.logprobs)),)
