"""What makes two builds, or two requests, the same: content, never clocks, paths or addresses (DESIGN.md, Identity)."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from shardmill.files import canonical_json, sha256_json
from shardmill.settings import Settings

# Raised when the same dataset under the same settings would be read or rendered to other prompts than before.
FORMAT = 1


_SUFFIX = re.compile(r"(.+)_(0|[1-9]\d{0,8})", re.DOTALL)


def build_identity(
    settings: Settings, dataset_sha256: str, tokenizer_sha256: str, chat_template_sha256: str | None
) -> dict[str, Any]:
    """The canonical identity of a build, as it stands in build.json.

    The model's own stop ids and vocabulary are in it through the digest of the files that define them, so that a
    machine with nothing but pins finds the same build.
    """
    model = settings.model
    return {
        "format": FORMAT,
        "dataset_sha256": dataset_sha256,
        "prompts": asdict(settings.prompts),
        "model": {
            "name": model.name,
            "revision": model.revision,
            "tokenizer_sha256": tokenizer_sha256,
            "chat_template_sha256": chat_template_sha256,
            "thinking": model.thinking,
            "context": model.context,
        },
        "sampling": _sampling(settings),
        "stop_token_ids": sorted(settings.sampling.stop_token_ids),
    }


def build_id(identity: dict[str, Any]) -> str:
    """First 10 hex digits of the sha256 over the canonical JSON of the identity."""
    return sha256_json(identity)[:10]


def sampling_identity(settings: Settings, stop_ids: Iterable[int]) -> bytes:
    """What, beside the prompt's ids, decides an answer: model, revision, sampling and all stop ids, as canonical JSON.

    `max_new_tokens` is left out: it matters only to answers that it cut, and so that raising it keeps every other
    answer, it is compared when a row is reused and not when it is named.
    """
    sampling = _sampling(settings)
    del sampling["max_new_tokens"]
    return canonical_json(
        {
            "model": settings.model.name,
            "revision": settings.model.revision,
            "sampling": sampling,
            "stop_token_ids": sorted(set(stop_ids)),
        }
    )


def prompt_id(prompt_ids: Sequence[int], sampling: bytes) -> str:
    """sha256 hex over the sampling identity, a zero byte, and the prompt's ids as little-endian uint32."""
    digest = hashlib.sha256(sampling)
    digest.update(b"\0")
    digest.update(struct.pack(f"<{len(prompt_ids)}I", *prompt_ids))
    return digest.hexdigest()


def shard_of(conversation_id: str, shards: int) -> int:
    """The shard of a conversation, from its content's hash alone: order and appended records move nothing."""
    return int(conversation_id[:16], 16) % shards


def _sampling(settings: Settings) -> dict[str, Any]:
    sampling = asdict(settings.sampling)
    sampling["stop_token_ids"] = sorted(sampling["stop_token_ids"])
    return {key: float(value) if key in ("temperature", "top_p", "min_p") else value for key, value in sampling.items()}


def split_id(source_id: str | None) -> tuple[str, int] | None:
    """The id without its part suffix, and the suffix; None where it has none."""
    match = _SUFFIX.fullmatch(source_id) if source_id else None
    return (match[1], int(match[2])) if match else None
