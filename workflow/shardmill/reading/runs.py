"""Many records of an array parsed at once, at a bare parser's speed.

If `[` + some bytes + `]` is JSON, then those bytes are exactly a run of whole values, wherever they were cut. So the
bytes are cut where two records seem to meet, and whether they do is what the parse says.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from shardmill.reading.cursor import Cursor
from shardmill.reading.syntax import end_of_value

# There are so many bytes at hand where the file has them, and no more are taken.
_LEAST = 1 << 20
_MOST = 8 << 20

_FIRST_KEY = re.compile(rb'\{[ \t\r\n]*+"([^"\\]*+)"')
_BETWEEN = re.compile(rb'[ \t\r\n]*+,[ \t\r\n]*+\{[ \t\r\n]*+"([^"\\]*+)"')
_ESCAPED_KEY = re.compile(rb'\{[ \t\r\n]*+"[^"\\]*+\\')


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
            self._starts = re.compile(rb'\{[ \t\r\n]*+"%b"' % re.escape(first[1]))
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
        raw = here.window.data[here.at : cut]
        try:
            values = orjson.loads(b"[%b]" % raw)
        except orjson.JSONDecodeError:
            return None
        base = here.offset
        offsets = self._offsets(raw, values)
        here.at = cut
        return [(base + offset, value) for offset, value in zip(offsets, values, strict=True)]

    def _offsets(self, raw: bytes, values: list[Any]) -> list[int]:
        """Where each of the values begins in `raw`, which is known to hold exactly them."""
        # A quote right behind a bracket and its spaces opens a key or ends a string that ends in a bracket; in front of
        # the first key's name it can only open it. So these are the starts of all objects with this first key, and if
        # there are as many as records, which all have it, there are no others.
        offsets = [match.start() for match in self._starts.finditer(raw)]
        if (
            len(offsets) == len(values)
            and all(type(value) is dict and next(iter(value), None) == self._key for value in values)
            and _ESCAPED_KEY.search(raw) is None
        ):
            return offsets
        offsets, at = [], 0
        for _ in values:
            while raw[at] in b" \t\r\n,":
                at += 1
            offsets.append(at)
            at = end_of_value(raw, at, len(raw))
        return offsets
