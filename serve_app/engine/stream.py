"""The output of one request: takes its tokens, gives its events."""

from __future__ import annotations

from serve_app.engine.delivery import Sink
from serve_app.engine.detokenizer import Detokenizer, Vocabulary
from serve_app.engine.request import Finished, FinishReason
from serve_app.engine.sampler import SamplerState
from serve_app.engine.sequence import Sequence


class Stream:
    """Decides after each token what text leaves and whether the request ends.

    `eos_token_ids` end it, unless it ignores them; `vocabulary` turns its tokens into text.
    """

    def __init__(
        self, sequence: Sequence, vocabulary: Vocabulary, vocab_size: int, eos_token_ids: frozenset[int], sink: Sink
    ) -> None:
        params = sequence.request.sampling
        self.sequence = sequence
        self.sink = sink
        self.sampling = SamplerState(params, sequence.request.prompt_token_ids, eos_token_ids, vocab_size)
        self._detokenizer = Detokenizer(vocabulary, params.stop, params.min_tokens)
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids

    def accept(self, token: int) -> tuple[str, FinishReason | None]:
        """Add a sampled token; return the text that leaves now and why the request ends, if it does.

        An end-of-sequence token is not added: neither text nor count knows it.
        """
        if token < 0:  # no token, see `sampler.sample`
            return "", FinishReason.ERROR
        if token in self._eos_token_ids:
            return self._detokenizer.finish(), FinishReason.STOP
        self.sequence.tokens.append(token)
        self.sampling.advance(token)
        text = self._detokenizer.push(token)
        if self._detokenizer.stopped:
            return text, FinishReason.STOP
        if self.sequence.num_output < self.sequence.max_output:
            return text, None
        text += self._detokenizer.finish()
        return text, FinishReason.STOP if self._detokenizer.stopped else FinishReason.LENGTH

    def finished(self, reason: FinishReason) -> Finished:
        """The last event."""
        sequence = self.sequence
        return Finished(reason, sequence.num_prompt, sequence.cached_tokens, completion_tokens=sequence.num_output)
