"""Which parts of split conversations belong together.

A conversation that was too long became parts `id_0`, `id_5`, …: the suffix is the index of the part's first turn. A
part follows another when it begins at that one's last turn and repeats it, or right behind it.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_SUFFIX = re.compile(r"(.+)_(0|[1-9]\d{0,8})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Part:
    """What the joining of parts needs to know of one."""

    start: int  # index of its first turn, from the id's suffix
    turns: int  # at least 1
    first: int  # hash of its first turn
    last: int
    context: int  # hash of its system field and tools
    assistant_first: bool
    assistant_last: bool


def split_id(source_id: str | None) -> tuple[str, int] | None:
    """The id without its part suffix, and the suffix; None where it has none."""
    match = _SUFFIX.fullmatch(source_id) if source_id else None
    return (match[1], int(match[2])) if match else None


def chains(parts: Sequence[Part], notes: Counter[str]) -> list[list[tuple[int, bool]]]:
    """Groups the different parts of one id: chains of (index into `parts`, whether its first turn is a repeat).

    The order of `parts` matters only to the order of the chains. A part that fits several others, or others that fit
    one, stay apart: a wrong join would be a wrong prompt. So would be one of records that are only numbered: a part
    that repeats nothing joins only a chain that begins at turn 0 and has no other part of the id inside.
    """
    order = sorted(range(len(parts)), key=lambda index: parts[index].start)
    repeating: dict[tuple[int, int, int], list[int]] = {}
    continuing: dict[tuple[int, int, bool], list[int]] = {}
    for index in order:
        part = parts[index]
        repeating.setdefault((part.start, part.first, part.context), []).append(index)
        continuing.setdefault((part.start, part.context, part.assistant_first), []).append(index)
    after: dict[int, list[int]] = {}
    before: Counter[int] = Counter()
    for index in order:
        part = parts[index]
        end = part.start + part.turns
        fits = repeating.get((end - 1, part.last, part.context), []) if part.turns > 1 else []
        if not fits:
            fits = continuing.get((end, part.context, False), [])
            if not part.assistant_last:
                fits = fits + continuing.get((end, part.context, True), [])
        after[index] = fits[:2]  # two are as ambiguous as a thousand
        before.update(fits[:2])
    following: dict[int, int] = {}
    for index, fits in after.items():
        if len(fits) == 1 and before[fits[0]] == 1:
            following[index] = fits[0]
        elif fits:
            notes["ambiguous_parts"] += 1
    return _walk(parts, order, following, notes)


def _walk(
    parts: Sequence[Part], order: list[int], following: dict[int, int], notes: Counter[str]
) -> list[list[tuple[int, bool]]]:
    inside = _numbered_inside(parts, order, following)
    found: list[list[tuple[int, bool]]] = []
    begun: set[int] = set()
    for index in order:
        if index in begun:
            continue
        chain = [(index, False)]
        begun.add(index)
        whole = parts[index].start == 0
        while (nxt := following.get(chain[-1][0])) is not None:
            repeats = _repeats(parts[chain[-1][0]], parts[nxt])
            if not repeats and (not whole or chain[-1][0] in inside):
                break
            chain.append((nxt, repeats))
            begun.add(nxt)
        found.append(chain)
    joined = {index for chain in found for index, _ in chain[1:]}
    for one, other in itertools.pairwise(order):
        if other not in joined:
            end = parts[one].start + parts[one].turns
            notes["gaps" if parts[other].start > end else "mismatched_parts"] += 1
    return found


def _numbered_inside(parts: Sequence[Part], order: list[int], following: dict[int, int]) -> set[int]:
    """Parts inside which, before their end, another begins that doesn't repeat their last turn, and those."""
    inside: set[int] = set()
    furthest: list[tuple[int, int]] = []  # the two parts so far that end last, as (end, index)
    for position, index in enumerate(order):
        end = parts[index].start + parts[index].turns
        # Of the next two, one at least is not what follows it.
        for later in order[position + 1 : position + 3]:
            if parts[later].start < end and following.get(index) != later:
                inside.add(index)
        for past_end, past in furthest:
            if parts[index].start < past_end and following.get(past) != index:
                inside.add(index)
        furthest = sorted([*furthest, (end, index)])[-2:]
    return inside


def _repeats(part: Part, other: Part) -> bool:
    """Whether `other`, which follows `part`, begins with its last turn, and not behind it."""
    return other.start < part.start + part.turns
