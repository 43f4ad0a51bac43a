"""A tiny random Llama with the bundled model's tokenizer, for tests that do not assert what a reply says.

Its text is noise, and its greedy replies rarely end before `max_tokens`. A token costs about 1% of the bundled
model's time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

NAME = "tiny"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def ensure_tiny_model(bundled: Path) -> Path:
    """Returns a model folder beside the `bundled` one, which it creates on first use; safe in parallel processes."""
    folder = bundled.parent / NAME
    if not folder.is_dir():
        work = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
        _write(work, bundled)
        try:
            work.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(work)
    return folder


def _write(folder: Path, bundled: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters={"rope_theta": 100_000.0, "rope_type": "default"},
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    generator = torch.Generator().manual_seed(1)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2, generator=generator)
    model.save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        if (bundled / name).exists():
            shutil.copyfile(bundled / name, folder / name)
    os.chmod(folder, 0o755)
