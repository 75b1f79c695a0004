"""Records out of a stream of JSON bytes, whatever holds them: arrays, lines, values one after another, one wrapper.

Most records are parsed many at once (see runs). Where that fails, and at the edges, each value's end is found by its
brackets.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from typing import Any

import orjson

from shardmill.reading.cursor import Cursor, Lost
from shardmill.reading.reasons import BROKEN_SYNTAX, RejectReason
from shardmill.reading.runs import Runs
from shardmill.reading.shapes import SPACE, Holds, array_holds, has_records_for_turns, is_wrapper
from shardmill.reading.sources import ByteSource
from shardmill.reading.syntax import Bad, Broken, Mended, NeedMore, end_of_value, parse

_LINE_END = re.compile(rb"[ \t\r]*+(\n|\Z)")

# Arrays of records in an array are read as part of it, down to here.
_NESTED = 4
# What may come next in an object: a byte of it, or 0 for any value.
_KEY, _COLON, _COMMA, _VALUE = b'":,\0'

# A record's offset in the stream and its value.
Frame = tuple[int, Any]


class Framer:
    """All records of one file, in order, with what is broken between them."""

    def __init__(self, source: ByteSource, mended: Mended) -> None:
        self._cursor = Cursor(source)
        self._runs = Runs()
        self._mended = mended
        self._lines = False  # a record a line

    def records(self) -> Iterator[Frame | Lost]:
        here = self._cursor
        first = True
        wrapped = False
        while (byte := here.peek()) is not None:
            if byte == 0x5B and self._holds_records(first):
                here.at += 1
                yield from self._array()
            elif byte == 0x7B and (first or wrapped) and here.look(is_wrapper):
                wrapped = True
                here.at += 1
                yield from self._wrapper()
            elif byte == 0x2C:
                # Commas after top-level values: the inside of an array, or lines that were cut out of one.
                yield here.lost(RejectReason.INVALID_JSON, "a comma outside of an array", 1)
                here.at += 1
                yield from self._array()
            else:
                yield from self._value(top=True)
                if self._lines:
                    yield from self._whole_lines()
            first = False
        if here.source.problem is not None and not here.rest_lost:
            yield here.lost_rest(here.offset, b"")

    # Containers

    def _array(self, depth: int = 0) -> Iterator[Frame | Lost]:
        """Behind a `[`, up to and with its `]`."""
        here, runs = self._cursor, self._runs
        comma_due = False
        one_by_one_until = 0  # offset; a run before it has failed
        while True:
            byte = here.peek()
            if byte is None:
                yield from here.ended_inside("an array")
                return
            if byte == 0x5D:
                here.at += 1
                return
            if comma_due and byte == 0x2C:
                here.at += 1
                byte = here.peek()
                if byte is None:
                    continue
                if byte == 0x5D:
                    yield here.lost(RejectReason.INVALID_JSON, "a comma before the end of an array", 0)
                    continue
            elif comma_due:
                yield here.lost(RejectReason.INVALID_JSON, "a comma is missing before this", 0)
            if byte == 0x5B and depth < _NESTED and here.look(array_holds) is Holds.RECORDS:
                here.at += 1
                yield from self._array(depth + 1)
                comma_due = True
                continue
            if byte == 0x7B and here.offset >= one_by_one_until:
                cut = runs.cut(here)
                run = runs.take(here, cut)
                if run is not None:
                    yield from run
                    comma_due = True
                    continue
                one_by_one_until = here.window.base + cut
            start = here.offset
            comma_due = yield from self._value(top=False)
            if comma_due:
                runs.learn(here, start)

    def _wrapper(self) -> Iterator[Frame | Lost]:
        """Behind the `{` of an object that holds records, up to and with its `}`: every array of records in it."""
        here = self._cursor
        expected = _KEY
        while True:
            byte = here.peek()
            if byte is None:
                yield from here.ended_inside("the object that holds the records")
                return
            if byte == 0x7D and expected in (_KEY, _COMMA):
                here.at += 1
                return
            if byte == expected and expected in (_COMMA, _COLON):
                here.at += 1
                expected = _KEY if expected == _COMMA else _VALUE
            elif expected == _VALUE and byte == 0x5B and here.look(array_holds) is Holds.RECORDS:
                here.at += 1
                yield from self._array()
                expected = _COMMA
            elif expected == _VALUE or (expected == _KEY and byte == _KEY):
                end = here.end()
                if isinstance(end, Bad):
                    yield from here.broken(end, lines=False)
                    yield from self._array()
                    expected = _COMMA
                else:
                    here.at = end
                    expected = _COLON if expected == _KEY else _COMMA
            else:
                # Most likely an array of records ended too early, and this is its next one.
                yield here.lost(RejectReason.INVALID_JSON, "this is no field of the object that holds the records", 0)
                yield from self._array()
                expected = _COMMA

    def _holds_records(self, first: bool) -> bool:
        """Whether the array here is a list of records, and not a record that is an array.

        It is one when its first element is an object, unless those are turns; when one of the first elements is a
        record; and at the start of a file, unless objects follow it.
        """
        here = self._cursor
        holds = here.look(array_holds)
        if holds is Holds.RECORDS or holds is Holds.TURNS:
            return holds is Holds.RECORDS
        if not first:
            opening = SPACE.match(here.window.data, here.at + 1)
            return opening is not None and here.window.data[opening.end() : opening.end() + 1] == b"{"
        end = here.end()
        if isinstance(end, Bad):
            return True
        here.at, array = end, here.offset
        follows = here.peek()
        here.at = array - here.window.base
        return follows != 0x7B

    # Values

    def _value(self, top: bool) -> Generator[Frame | Lost, None, bool]:
        """The one value here. Returns whether it was a whole one; if not, what follows is the next whole record."""
        here = self._cursor
        lines = top and self._lines
        line_start = here.offset == here.source.bom or here.window.data[here.at - 1 : here.at] == b"\n"
        end: int | Bad = self._open_line() or here.end() if lines else here.end()
        if isinstance(end, Bad):
            yield from here.broken(end, lines)
            return False
        window = here.window
        raw = window.data[here.at : end]
        value = parse(raw, self._mended)
        if has_records_for_turns(value):
            value = Bad(RejectReason.INVALID_JSON, "another record begins inside its turns")
        if isinstance(value, Bad):
            if value.reason in BROKEN_SYNTAX:
                yield from here.broken(value, lines)
                return False
            yield here.lost(value.reason, value.detail, len(raw))
        else:
            yield here.offset, value
        here.at = end
        if top and line_start and not self._lines:
            rest = _LINE_END.match(window.data, end)
            self._lines = rest is not None and b"\n" not in raw and (bool(rest[1]) or window.ended)
        return True

    def _open_line(self) -> Bad | None:
        """In a file of lines: what is wrong with a line that ends inside its value, where the next one is whole.

        Without this look ahead, one such line would take all that follow for its own.
        """
        data, at = self._cursor.window.data, self._cursor.at
        if data[at] not in b"{[":
            return None
        newline = data.find(b"\n", at)
        following = data.find(b"\n", newline + 1)
        if newline < 0 or following < 0:
            return None
        try:
            end_of_value(data, at, newline)
        except Broken:
            return None
        except NeedMore as more:
            if isinstance(parse(data[newline + 1 : following], Mended()), dict):
                return Bad(RejectReason.INVALID_JSON, f"the line ends inside {more.inside}")
        return None

    def _whole_lines(self) -> Iterator[Frame | Lost]:
        """Records of a line each, as far as whole lines are at hand and nothing else comes. Stands at a value."""
        here = self._cursor
        window = here.window
        loads = orjson.loads
        while True:
            if here.peek() is None:
                return
            last = window.data.rfind(b"\n", here.at)
            if last < 0:
                return
            at = here.at
            data, base = window.data, window.base
            while at < last:
                end = data.find(b"\n", at)
                line = data[at:end]
                try:
                    value = loads(line)
                except orjson.JSONDecodeError:
                    if not line.strip():
                        at = end + 1
                        continue
                    here.at = at
                    return
                if type(value) is not dict:
                    here.at = at
                    return
                yield base + at, value
                at = end + 1
            here.at = at
