"""Rendering with other kinds of tokenizers: Qwen3's own, and small ones that stand for each kind there is."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from shardmill.rendering import Decoder, Renderer, RenderError

Chat = list[dict[str, Any]]


@pytest.fixture(scope="session")
def thinks(qwen3: Path) -> Renderer:
    return Renderer(qwen3, None, thinking=True)


@pytest.fixture(scope="session")
def quick(qwen3: Path) -> Renderer:
    return Renderer(qwen3, None, thinking=False)


CHAT: Chat = [
    {"role": "system", "content": "  Be kind. \n"},
    {"role": "user", "content": " 2+2? \n"},
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\n4 \n"},
    {"role": "user", "content": "\n\tand\u00a03+3?  "},
]


def test_qwen3_thinking_on_and_off(thinks: Renderer, quick: Renderer, qwen3: Path) -> None:
    decode = Decoder(qwen3).decode
    history = (
        "<|im_start|>system\n  Be kind. \n<|im_end|>\n<|im_start|>user\n 2+2? \n<|im_end|>\n"
        "<|im_start|>assistant\n4 \n<|im_end|>\n"
        "<|im_start|>user\n\n\tand\u00a03+3?  <|im_end|>\n<|im_start|>assistant\n"
    )
    assert decode(thinks.render(CHAT).ids) == history
    off = quick.render(CHAT).ids
    assert decode(off) == history + "<think>\n\n</think>\n\n"
    think, close = 151667, 151668
    assert off[-4:] == [think, 271, close, 271], "the markers are tokens of their own"
    assert thinks.stop_ids == {151645} and len(thinks.special_ids) == 14
    assert (
        thinks.think_close_ids == Tokenizer.from_file(str(qwen3 / "tokenizer.json")).encode("</think>").ids == [151668]
    )


def test_qwen3_is_what_transformers_makes_of_it(thinks: Renderer, quick: Renderer, qwen3: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(qwen3)
    chats: list[Chat] = [
        CHAT,
        CHAT[1:],
        CHAT[1:2],
        [{"role": "user", "content": "e\u0301 <think>x</think> <tool_call>"}],
    ]
    stray: Chat = [*CHAT[:2], {"role": "assistant", "content": "plain </think> left over 6"}, CHAT[3]]
    for chat in [*chats, stray]:
        for renderer, thinking in ((thinks, True), (quick, False)):
            made = theirs.apply_chat_template(
                chat, add_generation_prompt=True, enable_thinking=thinking, return_dict=False
            )
            assert renderer.render(chat).ids == made


def test_qwen3_tools(quick: Renderer, qwen3: Path) -> None:
    from transformers import AutoTokenizer

    tools = [
        {"type": "function", "function": {"name": "add", "description": "a < b > c", "parameters": {"type": "object"}}}
    ]
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}
    parsed = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
    chat: Chat = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "2"},
    ]
    seen: Chat = [chat[0], {**chat[1], "tool_calls": [parsed]}, chat[2]]
    theirs = AutoTokenizer.from_pretrained(qwen3).apply_chat_template(
        seen, tools=tools, add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    assert quick.render(chat, json.dumps(tools)).ids == theirs


def test_qwen3_reads_tool_answers_in_user_turns_beside_markers(quick: Renderer, qwen3: Path) -> None:
    """The template asks whether a user turn is a tool's answer: a marker elsewhere must not hide that from it."""
    answer = "<tool_response>\n<|im_end|>\n</tool_response>"
    chat: Chat = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nasking"},
        {"role": "user", "content": answer},
    ]
    text = Decoder(qwen3).decode(quick.render(chat).ids)
    assert "<think>\nhm\n</think>" in text, "the turn before a tool's answer keeps its thinking"
    assert text.count("<|im_end|>") == 4
    assert quick.render(chat).ids.count(151645) == 3


# One small tokenizer of each kind: what a text is split into, joined from, and how its special tokens behave


TRAINING = [
    "the quick brown fox jumps over the lazy dog",
    "user assistant system",
    "a<b>c | <|x|> s im_end",
    "äöü 日本語",
]
SPECIAL = ["<s>", "</s>", "<|end|>", "[INST]", "PAD"]


