"""The tokenizer inside a GGUF, written as the files that other programs read: tokenizer.json and its companions.

For the one kind of tokenizer that the embedded model has: byte-level BPE with llama.cpp's pre-tokenizer "smollm"
(digits split one by one, then GPT-2's pattern). The keys are in the GGUF specification (ggml, docs/gguf.md); tests hold
the result against llama.cpp's own /tokenize.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from shardmill.errors import DataError

# llama.cpp's token types (llama_token_type).
_CONTROL, _USER_DEFINED = 3, 4

# Tokens that end an answer in llama.cpp by their text alone (llama-vocab.cpp: end of turn and of text, and the
# fill-in-the-middle ones), beside the GGUF's own EOS. The server stops at each, so each is a stop id of the model.
_ENDS_IN_LLAMA_CPP = frozenset({"<|endoftext|>", "<|im_end|>", "<reponame>"})


def write_tokenizer(gguf: Path, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json, generation_config.json and config.json into `folder`.

    The bytes follow from the GGUF alone. Raises DataError for a tokenizer of another kind.
    """
    values = _read(gguf)
    kind = (values["tokenizer.ggml.model"], values["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise DataError(f"{gguf} has a tokenizer of kind {kind}, and only ('gpt2', 'smollm') can be read from a GGUF.")
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    bos, eos = values["tokenizer.ggml.bos_token_id"], values["tokenizer.ggml.eos_token_id"]
    ends = sorted({eos} | {index for index, token in enumerate(tokens) if token in _ENDS_IN_LLAMA_CPP})
    files = {
        "tokenizer.json": _tokenizer(tokens, values),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[bos],
            "eos_token": tokens[eos],
            "unk_token": tokens[values["tokenizer.ggml.unknown_token_id"]],
            "pad_token": tokens[values["tokenizer.ggml.padding_token_id"]],
            "add_bos_token": values["tokenizer.ggml.add_bos_token"],
            "clean_up_tokenization_spaces": False,
            "chat_template": values["tokenizer.chat_template"],
        },
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": ends},
        "config.json": {
            "model_type": values["general.architecture"],
            "vocab_size": len(tokens),
            "max_position_embeddings": values[f"{values['general.architecture']}.context_length"],
            "bos_token_id": bos,
            "eos_token_id": eos,
        },
    }
    for name, content in files.items():
        (folder / name).write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))


def _read(gguf: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    return {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}


def _tokenizer(tokens: list[str], values: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json as the library tokenizers reads it."""
    types = values["tokenizer.ggml.token_type"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == _CONTROL,
            }
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
                *_without(_missing_bytes(tokens)),
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in values["tokenizer.ggml.merges"]],
        },
    }


def _missing_bytes(tokens: list[str]) -> list[str]:
    """The byte-level characters that are no token: some control characters and bytes that no UTF-8 text has."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(set(ByteLevel.alphabet()).difference(tokens))


def _without(missing: list[str]) -> list[dict[str, Any]]:
    """Leaves `missing` out as llama.cpp does: only after they kept the text around them apart."""
    if not missing:
        return []
    return [{"type": "Split", "pattern": {"Regex": f"[{''.join(missing)}]"}, "behavior": "Removed", "invert": False}]
