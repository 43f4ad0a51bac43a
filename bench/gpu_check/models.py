"""Creates models with random weights in the shapes of known models, and sends prompts to any engine."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from serve_app.contracts.generation import Delta, Finished, SamplingParams
from serve_app.engine.config import EngineSettings
from serve_app.engine.engine import Engine
from serve_app.engine.models.choose_runner import create_runner
from serve_app.engine.port import EnginePort
from serve_app.engine.request import GenerationRequest
from serve_app.engine.text.detokenizer import Vocabulary, bytes_of_unicode

PROMPT: Final = 160  # tokens
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
             "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True},
    "small": {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
              "intermediate_size": 1024, "vocab_size": 4096, "tie_word_embeddings": False},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True},
    "7b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
           "intermediate_size": 11008, "vocab_size": 32000, "tie_word_embeddings": False},
}  # fmt: skip
TEMPLATE: Final = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
_NUMBERS = itertools.count()


@dataclass
class Reply:
    """The tokens of one reply, with their log-probabilities if requested."""

    count: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def make_model(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A Llama with random weights and without an end-of-sequence token."""
    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(max_position_embeddings=8192, **ids, **SHAPES[shape])
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Creates a tokenizer with one token per byte. The other tokens are words that encoding never produces."""
    alphabet = bytes_of_unicode()
    words = {f"Ġw{number}": number for number in range(len(alphabet), vocab_size)}
    core = Tokenizer(models.BPE(vocab=alphabet | words, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE)


def model_folder(shape: str, options: Any) -> Path:
    """Returns the folder of a model with its tokenizer. Writes it once per run."""
    folder: Path = options.work / f"model-{shape}"
    if not (folder / "tokenizer.json").is_file():
        model = make_model(shape, torch.device(options.device), getattr(torch, options.dtype))
        model.save_pretrained(folder)
        make_tokenizer(model.config.vocab_size).save_pretrained(folder)
    return folder


def prompts(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """Random tokens from a fixed seed."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def engine_settings(dtype: str, **more: Any) -> EngineSettings:
    """Settings for 64 sequences. Speculation is off, because random weights favor it: their replies soon repeat."""
    chosen = {"model": "random", "dtype": dtype, "max_running": 64, "max_context": 2048, "prefix_reuse": False}
    own = {"kv_cache_memory": "1GiB", "prefill_chunk": 4096, "prefill_chunk_busy": 2048, "speculation_rows": 0}
    return EngineSettings(**{**chosen, **own, **more})


def kv_cache_memory(options: Any) -> str:
    """Size of the KV cache. On a GPU, it holds 64 sequences of the 7b shape."""
    return "16GiB" if options.on_gpu else "256MiB"


def make_engine(model: Any, settings: EngineSettings) -> Engine:
    """Creates an engine, which takes over the weights of `model`."""
    return engine_over(create_runner(model, settings), settings)


def engine_over(runner: Any, settings: EngineSettings) -> Engine:
    """Creates an engine on a runner. After the engine is closed, the runner can be used again."""
    return Engine(runner, Vocabulary(make_tokenizer(runner.vocab_size)), frozenset(), settings)


async def ask(engine: EnginePort, prompt: Sequence[int], length: int, **sampling: Any) -> Reply:
    """Generates one greedy reply. Raises RuntimeError if it does not have `length` tokens."""
    params = SamplingParams(max_tokens=length, temperature=0.0, **sampling)
    reply = Reply()
    async for event in engine.generate(GenerationRequest(f"r{next(_NUMBERS)}", tuple(prompt), params)):
        if isinstance(event, Delta):
            reply.tokens += [token.token for token in event.tokens]
            reply.logprobs += [token.logprob for token in event.tokens]
        elif isinstance(event, Finished):
            reply.count = event.completion_tokens
            if event.completion_tokens != length:
                raise RuntimeError(f"expected a reply of {length} tokens: {event}")
    return reply


def generate(engine: EnginePort, asked: Sequence[Sequence[int]], length: int) -> float:
    """Sends all prompts at once. Returns the seconds until all have replies of `length` tokens."""

    async def all_replies() -> None:
        await asyncio.gather(*(ask(engine, prompt, length) for prompt in asked))

    began = time.perf_counter()
    asyncio.run(all_replies())
    return time.perf_counter() - began


def replies(engine: EnginePort, asked: Sequence[Sequence[int]], length: int) -> list[Reply]:
    """Sends all prompts at once. Returns the replies with log-probabilities."""

    async def all_replies() -> list[Reply]:
        return await asyncio.gather(*(ask(engine, prompt, length, logprobs=0) for prompt in asked))

    return asyncio.run(all_replies())


@dataclass(frozen=True)
class Score:
    """A reference model's scores of some replies, one value per token."""

    logprobs: torch.Tensor
    gaps: torch.Tensor  # log-probability of the most likely token minus this token's; 0: the greedy choice


@torch.inference_mode()
def score(model: Any, asked: Sequence[Sequence[int]], said: Sequence[Reply]) -> Score:
    """Scores the replies' tokens with transformers, in one forward pass per reply."""
    own, gaps = [], []
    for prompt, reply in zip(asked, said, strict=True):
        if not reply.tokens:  # the engine sent no token: all bytes of the reply belong to an unfinished character
            continue
        ids = torch.tensor([[*prompt, *reply.tokens[:-1]]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float().log_softmax(-1)
        chosen = logits.gather(-1, torch.tensor(reply.tokens, device=model.device)[:, None])[:, 0]
        own.append(chosen.cpu())
        gaps.append((logits.max(-1).values - chosen).cpu())
    return Score(torch.cat(own), torch.cat(gaps))


def errors(said: Sequence[Reply], reference: Score) -> torch.Tensor:
    """Absolute differences of the log-probabilities."""
    ours = torch.tensor([value for reply in said for value in reply.logprobs])
    return (ours - reference.logprobs).abs()
