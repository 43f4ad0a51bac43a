"""Text of clients never becomes a control token, and all other text has transformers' own token ids."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from serve_app.engine.chat import ChatRenderer
from tests.engine import model_folders
from tests.engine.test_detokenizer import sentencepiece_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Templates of the families' shapes, with their control tokens: special ones, and those that are only added.
FAMILIES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>"), ()),
    "llama 3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
        "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|reserved_special_token_1|>"),
        (),
    ),
    "llama 2": (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token }}[INST] {{ m['content'].strip() }} [/INST]"
        "{% else %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}",
        (),
        (),
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]"
        "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}",
        ("[INST]", "[/INST]", "[TOOL_CALLS]"),
        (),
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] | trim }}"
        "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
        ("<table>", "\n\n"),
    ),
    "deepseek": (
        "{% for m in messages %}{% if m['role'] == 'user' %}<｜User｜>{{ m['content'] }}"
        "{% else %}<｜Assistant｜>{{ m['content'] }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}",
        ("<｜end▁of▁sentence｜>",),
        ("<｜User｜>", "<｜Assistant｜>", "<|EOT|>"),
    ),
    "phi": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        ("<|end|>",),
        ("<|user|>", "<|assistant|>"),
    ),
}
HARMLESS = [
    "Hi",
    "汉字 e\u0301 👍🏽",
    "a < b, [x] <b>bold</b> <|",
    " two  blanks \n",
    "<table>\n\n</table>",
    "<|im_en|> d|>",
]


def llama_2_tokenizer() -> PreTrainedTokenizerFast:
    """BPE with ▁ before every text and for every blank, and bytes for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127)), "▁a"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {
    "bytes": model_folders.tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "llama 2": llama_2_tokenizer,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def base(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, base: str) -> tuple[ChatRenderer, Any, list[str]]:
    template, special, added = FAMILIES[request.param]
    tokenizer = TOKENIZERS[base]()
    tokenizer.bos_token = tokenizer.bos_token or "<s>"
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in added])
    tokenizer.chat_template = template
    names = [*special, *(name for name in added if name in template or name.startswith("<|")), "<s>", "</s>"]
    return ChatRenderer(tokenizer), tokenizer, names


def control(tokenizer: Any, names: list[str], ids: list[int]) -> list[str]:
    by_id = {tokenizer.convert_tokens_to_ids(name): name for name in names}
    return [by_id[token] for token in ids if token in by_id]


def talk(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user" if number % 2 == 0 else "assistant", "content": t} for number, t in enumerate(texts)]


def without_blanks(text: str) -> str:
    return "".join(text.replace("▁", " ").split())


def test_text_without_control_tokens_has_transformers_own_ids(family: tuple[ChatRenderer, Any, list[str]]) -> None:
    renderer, tokenizer, _ = family
    for text in HARMLESS:
        messages = talk(text, f"So {text}", text)
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert renderer.render(messages) == expected


def test_a_message_has_no_control_tokens_whatever_it_says(family: tuple[ChatRenderer, Any, list[str]]) -> None:
    renderer, tokenizer, names = family
    expected = control(tokenizer, names, renderer.render(talk("x", "y", "z")))
    assert expected
    everything = "\n".join(["Hi", *names, "".join(names), names[0][:-1] + names[0] + names[0][-1]])
    for text in [*names, everything, names[0] * 50, f" {names[-1]} "]:
        for messages in (talk(text, "y", "z"), talk("x", text, "z"), talk("x", "y", text), talk(text, text, text)):
            ids = renderer.render(messages)
            assert control(tokenizer, names, ids) == expected
            written = renderer.text(messages)
            assert without_blanks(tokenizer.decode(ids)) == without_blanks(written)


def test_a_prefix_has_no_control_tokens(family: tuple[ChatRenderer, Any, list[str]]) -> None:
    renderer, tokenizer, names = family
    for name in names:
        ids = renderer.render(talk("x", f"So {name} it"), continue_final=True)
        expected = control(tokenizer, names, renderer.render(talk("x", "So _ it"), continue_final=True))
        assert control(tokenizer, names, ids) == expected


def test_a_control_token_in_one_message_changes_no_token_of_the_others(
    family: tuple[ChatRenderer, Any, list[str]],
) -> None:
    renderer, tokenizer, names = family
    for text in HARMLESS:
        plain = tokenizer.apply_chat_template(talk("x", f"So {text}", text), add_generation_prompt=True)["input_ids"]
        told = renderer.render(talk(f"x{names[0]}", f"So {text}", text))
        length = len(plain) - len(renderer.render(talk("x"), continue_final=True)) - 1
        assert told[-length:] == plain[-length:]


def test_halves_of_surrogate_pairs_are_no_way_around(family: tuple[ChatRenderer, Any, list[str]]) -> None:
    renderer, tokenizer, names = family
    expected = control(tokenizer, names, renderer.render(talk("x")))
    for half in (0xD800, 0xDC00, 0xDC01, 0xDC02, 0xDFFF):
        ids = renderer.render(talk("".join(chr(half) + name[1:] for name in names)))
        assert control(tokenizer, names, ids) == expected


def test_characters_that_normalization_turns_into_a_name_are_text() -> None:
    tokenizer = model_folders.tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.add_tokens([AddedToken("<|end|>", special=False, normalized=True)])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"
    renderer, end = ChatRenderer(tokenizer), tokenizer.convert_tokens_to_ids("<|end|>")
    for text in ("<|end|>", "<|END|>", "＜|end|＞"):
        assert renderer.render(talk(f"a{text}b")).count(end) == 1
    assert renderer.render(talk("＜|ＥＮＤ|")) == tokenizer("<|end|<|end|>", add_special_tokens=False)["input_ids"]


def test_a_tokenizer_in_python_reads_no_control_tokens_either() -> None:
    class Slow:
        chat_template = CHATML
        all_special_tokens = ("<|im_start|>", "<|im_end|>")

        def get_vocab(self) -> dict[str, int]:
            return {"<|im_start|>": 0}

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return "".join(f"<|im_start|>{m['content']}<|im_end|>" for m in messages)

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, Any]:
            return {"input_ids": [text]}

    assert ChatRenderer(Slow()).render(talk("a<|im_end|>b")) == ["<|im_start|>a< |im_end|>b<|im_end|>"]
