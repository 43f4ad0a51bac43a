"""Holds replies to a grammar: which tokens may come next, computed by llguidance while the model runs.

A `GrammarCompiler` belongs to a model, a `GrammarState` to a request.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from serve_app.engine.errors import UnsupportedGrammar
from serve_app.engine.request import Grammar
from serve_app.engine.sampling import grammar_text

_CACHED = 64  # compiled grammars, a few MB each at worst
_MAX_WORKERS = 4


class GrammarCompiler:
    """Compiles grammars for one tokenizer and hands out states. All methods may be called from any thread.

    `vocab` is the width of the logits; ids that have no token in the tokenizer are never allowed. `eos_token_ids`
    end a reply. The first grammar takes about a second longer, for the tokenizer's tables.
    """

    def __init__(self, tokenizer: Any, vocab: int, eos_token_ids: frozenset[int]) -> None:
        self._hf_tokenizer = tokenizer
        self._vocab = vocab
        self._eos = frozenset(t for t in eos_token_ids if t < vocab)
        # Bounds what a hostile schema can take; errors tell nothing of the parser's inside.
        self._limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
        self._cache: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._tables: LLTokenizer | None = None
        self._tables_lock = threading.Lock()
        workers = min(_MAX_WORKERS, os.cpu_count() or 1)
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="grammar")

    def check(self, grammar: Grammar) -> None:
        """Compile a grammar, unless it is known.

        Raises:
            UnsupportedGrammar: it can't be held to; the message names the cause.
        """
        self._compiled(grammar)

    def start(self, grammar: Grammar) -> GrammarState:
        """A state for a new reply. Raises what `check` does."""
        matcher = self._compiled(grammar)
        with self._lock:
            copy = matcher.deep_copy()
        return GrammarState(copy, self._vocab, self._width, self._eos, self._executor)

    def close(self) -> None:
        """End the worker threads; states must not be used any more."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    @property
    def _width(self) -> int:
        return max(self._vocab, len(self._hf_tokenizer))

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            if (known := self._cache.get(grammar)) is not None:
                self._cache.move_to_end(grammar)
                return known
        try:
            matcher = self._compile(grammar)
        except UnsupportedGrammar as error:
            error.alternative = self._alternative_at_fault(grammar)
            raise
        with self._lock:
            self._cache[grammar] = matcher
            while len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        return matcher

    def _compile(self, grammar: Grammar) -> LLMatcher:
        source = grammar_text.source(grammar, self._special_tokens())
        matcher = LLMatcher(self._tokenizer(), source, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds what compiling does not: that nothing fits, or too much at once
        if matcher.is_error():
            raise UnsupportedGrammar(grammar_text.explain(matcher.get_error()))
        return matcher

    def _alternative_at_fault(self, grammar: Grammar) -> int | None:
        try:
            alternatives = grammar_text.alternatives(grammar)
        except (ValueError, KeyError, TypeError):
            return None
        for number, alternative in enumerate(alternatives):
            try:
                self._compile(alternative)
            except UnsupportedGrammar:
                return number
        return None

    def _special_tokens(self) -> dict[str, int]:
        """The tokens that no bytes of a grammar match, by name.

        They are llguidance's to tell: it counts every added token that is written like a tag, Qwen's <tool_call> too,
        which its tokenizer counts as text.
        """
        tables = self._tokenizer()
        added = getattr(self._hf_tokenizer, "added_tokens_decoder", {})
        return {str(token): i for i, token in added.items() if i < self._width and tables.is_special_token(i)}

    def _tokenizer(self) -> LLTokenizer:
        with self._tables_lock:
            if self._tables is None:
                try:
                    self._tables = from_tokenizer(
                        self._hf_tokenizer, n_vocab=self._width, eos_token=sorted(self._eos) or None
                    )
                except Exception as error:
                    raise UnsupportedGrammar(f"this model's tokenizer can't be held to a grammar: {error}") from error
            return self._tables


class GrammarState:
    """Where one reply is in its grammar. Used by one thread at a time; masks are computed on a worker thread.

    `finished`: the grammar is complete and nothing but an end-of-sequence token may follow. `error`: why the grammar
    engine gave up; from then on nothing at all is allowed.
    """

    def __init__(
        self, matcher: LLMatcher, vocab: int, width: int, eos_token_ids: frozenset[int], executor: ThreadPoolExecutor
    ) -> None:
        self._matcher = matcher
        self._words = -(-vocab // 32)
        self._all_words = -(-width // 32)
        self._eos = eos_token_ids
        self._executor = executor
        self._draft: tuple[int, ...] = ()
        self._pending: Future[np.ndarray] | None = None
        self.finished = False
        self.error: str | None = None
        self._look()

    def prepare(self, draft: Seq[int] = ()) -> None:
        """Start to compute the masks of the next position and of those after each token of the draft."""
        self._settle()
        self._draft = tuple(draft)
        self._pending = self._executor.submit(self._compute, self._draft)

    def masks(self, draft: Seq[int] = ()) -> torch.Tensor:
        """Packed masks (1 + len(draft), ceil(vocabulary / 32)) int32, see `adjust.mask`; waits for them.

        Row j allows what may follow after draft[:j]. A row that no accepted draft leads to allows everything. After
        an error nothing is allowed. What `prepare` was called for costs nothing more here.
        """
        draft = tuple(draft)
        if self._pending is None or self._draft[: len(draft)] != draft:
            self._settle()
            self._draft, done = draft, self._compute(draft)
            self._pending = Future()
            self._pending.set_result(done)
        return torch.from_numpy(self._pending.result()[: 1 + len(draft), : self._words])

    def accept(self, token: int) -> None:
        """Advance by a token of the reply. One that the grammar does not allow is an error."""
        self._settle()
        self._pending = None
        if self.error is not None:
            return
        if token in self._eos and (self.finished or self._matcher.is_accepting()):
            self.finished = True
        elif not self._matcher.consume_token(token):
            self.error = grammar_text.explain(self._matcher.get_error())
        else:
            self._look()

    def forced(self) -> tuple[int, ...]:
        """Tokens that must come next, as the tokenizer spells them: drafts that are nearly always accepted."""
        self._settle()
        if self.finished or self.error is not None:
            return ()
        return tuple(self._matcher.compute_ff_tokens())

    def allowed_part(self, draft: Seq[int]) -> tuple[int, ...]:
        """As many of the draft's first tokens as the grammar takes."""
        self._settle()
        if self.error is not None or not draft:
            return ()
        return tuple(draft[: self._matcher.validate_tokens(list(draft))])

    def _look(self) -> None:
        if self._matcher.is_error():
            self.error = grammar_text.explain(self._matcher.get_error())
        elif self._matcher.is_stopped():
            if self._matcher.is_accepting():
                self.finished = True
            else:
                self.error = f"the grammar has come to an end inside a reply: {self._matcher.stop_reason()}"

    def _settle(self) -> None:
        """Wait for the worker: a matcher is used by one thread at a time."""
        if self._pending is not None:
            self._pending.result()

    def _compute(self, draft: tuple[int, ...]) -> np.ndarray:
        """The masks as `masks` has them; leaves the matcher where it was. Never raises."""
        masks = np.full((1 + len(draft), self._all_words), -1, dtype=np.int32)
        try:
            if self.error is None:
                self._fill(masks, draft)
        except BaseException as error:  # llguidance is Rust, whose panics are no Exceptions
            self.error = f"the grammar engine failed: {error}"
        if self.error is not None:
            masks[:] = 0
        return masks

    def _fill(self, masks: np.ndarray, draft: tuple[int, ...]) -> None:
        consumed = 0
        for row, token in zip(masks, (*draft, None), strict=True):
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._matcher.is_error():
                break
            if token is None or token in self._eos or not row[token // 32] >> (token % 32) & 1:
                break
            if not self._matcher.consume_token(token):
                break
            consumed += 1
        if self._matcher.is_error() or (consumed and not self._matcher.rollback(consumed)):
            self.error = grammar_text.explain(self._matcher.get_error())
