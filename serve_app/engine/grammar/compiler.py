"""Enforces a grammar: while the model runs, llguidance computes which tokens may come next.

A `GrammarCompiler` belongs to a model, a `GrammarState` to a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from serve_app.contracts.generation import Grammar, GrammarKind
from serve_app.engine.aside import Aside
from serve_app.engine.errors import UnsupportedGrammar
from serve_app.engine.grammar import translate
from serve_app.engine.grammar.unenforceable import TooManyTries
from serve_app.engine.text.detokenizer import Vocabulary
from serve_app.engine.text.plain_text import PlainText

_CACHED = 64  # number of compiled grammars, each a few MB at most
# Limits for hostile grammars. Beyond a limit, compiling fails, or a running reply ends.
_LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,  # per compilation, in expressions: about 0.1 us each
    step_lexer_fuel=200_000,  # per token mask, also in expressions
    step_max_items=50_000,
    max_lexer_states=50_000,  # of all replies that share a compiled grammar; about 1 KB per state
    max_grammar_size=500_000,
    verbose_errors=False,  # errors must not show the parser's internals
)
_MAX_WORKERS = 4
# After a compilation, a tenant pauses for this many times its duration, so it compiles at most a quarter of the time.
# Some grammars take seconds.
_REST = 3.0


class Compiled(NamedTuple):
    """A compiled grammar: its source in llguidance's Lark, and a matcher to copy, which must not be advanced itself."""

    lark: str
    matcher: LLMatcher


