"""A model that generates a test's script, token by token, behind a real engine, replica and gateway.

Tokens are any bytes that the test likes, parts of characters included, so that a reply is cut wherever it says.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import NoReturn

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from serve_app.contracts.books import Settlement
from serve_app.contracts.generation import BackendEvent, GenerateCall, Rejected, TokenizeCall, Tokenized
from serve_app.engine.chat import ChatRenderer
from serve_app.engine.config import EngineSettings
from serve_app.engine.engine import Engine
from serve_app.engine.scheduling.sequence import Chunk
from serve_app.engine.text.detokenizer import Vocabulary, bytes_of_unicode
from serve_app.model.replica import Replica
from tests.gateway.world import World, taking

EOS = 256
FAILS = b""  # as a token: the step that would generate it raises
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if not loop.last %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}\n<assistant>{% endif %}"
)

# As Qwen's: it has tools, writes calls in tags, and reasons.
QWEN = "{% if tools %}{{ tools | tojson }} in <tool_call></tool_call>\n{% endif %}" + TEMPLATE + "{# <think></think> #}"


def tokenizer_of(tokens: Sequence[bytes], template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level: token b is byte b, 256 ends a reply, and from 257 on the given ones of several bytes follow."""
    stand_ins = {byte: character for character, byte in bytes_of_unicode().items()}
    vocabulary = {stand_ins[byte]: byte for byte in range(256)}
    vocabulary["<eos>"] = EOS
    for token in tokens:
        if len(token) > 1:
            vocabulary.setdefault("".join(stand_ins[byte] for byte in token), len(vocabulary))
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", chat_template=template)


def ids_of(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[bytes]) -> list[int]:
    """The ids of tokens that `tokenizer_of` was given; -1 for `FAILS`."""
    stand_ins = {byte: character for character, byte in bytes_of_unicode().items()}
    vocabulary = tokenizer.get_vocab()
    return [vocabulary["".join(stand_ins[byte] for byte in token)] if token else -1 for token in tokens]


class ScriptedRunner:
    """A model runner. Choice number c of a request says `scripts[c]`, then ends; `gate` holds steps back while clear.

    With `turns`, each step takes one of them, and `steps` counts those that have begun.

    The token said is certain, the one after it in the vocabulary the runner-up by 20: their log-probabilities are
    whole numbers on every processor.
    """

    class_bounds = (4096,)
    num_blocks = 1024

    def __init__(self, scripts: Sequence[Sequence[int]], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.gate = threading.Event()
        self.gate.set()
        self.turns: threading.Semaphore | None = None
        self.steps = 0
        self._scripts = scripts

    def execute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        self.gate.wait(60)
        self.steps += 1
        if self.turns is not None:
            self.turns.acquire(timeout=60)
        said = []
        for chunk in chunks:
            script = self._scripts[chunk.sequence.arrival % len(self._scripts)]
            for row in range(1 + len(chunk.draft) - chunk.num_logits, 1 + len(chunk.draft)):
                at = max(0, chunk.sequence.num_output + row)  # the rows of a prompt say what the reply begins with
                said.append(script[at] if at < len(script) else EOS)
        if min(said, default=0) < 0:
            raise RuntimeError("the device is gone")
        logits = torch.full((len(said), self.vocab_size), -50.0)
        rows, tokens = torch.arange(len(said)), torch.tensor(said, dtype=torch.long)  # none in the midst of a prompt
        logits[rows, (tokens + 1) % self.vocab_size] = 0.0
        logits[rows, tokens] = 20.0
        return logits

    def clear_blocks(self, blocks: Sequence[int]) -> None: ...


class ScriptedModel:
    """Replaces a gateway's backends. Each token is a delta of its own. The test must close it."""

    def __init__(self, *choices: Sequence[bytes], template: str = TEMPLATE) -> None:
        tokenizer = tokenizer_of([token for tokens in choices for token in tokens], template)
        self.runner = ScriptedRunner([ids_of(tokenizer, tokens) for tokens in choices], len(tokenizer))
        settings = EngineSettings(model="scripted", block_size=4, speculation_rows=0, prefix_reuse=False)
        chat = ChatRenderer(tokenizer, self.runner.class_bounds[-1])
        self._engine = Engine(self.runner, Vocabulary(tokenizer), frozenset({EOS}), settings, chat=chat)
        self._replica = Replica(self._engine, _no_orphans)

    def behind(self, world: World) -> ScriptedModel:
        """Answers the calls of this gateway from now on."""

        async def generate(backend: str, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
            async with contextlib.aclosing(self._replica.generate(call)) as events:
                async for event in events:
                    yield event

        async def tokenize(backend: str, call: TokenizeCall) -> Tokenized | Rejected:
            return await self._replica.tokenize(call)

        world.backends.generate = taking(generate)  # type: ignore[method-assign]
        world.backends.tokenize = tokenize  # type: ignore[method-assign]
        return self

    @property
    def running(self) -> int:
        """Sequences that the engine has not finished."""
        stats = self._engine.stats()
        return stats.running + stats.waiting

    def close(self) -> None:
        self.runner.gate.set()
        if self.runner.turns is not None:
            self.runner.turns.release(1000)
        self._engine.close()


async def _no_orphans(settlements: list[Settlement]) -> NoReturn:
    raise AssertionError(f"settled by the replica: {settlements}")
