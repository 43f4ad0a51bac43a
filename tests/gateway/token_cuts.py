"""Replies, as a client receives them, whose tokens, steps, deltas and packets are cut where a test chooses.

The parts are the service's own, in their order: the engine's stream, the joining of deltas, the replica's reply, the
gateway's chunks. Only threads and sockets are missing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

from serve_app.api.chat_reply import DONE, ChunkEncoder, StreamedReply, Usage
from serve_app.contracts.generation import (
    Bill,
    ChoiceEnded,
    Delta,
    Event,
    Finished,
    GenerateCall,
    ReplyParts,
    SamplingParams,
)
from serve_app.contracts.money import Price
from serve_app.engine.delivery import LoopSink
from serve_app.engine.output_stream import OutputStream
from serve_app.engine.request import GenerationRequest
from serve_app.engine.sampling.sampler import SampledToken
from serve_app.engine.scheduling.sequence import TokenSequence
from serve_app.engine.text.detokenizer import Vocabulary
from serve_app.model.reply import Reply
from serve_app.model.tools.parser import ReplyParser

BILL = Bill("acct", "key", "svc-chat", "local", Price(input=1000, cached_input=500, output=3000))


def streamed(
    vocabulary: Vocabulary,
    tokens: Sequence[int],
    rng: random.Random | None = None,
    *,
    parser: ReplyParser | None = None,
    **sampling: Any,
) -> bytes:
    """The stream of a reply of these tokens and then the end. `rng` says how many tokens a step and steps a delta
    have; without it, each has one. `parser` is what reads the text into parts.
    """
    eos = vocabulary.tokenizer.eos_token_id
    params = SamplingParams(**{"max_tokens": len(tokens) + 1, **sampling})
    sequence = TokenSequence(GenerationRequest("r", (0,), params), 0, 0.0, params.max_tokens)
    sink = LoopSink(cast(Any, None))
    stream = OutputStream(sequence, vocabulary, len(vocabulary.tokenizer), frozenset({eos}), sink)
    reply = Reply(GenerateCall("r", (), params, 0, BILL), [1], [parser])
    streamed = StreamedReply(
        ChunkEncoder(id="chatcmpl-1", created=1, model="m", fingerprint="fp", include_usage=False), 1
    )
    body, events = b"", list[Event]()
    for step in _steps([*tokens, eos], rng):
        logprob = None if params.logprobs is None else -1.0
        accepted = stream.accept([SampledToken(token, logprob) for token in step])
        if accepted.delta is not None:
            events.append(accepted.delta)
        if accepted.reason is not None:
            events.append(stream.finished(accepted.reason))
        elif rng is not None and rng.random() < 0.5:
            continue
        waiting, events = events, []
        for event in waiting:
            for sent in reply.events(0, event):
                if isinstance(sent, Delta | ReplyParts | ChoiceEnded):
                    body += streamed.chunks(sent)
                else:
                    assert isinstance(sent, Finished)
                    usage = Usage(sent.prompt_tokens, sent.completion_tokens)
                    return body + streamed.closing_chunks(sent.reason, usage) + DONE
    raise AssertionError("the reply has not ended")


def _steps(tokens: list[int], rng: random.Random | None) -> Iterator[list[int]]:
    at = 0
    while at < len(tokens):
        size = 1 if rng is None else rng.choice([1, 1, 2, 3, 9])  # more than one where guesses were right
        yield tokens[at : at + size]
        at += size


def up_to_stop(text: str, stops: Sequence[str], unchecked: int = 0) -> str:
    """The text before the first stop string that is complete, of several that end there the longest.

    The first `unchecked` characters are no part of any.
    """
    for end in range(unchecked + 1, len(text) + 1):
        begun = [end - len(stop) for stop in stops if text.endswith(stop, unchecked, end)]
        if begun:
            return text[: min(begun)]
    return text


def partitions(data: bytes, most: int | None = None) -> Iterator[list[bytes]]:
    """All ways to cut bytes into pieces, 2 to the power of their number less one; or about `most` of them.

    Always with no cut and with all cuts.
    """
    last = (1 << (len(data) - 1)) - 1
    step = 1 if most is None else last // most | 1  # odd: else some places are never cut
    for cuts in {*range(0, last, step), last}:
        pieces, start = [], 0
        for at in range(1, len(data)):
            if cuts >> (at - 1) & 1:
                pieces.append(data[start:at])
                start = at
        yield [*pieces, data[start:]]