class _Spellings:
    """A tokenizer in the form that llguidance reads: the bytes of each token, and the tokens that spell a text.

    The text comes from a grammar. The tokens spell it exactly; the tokenizer alone might normalize it, or encode it as
    a special token.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None
    tables: LLTokenizer  # set once they are built

    def __init__(self, tokenizer: Any, width: int, eos: int, special: Mapping[str, int]) -> None:
        vocabulary = Vocabulary(tokenizer)
        if not vocabulary.is_byte_level and "<0x0A>" not in tokenizer.get_vocab():
            raise ValueError("it has no tokens for single bytes")
        self.eos_token_id = eos
        self.special_token_ids = list(special.values())
        self.tokens = [vocabulary.spelling(token) for token in range(width)]
        for name, token in special.items():
            self.tokens[token] = b"\xff" + name.encode()
        self._text = PlainText(tokenizer.backend_tokenizer, special)

    def __call__(self, text: str) -> list[int]:
        tokens = self._text.encode(text)
        if b"".join(self.tokens[token] for token in tokens) == text.encode():
            return tokens
        return self.tables.greedy_tokenize(text)


class GrammarCompiler:
    """Compiles grammars for one tokenizer and creates states. All methods may be called from any thread.

    `vocab` is the width of the logits. Ids without a token in the tokenizer are never allowed. The first grammar takes
    about a second longer, because it builds the tokenizer's tables.
    """

    def __init__(self, tokenizer: Any, vocab: int, eos_token_ids: frozenset[int]) -> None:
        self._hf_tokenizer = tokenizer
        self._vocab = vocab
        self._eos = frozenset(t for t in eos_token_ids if t < vocab)
        self._limits = _LIMITS
        self._cache: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._tables: LLTokenizer | None = None
        self._tables_lock = threading.Lock()
        workers = min(_MAX_WORKERS, os.cpu_count() or 1)
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="grammar")
        self._aside = Aside("compile", rest=_REST)

    def start_grammar(self, grammar: Grammar, compiled: Compiled | None = None, tenant: str = "") -> GrammarState:
        """A state for a new reply. `compiled` is the result of `prepare`; with None, this compiles the grammar now."""
        matcher = (compiled or self.compile(grammar)).matcher
        with self._lock:
            copy = matcher.deep_copy()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None

        def renew(tokens: list[int]) -> Future[LLMatcher]:
            def recompile() -> LLMatcher:
                fresh = self._recompile(grammar, matcher)
                if tokens:
                    fresh.consume_tokens(tokens)
                return fresh

            if loop is None:
                return self._aside.submit(recompile)
            return asyncio.run_coroutine_threadsafe(self._aside.run(tenant, recompile), loop)

        return GrammarState(copy, self._vocab, self._width, self._eos, self._executor, renew)

    def close(self) -> None:
        """End the worker threads; states must not be used afterwards."""
        self._aside.close()
        self._executor.shutdown(wait=True, cancel_futures=True)

    async def prepare(self, grammar: Grammar, tenant: str) -> Compiled:
        """Run `compile` in the background. Pass the result to `start_grammar`."""
        with self._lock:
            known = self._cache.get(grammar)
        return await self._aside.run(tenant, lambda: self.compile(grammar)) if known is None else known

    @property
    def _width(self) -> int:
        return max(self._vocab, len(self._hf_tokenizer))

    def compile(self, grammar: Grammar) -> Compiled:
        """The compiled grammar, from the cache if it was compiled before.

        Raises:
            UnsupportedGrammar: the grammar cannot be enforced; the message names the cause.
        """
        with self._lock:
            if (known := self._cache.get(grammar)) is not None:
                self._cache.move_to_end(grammar)
                return known
        compiled = self._compile_enforceable(grammar)
        with self._lock:
            self._cache[grammar] = compiled
            while len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        return compiled

    def _recompile(self, grammar: Grammar, exhausted: LLMatcher) -> LLMatcher:
        """Compile a separate matcher for one reply.

        Removes `exhausted` from the cache, because the lexer that all its copies share is full.
        """
        with self._lock:
            if (cached := self._cache.get(grammar)) is not None and cached.matcher is exhausted:
                del self._cache[grammar]
        return self._compile_enforceable(grammar).matcher

    def _compile_enforceable(self, grammar: Grammar) -> Compiled:
        """Compile the grammar, if necessary without optional keywords that cannot be enforced."""
        try:
            return self._compile(grammar)
        except UnsupportedGrammar as error:
            try:
                rest = translate.without_unenforceable(grammar, self._complaint)
                return self._compile(rest)
            except (UnsupportedGrammar, TooManyTries, ValueError, KeyError, TypeError, RecursionError):
                raise self._located(grammar, error) from None

    def _compile(self, grammar: Grammar) -> Compiled:
        text = translate.to_lark(grammar, self._special_tokens)
        matcher = LLMatcher(self._tokenizer(), text, log_level=0, limits=self._limits)
        for _ in range(2):  # finds faults that compiling misses: no text matches, or the lexer is too large
            if not matcher.is_error():
                matcher.compute_bitmask()  # a lexer that grew too large reports it only on the second call
        if matcher.is_error():
            raise UnsupportedGrammar(translate.explain(matcher.get_error()))
        return Compiled(text, matcher)

    def _complaint(self, schema: Mapping[str, Any]) -> str:
        try:
            source = translate.schema_source(schema)
        except (UnsupportedGrammar, ValueError) as error:
            return str(error)
        return LLMatcher.validate_grammar(source, self._tokenizer(), limits=self._limits)

    def _located(self, grammar: Grammar, error: UnsupportedGrammar) -> UnsupportedGrammar:
        """The error with the path of the fault in the schema and, for tool calls, the index of the faulty tool."""
        try:
            alternatives = translate.alternatives(grammar)
            for number, alternative in enumerate(alternatives):
                try:
                    self._compile_enforceable(alternative)
                except UnsupportedGrammar as located:
                    return UnsupportedGrammar(str(located), number)
            schema = json.loads(grammar.text) if grammar.kind is GrammarKind.JSON_SCHEMA else None
        except (ValueError, KeyError, TypeError, RecursionError):
            return error
        place = translate.place_of_fault(schema, str(error), self._complaint)
        return UnsupportedGrammar(f"{place}: {error}" if place else str(error))

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        """Names and ids of the tokens that are never used for a grammar's text.

        As in llguidance's own tokenizers, and therefore in vLLM, every added token that is written like a tag counts as
        special. This includes Qwen's <tool_call>, although Qwen's tokenizer does not mark it as special.
        """
        added = getattr(self._hf_tokenizer, "added_tokens_decoder", {})
        return {
            str(token): i
            for i, token in added.items()
            if i < self._width and (token.special or re.fullmatch("<.*>", str(token), re.DOTALL))
        }

    def _tokenizer(self) -> LLTokenizer:
        with self._tables_lock:
            if self._tables is None:
                eos = sorted(self._eos) or [self._hf_tokenizer.eos_token_id or 0]
                try:
                    spellings = _Spellings(self._hf_tokenizer, self._width, eos[0], self._special_tokens)
                    self._tables = spellings.tables = LLTokenizer(spellings, eos_token=eos)  # type: ignore[arg-type]
                except Exception as error:
                    raise UnsupportedGrammar(f"this model's tokenizer doesn't support grammars: {error}") from error
            return self._tables


class GrammarState:
    """The position of one reply in its grammar. Used by one thread at a time; a worker thread computes the masks.

    - `finished`: the grammar is complete; only an end-of-sequence token may follow.
    - `error`: the reason why the grammar engine failed; from then on, no token is allowed.
    - `too_large`: whether the grammar engine failed because the grammar is too large to continue.

    Replies with the same grammar share its lexer, which has a maximum number of states. When the lexer is full, `renew`
    starts to compile a separate matcher for this reply. That matcher then consumes the reply's tokens so far. Until
    it has done so, the state is not `ready`, and its masks allow no token.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab: int,
        width: int,
        eos_token_ids: frozenset[int],
        executor: ThreadPoolExecutor,
        renew: Callable[[list[int]], Future[LLMatcher]],
    ) -> None:
        self._matcher = matcher
        self._words = -(-vocab // 32)
        self._all_words = -(-width // 32)
        self._eos = eos_token_ids
        self._executor = executor
        self._renew = renew
        self._tokens: list[int] = []
        self._forced: tuple[int, ...] = ()
        self._draft: tuple[int, ...] = ()
        self._pending: Future[np.ndarray] | None = None
        self._renewal: Future[LLMatcher] | None = None
        self._renewed_at = -1  # number of tokens at the last renewal; -1: none yet
        self.interrupted = False  # whether a renewal has begun since masks were last computed
        self.finished = False
        self.error: str | None = None
        self.too_large = False
        self._check_matcher()

    def prepare(self, draft: Sequence[int] = ()) -> None:
        """Start to compute the masks of the next position and of the positions after each draft token."""
        self._wait_for_worker()
        self._draft = tuple(draft)
        self._pending = self._executor.submit(self._compute, self._draft)

    def masks(self, draft: Sequence[int] = ()) -> torch.Tensor:
        """Packed masks (1 + len(draft), ceil(vocabulary / 32)) int32; see `logits_processing.mask`.

        Row j allows the tokens that may follow draft[:j]. A row after a forbidden draft token allows all tokens. After
        an error, no token is allowed. If `prepare` has started to compute the masks, waits for them.
        """
        draft = tuple(draft)
        if self._pending is None or self._draft[: len(draft)] != draft:
            self._wait_for_worker()
            self._draft, done = draft, self._compute(draft)
            self._pending = Future()
            self._pending.set_result(done)
        return torch.from_numpy(self._pending.result()[: 1 + len(draft), : self._words])

    @property
    def ready(self) -> bool:
        """Whether `masks` can be used: False only while `renew` compiles. True after an error, too."""
        self._wait_for_worker()
        if self._renewal is None:
            return True
        if not self._renewal.done():
            return False
        renewal, self._renewal, self._pending = self._renewal, None, None
        try:
            self._matcher = renewal.result()
        except Exception:
            self._fail()
            return True
        if rest := self._tokens[self._renewed_at :]:
            self._matcher.consume_tokens(rest)
        self._check_matcher()
        return self._renewal is None

    async def become_ready(self) -> None:
        """Wait until the state is `ready`."""
        while not self.ready:
            if self._renewal is not None:
                await asyncio.wait([asyncio.wrap_future(self._renewal)])

    @property
    def may_end(self) -> bool:
        """Whether the reply may end here."""
        self._wait_for_worker()
        return self.error is None and (self.finished or self._matcher.is_accepting())

    def accept(self, token: int) -> None:
        """Advance by one token of the reply; a forbidden token sets `error`."""
        self._wait_for_worker()
        self._pending = None
        if self.error is not None:
            return
        if token in self._eos and self.may_end:
            self.finished = True
            return
        self._tokens.append(token)
        self._forced = self._forced[1:] if self._forced[:1] == (token,) else ()
        if self._renewal is None:
            self._matcher.consume_token(token)
            self._check_matcher()

    def forced(self) -> tuple[int, ...]:
        """Tokens for text that the grammar forces next: a draft that is nearly always accepted."""
        self._wait_for_worker()
        if self.finished or self.error is not None or self._renewal is not None:
            return ()
        if not self._forced:  # computed only when none are left, because the cost grows with their number
            self._forced = tuple(self._matcher.compute_ff_tokens())
        return self._forced

    def allowed_part(self, draft: Sequence[int]) -> tuple[int, ...]:
        """The longest beginning of the draft that the grammar allows."""
        self._wait_for_worker()
        if self.error is not None or self._renewal is not None or not draft:
            return ()
        return tuple(draft[: self._matcher.validate_tokens(list(draft))])

    def _check_matcher(self) -> None:
        """Update the state after the matcher has consumed tokens."""
        if self._matcher.is_error():
            self._renew_or_fail()
        elif self._matcher.is_stopped():
            if self._matcher.is_accepting():
                self.finished = True
            else:
                self.error = f"the grammar has ended inside a reply: {self._matcher.stop_reason()}"

    def _renew_or_fail(self) -> None:
        """Handle an error of the matcher. Renews it at most once per token, since a second renewal would fail too."""
        if translate.is_too_large(self._matcher.get_error()) and self._renewed_at < len(self._tokens):
            self._renewed_at, self.interrupted = len(self._tokens), True
            with contextlib.suppress(RuntimeError):  # the engine is closing
                self._renewal = self._renew(self._tokens[:])
                return
        self._fail()

    def _fail(self) -> None:
        self.interrupted = False
        message = self._matcher.get_error()
        self.error, self.too_large = translate.explain(message), translate.is_too_large(message)

    def _wait_for_worker(self) -> None:
        """Wait for the worker thread, because only one thread at a time may use the matcher."""
        if self._pending is not None:
            self._pending.result()

    def _compute(self, draft: tuple[int, ...]) -> np.ndarray:
        """The rows of `masks`; does not advance the matcher. Never raises."""
        masks = np.full((1 + len(draft), self._all_words), -1, dtype=np.int32)
        try:
            if self.error is None and self._renewal is None:
                self.interrupted = False
                self._fill(masks, draft)
                if self._matcher.is_error():
                    self._renew_or_fail()
        except BaseException as error:  # a panic of llguidance's Rust code is not an Exception
            self.error = f"the grammar engine failed: {error}"
        if self.error is not None or self._renewal is not None:
            masks[:] = 0
        return masks

    def _fill(self, masks: np.ndarray, draft: tuple[int, ...]) -> None:
        consumed = 0
        for row, token in zip(masks, (*draft, None), strict=True):
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._matcher.is_error():
                return
            if token is None or token in self._eos or not row[token // 32] >> (token % 32) & 1:
                break
            if not self._matcher.consume_token(token):
                return
            consumed += 1
        if consumed:
            self._matcher.rollback(consumed)
