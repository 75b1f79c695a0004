"""What an array or object at the top of a file is: records, a container of records, or something else."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

from shardmill.reading.aliases import ROLE_KEYS, TURNS_KEYS, get
from shardmill.reading.syntax import Broken, Mended, NeedMore, end_of_value, parse

# JSON's white space; and a BOM, which stands in the middle where files were joined by hand.
SPACE = re.compile(rb"(?:[ \t\r\n]|\xef\xbb\xbf)*+")

# Elements of an array that are looked at to tell what it holds.
_ELEMENTS = 64


class Holds(Enum):
    RECORDS = "records"
    TURNS = "turns"
    OTHER = "other"  # as far as the first elements tell


def looks_like_record(value: Any) -> bool:
    """An object with a field of turns that holds a list: what a broken file is read on from."""
    return isinstance(value, dict) and any(isinstance(get(value, (key,)), list) for key in TURNS_KEYS)


def looks_like_turn(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(get(value, ROLE_KEYS), str)


def has_records_for_turns(value: Any) -> bool:
    """Whether a record's turns hold whole records: it lacks its end, and took that of those that follow."""
    if not isinstance(value, dict):
        return False
    found = [get(value, (key,)) for key in TURNS_KEYS]
    elements = (element for turns in found if isinstance(turns, list) for element in turns)
    return any(looks_like_record(element) and not looks_like_turn(element) for element in elements)


def array_holds(data: bytes, at: int) -> Holds:
    """What the array holds whose `[` is at `at`. Raises NeedMore and Broken like `end_of_value`."""
    for _ in range(_ELEMENTS):
        at = _behind_space(data, at + 1)
        if data[at] == 0x5D:
            break
        end = end_of_value(data, at, len(data))
        element = parse(data[at:end], Mended())
        if looks_like_turn(element):
            return Holds.TURNS
        if looks_like_record(element):
            return Holds.RECORDS
        at = _behind_space(data, end)
        if data[at] != 0x2C:
            break
    return Holds.OTHER


def is_wrapper(data: bytes, at: int) -> bool:
    """Whether the object whose `{` is at `at` holds records in some field of its own, and is none itself.

    A record may have other records in a field; it is told by having turns in another. Raises NeedMore and Broken.
    """
    found = False
    try:
        at = _behind_space(data, at + 1)
        while data[at] == 0x22:
            at = _behind_space(data, end_of_value(data, at, len(data)))
            if data[at] != 0x3A:
                break
            at = _behind_space(data, at + 1)
            if data[at] == 0x5B:
                holds = array_holds(data, at)
                if holds is Holds.TURNS:
                    return False
                found = found or holds is Holds.RECORDS
            at = _behind_space(data, end_of_value(data, at, len(data)))
            if data[at] != 0x2C:
                break
            at = _behind_space(data, at + 1)
    except (NeedMore, Broken):  # what is broken behind the first record is found when it is read
        if not found:
            raise
    return found


def _behind_space(data: bytes, at: int) -> int:
    match = SPACE.match(data, at)
    end = match.end() if match is not None else at
    if end >= len(data):
        raise NeedMore("an object")
    return end
