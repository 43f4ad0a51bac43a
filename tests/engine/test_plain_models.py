"""Decoders that are not llama-like run through their own code, in the engine as in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from serve_app.contracts.generation import SamplingParams
from serve_app.engine.engine import Engine
from serve_app.engine.models.choose_runner import create_runner
from serve_app.engine.models.transformers_runner import TransformersRunner
from serve_app.engine.request import GenerationRequest
from serve_app.engine.text.detokenizer import Vocabulary
from tests.engine.fakes import Inbox, byte_tokenizer, submit
from tests.engine.families import VOCAB, Blocks, prefill, reference_logits, settings, tokens_of

KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    "opt": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
            "word_embed_proj_dim": 32},
    "gemma": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1,
              "intermediate_size": 64, "head_dim": 8},
    "phi3": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 64},
    "starcoder2": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                   "intermediate_size": 64},
    "olmo2": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 64},
    "qwen2_moe": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                  "intermediate_size": 64, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
                  "shared_expert_intermediate_size": 16},
    "gemma2": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
               "intermediate_size": 64, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8,
               "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
                    "intermediate_size": 64, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "mixtral": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                  "intermediate_size": 64, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4,
                  "num_experts_per_tok": 2},
    "deepseek_v3": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
                    "intermediate_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2,
                    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 16,
                    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
    "gpt_oss": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "intermediate_size": 32, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": 6},
    "smollm3": {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                "intermediate_size": 64},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_other_decoders_compute_what_transformers_computes(kind: str) -> None:
    torch.manual_seed(0)
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(kind, vocab_size=VOCAB, **tokens, **KINDS[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    rows = {n: reference_logits(model, tokens_of(n, n)) for n in (20, 7)}
    runner = create_runner(model, settings(max_context=64))
    assert isinstance(runner, TransformersRunner)
    blocks = Blocks(runner.num_blocks, 4)
    long, short = (blocks.sequence(tokens_of(n, n)) for n in (20, 7))
    runner.execute([prefill(long, 11)])
    long.num_computed = 11
    got = runner.execute([prefill(short), prefill(long, 19)])
    torch.testing.assert_close(got[0], rows[7][-1], atol=1e-4, rtol=1e-3)
    long.num_computed = 19
    got = runner.execute([prefill(long)])
    torch.testing.assert_close(got[0], rows[20][-1], atol=1e-4, rtol=1e-3)


def test_the_engine_serves_a_model_that_is_not_llama_like() -> None:
    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model("gpt2", vocab_size=257, **ids, **KINDS["gpt2"])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    prompts = [tuple(tokens_of(n, n)) for n in (5, 9, 30)]
    expected = [
        model.generate(torch.tensor([p]), max_new_tokens=20, do_sample=False, attention_mask=torch.ones(1, len(p)))
        for p in prompts
    ]
    chosen = settings(max_context=64, prefill_chunk=8)
    vocabulary = Vocabulary(byte_tokenizer())
    engine = Engine(create_runner(model, chosen), vocabulary, frozenset(), chosen)
    try:
        inboxes = [Inbox() for _ in prompts]
        params = SamplingParams(max_tokens=20, temperature=0.0)
        for number, (prompt, inbox) in enumerate(zip(prompts, inboxes, strict=True)):
            submit(engine, GenerationRequest(str(number), prompt, params), inbox)
        for prompt, inbox, tokens in zip(prompts, inboxes, expected, strict=True):
            assert inbox.wait().completion_tokens == 20
            decoder = vocabulary.decoder()
            text = "".join(decoder.push(t) for t in tokens[0, len(prompt) :].tolist()) + decoder.flush()
            assert inbox.text == text
    finally:
        engine.close()