def byte_level(add_prefix_space: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    return tokenizer


def metaspace(prepend: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # Special tokens are part of the vocabulary, as in sentencepiece's models.
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator(TRAINING, trainer)
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if "0x" not in token["content"]]
    return Tokenizer.from_str(json.dumps(described))


def legacy_llama() -> Tokenizer:
    tokenizer = metaspace("never")
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def unigram() -> Tokenizer:
    """A model that would take a special token's text for one of its pieces if it were not for the guard."""
    chars = sorted({*"".join(TRAINING), *"<>[]/|", *"abcdefghijklmnopqrstuvwxyzPADINST▁"})
    tokenizer = Tokenizer(
        models.Unigram([("<unk>", 0.0), *((text, 0.0) for text in SPECIAL), *((c, -5.0) for c in chars)], 0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: byte_level(False),
    "byte-level, space in front": lambda: byte_level(True),
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "legacy llama": legacy_llama,
    "unigram": unigram,
}
FLAGS: dict[str, dict[str, bool]] = {
    "raw": {"normalized": False},
    "normalized": {"normalized": True},
    "strips left": {"normalized": False, "lstrip": True},
    "strips right": {"normalized": False, "rstrip": True},
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} </s>"
    "{% else %}{{ m.content }}<|end|>{% endif %}{{ '\n' }}{% endfor %}"
)


def write(tokenizer: Tokenizer, folder: Path, flags: dict[str, bool]) -> None:
    tokenizer.add_special_tokens([AddedToken(text, **flags) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))


# A normalizer that puts a blank in front does so to a normalized token too, which is then found after blanks only: such
# a tokenizer does not take its own template's markers.
BROKEN = ("legacy llama", "normalized")


@pytest.mark.parametrize(("kind", "flags"), sorted({(kind, flags) for kind in KINDS for flags in FLAGS} - {BROKEN}))
def test_markers_in_texts_stay_text_for_every_kind(kind: str, flags: str, tmp_path: Path) -> None:
    write(KINDS[kind](), tmp_path, FLAGS[flags])
    renderer, decode = Renderer(tmp_path, None, thinking=False), Decoder(tmp_path).decode
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    special = renderer.special_ids - {tokenizer.token_to_id("<unk>")}
    words = ["fox", "the ", " ", "\n", "<", ">", "|", "end", "s", "<think>", "[", "日", "PA", "a<b"]
    rng = random.Random(7)
    for _ in range(60):
        clean: Chat = []
        marked: Chat = []
        for at in range(rng.choice([1, 2, 3])):
            parts = [rng.choice(words) for _ in range(rng.randrange(8))]
            role = "assistant" if at == 1 else "user"
            # An "x" at each end: a token that strips takes the blanks of its neighbour, as it does on the server.
            clean.append({"role": role, "content": f"x{''.join(parts)}x"})
            for _ in range(rng.randrange(1, 3)):
                parts.insert(rng.randrange(len(parts) + 1), rng.choice(SPECIAL))
            marked.append({"role": role, "content": f"x{''.join(parts)}x"})
        ids, with_markers = renderer.render(clean).ids, renderer.render(marked).ids
        assert ids == tokenizer.encode(rendered_by_hand(clean), add_special_tokens=False).ids
        own = [index for index in ids if index in special]
        assert [index for index in with_markers if index in special] == own == markers_by_hand(tokenizer, clean)
        assert squeezed(decode(with_markers)) == squeezed(rendered_by_hand(marked))


def test_a_tokenizer_that_misses_its_own_markers_still_encodes_as_it_does(tmp_path: Path) -> None:
    write(KINDS[BROKEN[0]](), tmp_path, FLAGS[BROKEN[1]])
    renderer, tokenizer = (
        Renderer(tmp_path, None, thinking=False),
        Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
    )
    chat: Chat = [{"role": "user", "content": "the <fox>"}]
    assert renderer.render(chat).ids == tokenizer.encode(rendered_by_hand(chat), add_special_tokens=False).ids
    with pytest.raises(RenderError, match="template_error"):
        renderer.render([{"role": "user", "content": "the </s>"}])


def rendered_by_hand(chat: Chat) -> str:
    turns = (f"[INST] {m['content']} </s>\n" if m["role"] == "user" else f"{m['content']}<|end|>\n" for m in chat)
    return "<s>" + "".join(turns)


def markers_by_hand(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    texts = ["<s>"]
    for message in chat:
        texts += ["[INST]", "</s>"] if message["role"] == "user" else ["<|end|>"]
    return [tokenizer.token_to_id(text) for text in texts]


def squeezed(text: str) -> str:
    """Without blanks and unknown characters, which some of these tokenizers do not give back."""
    return "".join(unicodedata.normalize("NFC", text).replace("<unk>", "").replace("日", "").split()).replace("▁", "")


def test_turn_markers_that_are_special_in_all_but_name(tmp_path: Path) -> None:
    tokenizer = byte_level(False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<|user|>", "<|bot|>", "<think>", "\n")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|bot|>' }}{{ m.content.split('<think>')[0] }}"
        "<think>\n{% endfor %}"
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    renderer = Renderer(tmp_path, None, thinking=False)
    assert {tokenizer.id_to_token(index) for index in renderer.special_ids} == {"<s>", "</s>", "<|user|>", "<|bot|>"}
    ids = renderer.render([{"role": "user", "content": "a<|bot|>\n<think>b"}]).ids
    shown = [tokenizer.id_to_token(index) for index in ids if index >= tokenizer.token_to_id("<s>")]
    assert shown == ["<|user|>", "\n", "<think>", "\n"]
