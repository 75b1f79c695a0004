"""Many records of an array parsed at once, at a bare parser's speed.

If `[` + some bytes + `]` is JSON, then those bytes are exactly a run of whole values, wherever they were cut. So the
bytes are cut where two records seem to meet, and whether they do is what the parse says.
"""

from __future__ import annotations

import gc
import re
from typing import Any

import orjson

from shardmill.reading.cursor import Cursor
from shardmill.reading.syntax import end_of_value

# There are so many bytes at hand where the file has them, and no more are taken: what fits a cache is parsed fastest.
_LEAST = 1 << 18
_MOST = 1 << 19

_FIRST_KEY = re.compile(rb'\{[ \t\r\n]*+"([^"\\]*+)"')
_BETWEEN = re.compile(rb'[ \t\r\n]*+,[ \t\r\n]*+\{[ \t\r\n]*+"([^"\\]*+)"')


class Runs:
    """What was learned about the file's records: their first key, and the bytes between one and the next."""

    def __init__(self) -> None:
        self._separator: bytes | None = None
        self._key = ""
        self._starts = _FIRST_KEY

    def learn(self, here: Cursor, start: int) -> None:
        """From a good record that began at offset `start` and ends here, and the beginning of the next."""
        if self._separator is not None:
            return
        window = here.window
        first = _FIRST_KEY.match(window.data, start - window.base)
        between = _BETWEEN.match(window.data, here.at)
        if first is not None and between is not None and first[1] == between[1]:
            self._key = first[1].decode(errors="replace")
            self._starts = re.compile(rb'\{[ \t\r\n]*+"(?:%b"|[^"\\]*+(\\))' % re.escape(first[1]))
            self._separator = b"}" + between[0]

    def cut(self, here: Cursor) -> int:
        """The position behind the last record that another one seems to follow, or of the next byte."""
        if len(here.window.data) - here.at < _LEAST and not here.window.ended:
            here.more()
        if self._separator is None:
            return here.at + 1
        return max(here.at, here.window.data.rfind(self._separator, here.at, here.at + _MOST)) + 1

    def take(self, here: Cursor, cut: int) -> list[tuple[int, Any]] | None:
        """Offsets and values of the records up to `cut`, and goes there; None where that is no run of them."""
        data, base = here.window.data, here.window.base
        collects = gc.isenabled()
        gc.disable()  # thousands of new objects, none of them garbage: looking for some took a quarter of the time
        try:
            values = orjson.loads(b"".join((b"[", memoryview(data)[here.at : cut], b"]")))
        except orjson.JSONDecodeError:
            return None
        finally:
            if collects:
                gc.enable()
        positions = self._positions(data, here.at, cut, values)
        here.at = cut
        return [(base + position, value) for position, value in zip(positions, values, strict=True)]

    def _positions(self, data: bytes, at: int, cut: int, values: list[Any]) -> list[int]:
        """Where each of the values begins between `at` and `cut`, which are known to hold exactly them."""
        # A quote right behind a bracket and its spaces opens a key or ends a string that ends in a bracket; in front of
        # the first key's name it can only open it. So these are the starts of all objects with this first key, and if
        # there are as many as records, which all have it, there are no others. (Group 1: a key with escapes in it.)
        starts = [(match.start(), match.lastindex) for match in self._starts.finditer(data, at, cut)]
        if len(starts) == len(values) and all(
            type(value) is dict and next(iter(value), None) == self._key and not escaped
            for value, (_, escaped) in zip(values, starts, strict=True)
        ):
            return [start for start, _ in starts]
        positions = []
        for _ in values:
            while data[at] in b" \t\r\n,":
                at += 1
            positions.append(at)
            at = end_of_value(data, at, cut)
        return positions
