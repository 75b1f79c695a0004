"""What becomes of each spooled record: a conversation, the head of a joined one, a part, or a duplicate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from shardmill.reading.content import content_digest, in_order
from shardmill.reading.dialect import Turn
from shardmill.reading.reasons import Unreadable
from shardmill.reading.rejoin import Part, chains
from shardmill.reading.spool import ALONE_UNREADABLE, ASSISTANT, ASSISTANT_FIRST, ASSISTANT_LAST, Spool

CONVERSATION, JOINED, DUPLICATE = 0, 1, 2
NONE = -1
# More parts than a conversation has, so that a quick look at them comes first.
_MANY = 1000


@dataclass(slots=True)
class Fate:
    """Arrays are by entry of the spool."""

    state: npt.NDArray[np.uint8]
    following: npt.NDArray[np.int64]  # the part that is joined behind this one, or NONE
    repeats: npt.NDArray[np.bool_]  # whether its first turn repeats the last of the part before
    occurrence: npt.NDArray[np.uint32]  # of the same content, without dedupe
    source_ids: dict[int, str] = field(default_factory=dict)  # where it is another record's


def resolve(spool: Spool, index: npt.NDArray[Any], rejoin: bool, dedupe: bool, notes: Counter[str]) -> Fate:
    count = len(index)
    fate = Fate(
        state=np.zeros(count, np.uint8),
        following=np.full(count, NONE, np.int64),
        repeats=np.zeros(count, np.bool_),
        occurrence=np.zeros(count, np.uint32),
    )
    if rejoin:
        _rejoin(index, fate, dedupe, notes)
        _digest_chains(spool, index, fate)
    _same_content(spool, index, fate, dedupe)
    return fate


def joined_turns(spool: Spool, index: npt.NDArray[Any], fate: Fate, head: int) -> tuple[Any, list[Turn]]:
    """The head's own [source id, system, tools, turns], and the turns of it and all parts behind it."""
    loaded = spool.load(index[head])
    turns: list[Turn] = loaded[3]
    part = int(fate.following[head])
    while part != NONE:
        more = spool.load(index[part])[3]
        turns += more[1:] if fate.repeats[part] else more
        part = int(fate.following[part])
    return loaded, turns


def _rejoin(index: npt.NDArray[Any], fate: Fate, dedupe: bool, notes: Counter[str]) -> None:
    parts = np.flatnonzero(index["base"] != 0)
    # Stable sorts: the same parts stand in file order.
    parts = parts[np.lexsort((index["raw"][parts], index["start"][parts], index["base"][parts]))]
    for group in _groups(index["base"][parts], parts):
        # The k-th copies of all parts of one id are joined with one another.
        layers: list[list[int]] = []
        copy, same = 0, None
        for entry in group:
            key = (index["start"][entry], index["raw"][entry])
            copy, same = (copy + 1, same) if key == same else (0, key)
            if copy and dedupe:
                fate.state[entry] = DUPLICATE
                continue
            if copy == len(layers):
                layers.append([])
            layers[copy].append(int(entry))
        for layer in layers:
            if len(layer) > 1:
                _join(index, fate, layer, notes)


def _join(index: npt.NDArray[Any], fate: Fate, layer: list[int], notes: Counter[str]) -> None:
    if len(layer) > _MANY and _only_numbered(index[layer]):
        return
    parts = [_part(index[entry]) for entry in layer]
    for chain in chains(parts, notes):
        before = layer[chain[0][0]]
        for position, repeats in chain[1:]:
            entry = layer[position]
            fate.following[before] = entry
            fate.repeats[entry] = repeats
            fate.state[entry] = JOINED
            notes["overlaps_dropped"] += repeats
            before = entry


def _only_numbered(parts: npt.NDArray[Any]) -> bool:
    """Whether these, by their start, can't be parts of one whole: some begin inside others, and none repeats a turn.

    `chains` finds the same, and what looks odd about each of them; for all records of a dataset, numbered behind one
    word, that would take a gigabyte.
    """
    starts = parts["start"].astype(np.int64)
    ends = starts + parts["turns"]
    inside = starts[1:] < np.maximum.accumulate(ends)[:-1]
    if not inside.any():
        return False
    begins = _rows_of(starts, parts["first"], parts["context"])
    repeated = _rows_of(ends - 1, parts["last"], parts["context"])
    return len(np.intersect1d(begins, repeated)) == 0


def _rows_of(*columns: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """One comparable value for each row of the columns."""
    rows = np.empty(len(columns[0]), dtype=[(str(number), column.dtype) for number, column in enumerate(columns)])
    for number, column in enumerate(columns):
        rows[str(number)] = column
    return rows


def _part(entry: Any) -> Part:
    flags = int(entry["flags"])
    return Part(
        start=int(entry["start"]),
        turns=int(entry["turns"]),
        first=int(entry["first"]),
        last=int(entry["last"]),
        context=int(entry["context"]),
        assistant=bool(flags & ASSISTANT),
        assistant_first=bool(flags & ASSISTANT_FIRST),
        assistant_last=bool(flags & ASSISTANT_LAST),
    )


def _digest_chains(spool: Spool, index: npt.NDArray[Any], fate: Fate) -> None:
    heads = np.flatnonzero((fate.following != NONE) & (fate.state == CONVERSATION))
    for head in heads.tolist():
        (_, system, tools, _), turns = joined_turns(spool, index, fate, head)
        try:
            delivered, _ = in_order(turns, system, later_part=bool(index["start"][head]))
        except Unreadable:
            index["flags"][head] |= ALONE_UNREADABLE
            continue
        index["flags"][head] &= 0xFF ^ ALONE_UNREADABLE
        index["digest"][head] = np.frombuffer(content_digest(orjson.dumps(delivered), tools), "<u8")


def _same_content(spool: Spool, index: npt.NDArray[Any], fate: Fate, dedupe: bool) -> None:
    whole = np.flatnonzero((fate.state == CONVERSATION) & (index["flags"] & ALONE_UNREADABLE == 0))
    digest = index["digest"][whole]
    whole = whole[np.lexsort(tuple(digest[:, word] for word in range(3, -1, -1)))]
    for group in _groups(index["digest"][whole], whole):
        ids = [spool.load(index[entry])[0] for entry in group]
        # A record's own id goes before none; ties fall to file order, and then it doesn't matter.
        ranked = sorted(range(len(ids)), key=lambda each: (ids[each] is None, ids[each] or "", group[each]))
        if dedupe:
            first = int(group[0])
            fate.state[group[1:]] = DUPLICATE
            if ids[ranked[0]] != ids[0]:
                fate.source_ids[first] = ids[ranked[0]]
        else:
            for occurrence, each in enumerate(ranked):
                fate.occurrence[group[each]] = occurrence


def _groups(keys: npt.NDArray[Any], entries: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """Runs of more than one entry with an equal key; `keys` (a value or a row an entry) is sorted."""
    if len(entries) < 2:
        return
    differs = keys[1:] != keys[:-1]
    if differs.ndim > 1:
        differs = differs.any(axis=1)
    borders = np.concatenate(([0], np.flatnonzero(differs) + 1, [len(entries)]))
    for which in np.flatnonzero(np.diff(borders) > 1).tolist():
        yield entries[borders[which] : borders[which + 1]]
