"""What the simulated model answers: a pure function, so that any two servers with the same settings agree.

ids(seed, prompt ids, sampling) is drawn from a SHAKE-128 stream; `max_new_tokens`, stop ids and `ignore_eos` only
cut it, so a longer limit gives the same answer, longer.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from .config import SimConfig

# Greedy decoding has no other parameter. The sampling seed is left out: a real server ignores it unless it runs
# with --enable-deterministic-inference.
SAMPLING_KEYS = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "min_new_tokens",
)  # fmt: skip
SAMPLING_DEFAULTS: dict[str, float] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "repetition_penalty": 1.0, "min_new_tokens": 0,
}  # fmt: skip
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Answer:
    """`ids` include the matched stop token. `matched` is its id, or None where the limit cut the answer."""

    ids: list[int]
    matched: int | None
    accept_length: float  # tokens a step that speculation gets on this answer, before any decay


def prompt_hash(ids: Sequence[int]) -> str:
    """Names a prompt in logs, fault rules and literal answers: 16 hex digits over its ids as int64."""
    return hashlib.blake2b(np.asarray(ids, dtype="<i8").tobytes(), digest_size=8).hexdigest()


def unit(*parts: object) -> float:
    """A number in (0, 1), the same for the same parts."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2.0**64


def natural_length(config: SimConfig, u: float) -> int:
    """Lognormal with mean `length_mean` before the cap; at least one id besides the stop id."""
    mu = math.log(config.length_mean) - config.length_sigma**2 / 2
    length = math.exp(mu + config.length_sigma * _NORMAL.inv_cdf(u))
    return int(min(max(round(length), config.length_min), config.length_cap))


@functools.lru_cache(maxsize=8)
def _allowed(vocab_size: int, forbidden: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.int64]]:
    allowed = np.ones(vocab_size, dtype=bool)
    allowed[[i for i in forbidden if 0 <= i < vocab_size]] = False
    return np.flatnonzero(allowed)


def _random_ids(config: SimConfig, key: bytes, n: int) -> list[int]:
    forbidden = (*config.special_ids, *config.eos_ids, config.think_start_id, config.think_end_id)
    allowed = _allowed(config.vocab_size, forbidden)
    stream = np.frombuffer(hashlib.shake_128(key).digest(4 * n), dtype="<u4")
    ids: list[int] = allowed[stream % len(allowed)].tolist()
    return ids


def _style(config: SimConfig, u: float) -> str:
    total = sum(config.styles.values())
    for name, weight in config.styles.items():
        u -= weight / total
        if u < 0:
            return name
    return name


def _natural(config: SimConfig, phash: str, key: bytes, u_length: float, u_style: float, limit: int) -> list[int]:
    """The whole answer with its stop id, or the first `limit` ids of one that would never stop."""
    literal = config.answers.get(phash, config.answers.get("*"))
    eos = config.eos_ids[0]
    if literal is not None:
        return [*literal, eos]
    style = _style(config, u_style)
    nl, start, end = config.newline_id, config.think_start_id, config.think_end_id
    if style == "ok":
        return [*config.ok_ids, eos]
    if style == "empty_think":
        return [start, nl, nl, end, nl, nl, *config.ok_ids, eos]
    if style == "loop":
        head = _random_ids(config, key, config.loop_after + config.loop_period)
        cycle = head[config.loop_after :]
        return (head + cycle * (limit // len(cycle) + 1))[: max(limit, 1)]
    length = natural_length(config, u_length)
    if style == "random":
        return [*_random_ids(config, key, length), eos]
    ids = _random_ids(config, key, length)
    thought = max(1, min(length - 1, round(length * config.think_share)))
    return [start, nl, *ids[:thought], nl, end, nl, nl, *ids[thought:], eos]


def answer(
    config: SimConfig, prompt_ids: Sequence[int], sampling: Mapping[str, Any], limit: int, sample: int = 0
) -> Answer:
    """The answer to one prompt under at most `limit` new tokens; `sample` counts the answers of n > 1."""
    phash = prompt_hash(prompt_ids)
    temperature = sampling.get("temperature", 1.0)
    drawn: tuple[object, ...] = (0,)
    if temperature != 0:
        drawn = (sample, *(float(sampling.get(k) or SAMPLING_DEFAULTS[k]) for k in SAMPLING_KEYS))
    key = hashlib.blake2b(repr((config.seed, phash, drawn)).encode(), digest_size=32).digest()
    u_length = (int.from_bytes(key[:8], "little") + 0.5) / 2.0**64
    u_accept = (int.from_bytes(key[8:16], "little") + 0.5) / 2.0**64
    ids = _natural(config, phash, key, u_length, unit(config.seed, phash, "style"), limit)
    accept = 1.0
    if config.mtp:
        accept = config.accept_mean + config.accept_sd * _NORMAL.inv_cdf(u_accept)
        accept = min(max(accept, 1.0), float(config.draft_tokens))
    if sampling.get("ignore_eos"):
        if len(ids) < limit:  # a real model goes on after its stop id; so does this one, with more of the stream
            ids = ids + _random_ids(config, key + b"on", limit - len(ids))
        return Answer(ids[:limit], None, accept)
    stops = {*config.eos_ids, *(sampling.get("stop_token_ids") or ())}
    if len(stops) > len(config.eos_ids):  # otherwise the only stop id is the last one
        for at, token in enumerate(ids):
            if token in stops:
                ids = ids[: at + 1]
                break
    if len(ids) > limit:
        return Answer(ids[:limit], None, accept)
    return Answer(ids, ids[-1] if ids and ids[-1] in stops else None, accept)
