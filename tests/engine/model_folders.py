"""Tiny random models written as folders, with a tokenizer of their own: what a loader is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tests.engine.families import make_model

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)

_SPECIAL = {"vocab_size": 258, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE({token: number for number, token in enumerate(["<s>", "</s>", *alphabet])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>", chat_template=TEMPLATE
    )


def model(family: str = "llama", **options: Any) -> Any:
    """A llama-like model that `tokenizer` fits."""
    return make_model(family, **{**_SPECIAL, **options})


def gpt2() -> Any:
    """A model of another architecture."""
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=512, **_SPECIAL)).eval()


def save(folder: Path, made: Any | None = None, *, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Write a model (by default a llama) and its tokenizer as a folder; `options` are `save_pretrained`'s."""
    (made if made is not None else model()).to(dtype).save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    return folder
