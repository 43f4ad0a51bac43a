from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.loading import gguf, loader, placement, prepared
from tests.engine import model_folders


def settings(model: Path | str, **options: object) -> EngineSettings:
    return EngineSettings(model=str(model), **{"kv_cache_memory": "1MiB", **options})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path / "home"))


@pytest.fixture
def fake_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Conversions that give a tiny model, without reading the file."""
    done: list[Path] = []

    def convert(path: Path, out_dir: Path, progress: object) -> None:
        done.append(path)
        model_folders.save(out_dir)

    monkeypatch.setattr(gguf, "convert_gguf", convert)
    (tmp_path / "a.gguf").write_bytes(b"GGUF, version one")
    return done


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(tmp_path: Path, fake_conversion: list[Path]) -> None:
    path = tmp_path / "a.gguf"
    for _ in range(2):
        assert loader.load(settings(path)).model.config.model_type == "llama"
    assert fake_conversion == [path]
    left_over = prepared.cache_dir() / "gguf" / f".{prepared.gguf_slot(path, tmp_path).stem}-of-a-killed-process"
    left_over.mkdir()
    path.write_bytes(b"GGUF, version two of it")
    loader.load(settings(path, dtype="int8"))
    assert fake_conversion == [path, path]
    assert len([each for each in (prepared.cache_dir() / "gguf").iterdir() if each.is_dir()]) == 1
    assert loader.load(settings(path, dtype="int8")).weights is not None
    assert fake_conversion == [path, path]


def test_replicas_that_start_together_convert_once(tmp_path: Path, fake_conversion: list[Path]) -> None:
    together, folders = threading.Barrier(4), list[Path]()

    def start() -> None:
        together.wait()
        folders.append(gguf.converted(tmp_path / "a.gguf", tmp_path / "cache", print))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake_conversion) == 1
    assert len(set(folders)) == 1
    assert len(folders) == 4


def test_a_gguf_file_needs_a_cache_that_can_be_written(tmp_path: Path, fake_conversion: list[Path]) -> None:
    (tmp_path / "in-the-way").touch()
    with pytest.raises(ModelError, match=r"Can't keep the converted a\.gguf in .*: set cache_dir"):
        loader.load(settings(tmp_path / "a.gguf", cache_dir=str(tmp_path / "in-the-way")))


def write_gguf(path: Path, architecture: str, model: Any | None = None) -> None:
    """A file of that architecture with a llama's weights, or with one tensor alone."""
    import numpy
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    if model is None:
        writer.add_tensor("token_embd.weight", numpy.zeros((64, 32), numpy.float32))
    else:
        add_llama(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_llama(writer: Any, model: Any) -> None:
    config, tokenizer = model.config, model_folders.tokenizer()
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    vocabulary = [*sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__), "ab"]  # and one merge
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3, 3, *[1] * (len(vocabulary) - 2)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(model_folders.TEMPLATE)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{part}": f"blk.{layer}.{name}" for part, name in parts.items()}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for key, tensor in model.state_dict().items():
        name = key.removesuffix(".weight")
        if count := heads.get(name.rpartition(".")[2]):  # the format pairs rotary dimensions in another order
            tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(f"{names[name]}.weight", tensor.numpy())


def test_a_gguf_file_gives_the_weights_and_the_tokenizer_that_are_in_it(tmp_path: Path) -> None:
    original = model_folders.model(vocab_size=259)
    write_gguf(tmp_path / "tiny.gguf", "llama", original)
    loaded = loader.load(settings(tmp_path / "tiny.gguf"))
    converted = loaded.model.state_dict()
    assert all(torch.equal(converted[name], tensor) for name, tensor in original.state_dict().items())
    assert loaded.tokenizer("Hello")["input_ids"][-5:] == model_folders.tokenizer()("Hello")["input_ids"]
    assert loaded.tokenizer.chat_template == model_folders.TEMPLATE
    assert loaded.eos_token_ids == {1}


def test_a_problem_of_a_gguf_file_is_reported_in_one_line(tmp_path: Path) -> None:
    good = tmp_path / "good.gguf"
    write_gguf(good, "novel")
    broken = {
        "missing.gguf": (None, "There is no model at"),
        "broken.gguf": (b"GGUF" + bytes(100), "is damaged or not GGUF"),
        "text.gguf": (b"hello", "is damaged or not GGUF"),
        "short.gguf": (good.read_bytes()[:-100], "is damaged or not GGUF"),
        "novel.gguf": (good.read_bytes(), "with the architecture 'novel' .*: use the model's safetensors instead"),
    }
    for name, (content, line) in broken.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ModelError, match=line) as refusal:
            loader.load(settings(path))
        assert "\n" not in str(refusal.value)
    assert [path for path in (prepared.cache_dir() / "gguf").iterdir() if not path.name.endswith(".lock")] == []


def test_a_gguf_file_too_large_for_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "large.gguf", "llama")
    monkeypatch.setattr(placement, "available_memory", lambda: 1000)
    with pytest.raises(ModelError, match=r"Too little memory: .*converting large\.gguf needs .*smaller model"):
        loader.load(settings(tmp_path / "large.gguf"))
