"""The audit: what an answer is worth, before it is kept (DESIGN.md, "Whose fault"). Pure functions.

An answer is kept, kept after a cut at its first stop id, degenerate (to be tried again), or a server's fault.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from shardmill.engines import Answer, Fault


class Degenerate(StrEnum):
    """An answer that is whole and of no use. The same again after all attempts is the prompt's own fault."""

    EMPTY = "empty"
    REPETITION = "repetition"


@dataclass(frozen=True, slots=True)
class Kept:
    output_ids: list[int]
    finish: str  # 'stop' | 'length'
    cut: bool  # ids after the first stop id, or over max_new_tokens, were taken away


@dataclass(frozen=True, slots=True)
class Useless:
    kind: Degenerate


@dataclass(frozen=True, slots=True)
class Faulty:
    fault: Fault
    detail: str
    foreign_stop: int | None = None  # the id that the server stopped at, when it is none of the stop ids


Verdict = Kept | Useless | Faulty

# The longest cycle that is looked for, in ids: about a paragraph, or a function of code.
MAX_CYCLE = 512
# Never fewer repeats than this. A table's rule ("|---|---|…") reaches it as well, so length decides besides.
MIN_REPEATS = 8
# An answer cut by length that ends in this many ids of one cycle is endless. A line of "====" is far shorter.
ENDLESS_IDS = 512
# In a short answer: this many at least, and half of the answer at least.
ENDLESS_IDS_SHORT = 32
# An answer that stopped by itself is not endless. It is a broken model's when nearly all of it is one cycle this long.
STOPPED_IDS = 1024
STOPPED_SHARE = 0.9


def audit(
    answer: Answer, prompt_tokens: int, stop_ids: Collection[int], vocab_size: int, max_new_tokens: int
) -> Verdict:
    """What `answer` to a prompt of `prompt_tokens` ids is worth.

    In this order: counts agree with the ids; ids are in [0, vocab_size); nothing stays after the first stop id (SGLang
    before PR 33758 checks the length first, and answers [.., EOS, junk] with finish `length`); the finish reason fits
    the ids; not empty; no endless repetition.
    """
    ids = answer.output_ids
    if answer.completion_tokens != len(ids):
        return Faulty(Fault.COUNTS_DISAGREE, f"{answer.completion_tokens} completion tokens, but {len(ids)} ids")
    if answer.prompt_tokens != prompt_tokens:
        return Faulty(Fault.COUNTS_DISAGREE, f"{prompt_tokens} prompt ids sent, {answer.prompt_tokens} counted")
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        return Faulty(Fault.BAD_IDS, f"an id outside the vocabulary of {vocab_size}")

    stop = first_stop(ids, stop_ids)
    end = len(ids) if stop is None else stop + 1
    if end > max_new_tokens:
        end, stop = max_new_tokens, None
    kept, cut = (ids[:end], True) if end < len(ids) else (ids, False)
    finish = "length" if stop is None else "stop"
    if finish == "length" and answer.finish == "stop" and not cut:
        return _unexplained_stop(answer)
    if not kept or (finish == "stop" and len(kept) == 1):
        return Useless(Degenerate.EMPTY)
    if endless(kept, finish):
        return Useless(Degenerate.REPETITION)
    return Kept(kept, finish, cut)


def first_stop(ids: list[int], stop_ids: Collection[int]) -> int | None:
    """The position of the first stop id in `ids`."""
    found = [ids.index(stop) for stop in stop_ids if stop in ids]
    return min(found) if found else None


def endless(ids: list[int], finish: str) -> bool:
    """Whether an answer is one id or one cycle of ids without end, by the thresholds above."""
    if finish == "stop":
        body = ids[:-1]
        return len(body) >= STOPPED_IDS and cycle_length(body, max(STOPPED_IDS, int(STOPPED_SHARE * len(body)))) > 0
    return cycle_length(ids, min(ENDLESS_IDS, max(ENDLESS_IDS_SHORT, len(ids) // 2))) > 0


def cycle_length(ids: list[int], least: int) -> int:
    """The shortest period p such that the last max(`least`, MIN_REPEATS * p) ids repeat every p ids, or 0.

    ids[i] == ids[i - p] for every i of that tail but its first p. A period must show MIN_REPEATS times, so longer ones
    need a longer tail; periods over MAX_CYCLE, or for which `ids` is too short, are none.
    """
    if not ids or len(ids) < least:
        return 0
    last = ids[-1]
    for period in range(1, min(MAX_CYCLE, len(ids) // MIN_REPEATS) + 1):
        if ids[-1 - period] != last:
            continue
        tail = max(least, MIN_REPEATS * period)
        if tail <= len(ids) and ids[-tail:-period] == ids[-tail + period :]:
            return period
    return 0


def _unexplained_stop(answer: Answer) -> Verdict:
    """The server says that it stopped, and no stop id is there."""
    if not answer.output_ids:
        return Useless(Degenerate.EMPTY)
    last = answer.output_ids[-1]
    foreign = last if answer.matched == last else None
    return Faulty(Fault.BAD_FINISH, f"stopped at {answer.matched!r}, which is no stop id", foreign)
