"""What is asked of the model, and what has happened to it so far."""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter
from dataclasses import dataclass, field

from shardmill.engines import SamplingParams
from shardmill.generate.audit import Degenerate

RESERVES = (16, 64, 256)  # new tokens given up, in turn, when the server keeps room for speculation


@dataclass(frozen=True, slots=True)
class Model:
    """What answers are audited against, and how they are drawn."""

    stop_ids: frozenset[int]
    vocab_size: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    prompt_id: str
    ids: list[int]
    max_new_tokens: int


@dataclass(slots=True)
class History:
    """What has happened to one prompt. The first three are kept in the journal, so that a restart forgets nothing."""

    attempts: int = 0  # audited answers
    deaths: int = 0
    useless: Counter[Degenerate] = field(default_factory=Counter)
    faults: int = 0  # in a row
    foreign_stops: int = 0
    refusals: int = 0
    reserve: int = 0  # how often the server had no room for all of max_new_tokens
    avoid: frozenset[str] = frozenset()


def request_seed(seed: int, prompt_id: str, attempt: int) -> int:
    """0 <= seed < 2^31, from sha256 over the run's seed, the prompt and how many answers it has had."""
    digest = hashlib.sha256(f"{seed}\0{prompt_id}\0{attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def request_id(prompt: Prompt) -> str:
    """A new one with each call: it names one request of the prompt."""
    return f"{prompt.prompt_id[:16]}-{uuid.uuid4().hex[:16]}"
