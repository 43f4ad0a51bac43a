"""Tiny random models of every family, made on the spot, and steps to run them with."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from serve_app.engine.config import EngineSettings
from serve_app.engine.scheduling.sequence import Chunk, TokenSequence
from tests.engine.fakes import request

VOCAB = 97

FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama, all biases": (LlamaConfig, {"attention_bias": True}),
    "llama, scaled rope": (
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2, yarn": (
        Qwen2Config,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "mistral, window": (MistralConfig, {"sliding_window": 7}),
    "mistral, no window": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen2, window in the upper layer": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3, heads wider than the model": (Qwen3Config, {"head_dim": 32}),
}


def make_model(family: str = "llama", **options: Any) -> Any:
    """Two layers of 64, float32; every bias and norm random, so that none of them can be forgotten."""
    torch.manual_seed(1)
    kind, extra = FAMILIES[family]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": False,
    }
    model = AutoModelForCausalLM.from_config(kind(**{**sizes, **extra, **options}), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.5)
            else:
                parameter.normal_(std=0.2)
    return model


def settings(**options: Any) -> EngineSettings:
    return EngineSettings(
        **{"model": "tiny", "kv_cache_memory": "1MiB", "block_size": 4, "max_running": 8, "max_context": 256, **options}
    )


class Blocks:
    """Allocates a runner's blocks in a random order."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        torch.manual_seed(2)
        self._free = torch.randperm(num_blocks).tolist()
        self._size = block_size

    def sequence(self, tokens: list[int], length_class: int = 0, room: int = 8) -> TokenSequence:
        """A running sequence with blocks for its tokens and `room` more."""
        sequence = TokenSequence(request(str(len(self._free)), tokens), len(self._free), 0.0, 99)
        sequence.length_class = length_class
        sequence.block_table = [self._free.pop() for _ in range(-(-(len(tokens) + room) // self._size))]
        return sequence


def tokens_of(count: int, seed: int = 3) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Returns the logits of the model's own code after each token, (tokens, vocabulary)."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0].float()


def prefill(sequence: TokenSequence, end: int | None = None) -> Chunk:
    """All tokens of a sequence that have not been computed, up to `end`."""
    return Chunk(sequence, sequence.num_computed, (end or len(sequence.tokens)) - sequence.num_computed)
