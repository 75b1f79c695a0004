"""Which parts of split conversations belong together.

A conversation that was too long became parts `id_0`, `id_5`, …: the suffix is the index of the part's first turn. A
part follows another when it begins at that one's last turn and repeats it, or right behind it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """What the joining of parts needs to know of one."""

    start: int  # index of its first turn, from the id's suffix
    turns: int  # at least 1
    first: int  # hash of its first turn
    last: int
    context: int  # hash of its system field and tools
    assistant: bool  # whether one of its turns is an assistant's
    assistant_first: bool
    assistant_last: bool


def chains(parts: Sequence[Part], notes: Counter[str]) -> list[list[tuple[int, bool]]]:
    """Groups the different parts of one id: chains of (index into `parts`, whether its first turn is a repeat).

    The order of `parts` matters only to the order of the chains. A part that fits several others, or others that fit
    one, stay apart: a wrong join would be a wrong prompt. So it would be with records that are only numbered: a part
    that repeats nothing is joined only where the chain begins at turn 0 and has an answer in it or gets it by this,
    and where no part of this id begins inside another one.
    """
    order = sorted(range(len(parts)), key=lambda index: (parts[index].start, parts[index].turns))
    members: dict[_Key, list[int]] = {}
    for index in order:
        for key in _keys(parts[index]):
            members.setdefault(key, []).append(index)
    wanted = {index: [key for key in _wanted(parts[index], members) if key in members] for index in order}
    asked = Counter(itertools.chain.from_iterable(wanted.values()))
    following: dict[int, int] = {}
    for index, keys in wanted.items():
        fits = sum(len(members[key]) for key in keys)
        if fits == 1:
            other = members[keys[0]][0]
            if sum(asked[key] for key in _keys(parts[other])) == 1:
                following[index] = other
                continue
        if fits:
            notes["ambiguous_parts"] += 1
    return _walk(parts, order, following, notes)


# What one part offers and another looks for: by the repeated turn, (start, its hash, context), or by the place alone,
# (start, whether an assistant speaks first, context).
_Key = tuple[str, int, int, int]


def _keys(part: Part) -> tuple[_Key, _Key]:
    return (
        ("repeats", part.start, part.first, part.context),
        ("continues", part.start, int(part.assistant_first), part.context),
    )


def _wanted(part: Part, members: dict[_Key, list[int]]) -> list[_Key]:
    """A repeated turn says more than a fitting index, and goes before it. Two assistant turns in a row are no fit."""
    end = part.start + part.turns
    repeating = ("repeats", end - 1, part.last, part.context)
    if part.turns > 1 and repeating in members:
        return [repeating]
    speakers = (0,) if part.assistant_last else (0, 1)
    return [("continues", end, speaker, part.context) for speaker in speakers]


def _walk(
    parts: Sequence[Part], order: list[int], following: dict[int, int], notes: Counter[str]
) -> list[list[tuple[int, bool]]]:
    numbered = _only_numbered(parts, order, following)
    found: list[list[tuple[int, bool]]] = []
    begun: set[int] = set()
    for index in order:
        if index in begun:
            continue
        chain = [(index, False)]
        begun.add(index)
        from_start = parts[index].start == 0 and not numbered
        answered = False
        while (nxt := following.get(chain[-1][0])) is not None:
            last = parts[chain[-1][0]]
            answered = answered or last.assistant
            repeats = _repeats(last, parts[nxt])
            if not (repeats or (from_start and (answered or parts[nxt].assistant_first))):
                break
            chain.append((nxt, repeats))
            begun.add(nxt)
        found.append(chain)
    joined = {index for chain in found for index, _ in chain[1:]}
    reached = 0  # the furthest end of the parts that start before
    for start, same in itertools.groupby(order, key=lambda index: parts[index].start):
        alike = list(same)
        if start != parts[order[0]].start:
            apart = sum(index not in joined for index in alike)
            notes["gaps" if start > reached else "mismatched_parts"] += apart
        reached = max(reached, *(start + parts[index].turns for index in alike))
    return found


def _only_numbered(parts: Sequence[Part], order: list[int], following: dict[int, int]) -> bool:
    """Whether some part begins inside another one without repeating its last turn: these are no parts of one whole."""
    furthest: list[tuple[int, int]] = []  # the two parts so far that end last, as (end, index)
    for index in order:
        for end, earlier in furthest:
            if parts[index].start < end and following.get(earlier) != index:
                return True
        furthest = sorted([*furthest, (parts[index].start + parts[index].turns, index)])[-2:]
    return False


def _repeats(part: Part, other: Part) -> bool:
    """Whether `other`, which follows `part`, begins with its last turn, and not behind it."""
    return other.start < part.start + part.turns
