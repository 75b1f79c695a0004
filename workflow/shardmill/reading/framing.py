"""Records out of a stream of JSON bytes, whatever holds them: arrays, lines, values one after another, one wrapper.

Most records are parsed many at once: if `[` + some bytes + `]` is JSON, then those bytes are exactly a run of whole
values, wherever they were cut. Where that fails, and at the edges, each value's end is found by its brackets.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from shardmill.reading.dialect import looks_like_record, looks_like_turn
from shardmill.reading.reasons import BROKEN_SYNTAX, RejectReason
from shardmill.reading.sources import ByteSource
from shardmill.reading.syntax import Bad, Broken, Mended, NeedMore, end_of_value, parse
from shardmill.reading.window import Window

# No record is longer, and nothing that is broken is searched further for its end.
MAX_RECORD = 256 << 20
# A run of records is parsed at once where at least so many bytes are at hand.
_RUN = 1 << 20
_EXCERPT_BYTES = 1600
# How much may be looked through for the next whole record behind a broken one, all false starts together.
_SEARCH = 1 << 30

# JSON's white space; and a BOM, which stands in the middle where files were joined by hand.
_SPACE = re.compile(rb"(?:[ \t\r\n]|\xef\xbb\xbf)*+")
_FIRST_KEY = re.compile(rb'\{[ \t\r\n]*+"([^"\\]*+)"')
_ANY_START = re.compile(rb'\{[ \t\r\n]*+"')
_BETWEEN = re.compile(rb'[ \t\r\n]*+,[ \t\r\n]*+(\{[ \t\r\n]*+"[^"\\]*+")')
_LINE_END = re.compile(rb"[ \t\r]*+(\n|\Z)")
_ESCAPED_KEY = re.compile(rb'\{[ \t\r\n]*+"[^"\\]*+\\')


@dataclass(frozen=True, slots=True)
class Lost:
    """A piece of the stream that holds no good value: one record, for the accounting."""

    reason: RejectReason
    detail: str
    excerpt: str
    offset: int  # of its first byte
    at: int  # where it shows


# A record's offset in the stream and its value.
Frame = tuple[int, Any]


class Framer:
    """All records of one file, in order, with what is broken between them."""

    def __init__(self, source: ByteSource, mended: Mended) -> None:
        self._source = source
        self._mended = mended
        self._window = Window(source.chunks())
        self._at = 0  # position in the window
        self._lines = False  # a record a line
        self._starts: re.Pattern[bytes] | None = None  # how the first record of the file starts
        self._separator: bytes | None = None  # what stands between two records of an array
        self._key: str | None = None
        self._rest_lost = False  # nothing more is to be said about the file's end

    def records(self) -> Iterator[Frame | Lost]:
        self._window.more()
        self._window.base = self._source.bom
        first = True
        wrapped = False
        while (byte := self._peek()) is not None:
            if byte == 0x5B and self._holds_records(first):
                self._at += 1
                yield from self._array()
            elif byte == 0x7B and (first or wrapped) and self._is_wrapper():
                wrapped = True
                self._at += 1
                yield from self._wrapper()
            else:
                yield from self._value(top=True)
                if self._lines:
                    yield from self._whole_lines()
            first = False
        if self._source.problem is not None and not self._rest_lost:
            yield self._lost_rest(self._offset, b"")

    # Containers

    def _array(self) -> Iterator[Frame | Lost]:
        """Behind a `[`, up to and with its `]`."""
        comma_due = False
        exact_until = -1
        while True:
            byte = self._peek()
            if byte is None:
                yield from self._ended_inside("an array")
                return
            if byte == 0x5D:
                self._at += 1
                return
            if comma_due:
                if byte == 0x2C:
                    self._at += 1
                    byte = self._peek()
                    if byte is None:
                        continue
                    if byte == 0x5D:
                        yield self._lost(RejectReason.INVALID_JSON, "a comma before the end of an array", self._at, 0)
                        continue
                else:
                    yield self._lost(RejectReason.INVALID_JSON, "a comma is missing before this", self._at, 0)
            if self._offset >= exact_until and byte == 0x7B:
                run = self._run()
                if run is None:
                    exact_until = self._window.base + max(self._cut(), self._at + 1)
                else:
                    yield from run
                    comma_due = True
                    continue
            start = self._offset
            comma_due = yield from self._value(top=False)
            if comma_due and self._separator is None:
                self._learn(start)

    def _wrapper(self) -> Iterator[Frame | Lost]:
        """Behind the `{` of an object that holds records, up to and with its `}`: every array of records in it."""
        key = False
        while True:
            byte = self._peek()
            if byte is None:
                yield from self._ended_inside("the object that holds the records")
                return
            if byte == 0x7D:
                self._at += 1
                return
            if byte in b",:":
                self._at += 1
                key = byte == 0x3A
            elif byte == 0x5B and key and self._holds_records(False):
                self._at += 1
                yield from self._array()
            else:
                end = self._end()
                if isinstance(end, Bad):
                    yield from self._broken(end, top=False)
                    yield from self._array()
                else:
                    self._at = end

    def _holds_records(self, first: bool) -> bool:
        """Whether the array here is a list of records, and not a record that is an array.

        It is one when its first element is an object; and, at the start of a file, unless objects follow it.
        """
        window = self._window
        while True:
            inside = _SPACE.match(window.data, self._at + 1)
            position = inside.end() if inside else self._at + 1
            if position < len(window.data) or not window.more():
                break
        if window.data[position : position + 1] == b"{":
            return True
        if not first:
            return False
        end = self._end()
        if isinstance(end, Bad):
            return True
        follows = _SPACE.match(window.data, end)
        return follows is None or window.data[follows.end() : follows.end() + 1] != b"{"

    def _is_wrapper(self) -> bool:
        """Whether the object here holds, in one of its fields, an array whose first object is a record."""
        window = self._window
        while len(window.data) - self._at < MAX_RECORD:
            try:
                return _holds_array_of_records(window.data, self._at + 1)
            except NeedMore:
                if not window.more():
                    return False
            except Broken:
                return False
        return False

    # Values

    def _run(self) -> list[Frame] | None:
        """As many whole records of an array as the window holds, or None where they aren't found or not all good."""
        if self._separator is None:
            return None
        window = self._window
        if len(window.data) - self._at < _RUN and not window.ended:
            self._more()
        cut = self._cut()
        if cut <= self._at:
            return None
        raw = window.data[self._at : cut]
        try:
            values = orjson.loads(b"[%b]" % raw)
        except orjson.JSONDecodeError:
            return None
        base = self._offset
        offsets = self._offsets(raw, values)
        self._at = cut
        return [(base + offset, value) for offset, value in zip(offsets, values, strict=True)]

    def _cut(self) -> int:
        """Behind the last record in the window that another one seems to follow."""
        return self._window.data.rfind(self._separator or b"\0", self._at) + 1

    def _offsets(self, raw: bytes, values: list[Any]) -> list[int]:
        """Where each of the values begins in `raw`, which is known to hold exactly them."""
        if self._starts is not None:
            # An unescaped quote after a bracket can't be in a string. So these are the starts of all objects with this
            # first key, and if there are as many as records that have it, there are no others.
            offsets = [match.start() for match in self._starts.finditer(raw)]
            if len(offsets) == len(values) and all(type(value) is dict and self._key in value for value in values):
                first_keys = all(next(iter(value)) == self._key for value in values)
                if first_keys and _ESCAPED_KEY.search(raw) is None:
                    return offsets
        offsets, at = [], 0
        for _ in values:
            while raw[at] in b" \t\r\n,":
                at += 1
            offsets.append(at)
            at = end_of_value(raw + b" ", at, len(raw) + 1)
        return offsets

    def _learn(self, offset: int) -> None:
        """From a good record at `offset`, just read: how records start, and what stands between two of them."""
        window = self._window
        start = offset - window.base
        if start < 0 or self._at <= start:
            return
        here = _FIRST_KEY.match(window.data, start)
        while (there := _SPACE.match(window.data, self._at)) is not None and there.end() + 64 > len(window.data):
            if not window.more():
                break
        match = _BETWEEN.match(window.data, self._at)
        if here is None or match is None or _FIRST_KEY.match(match[1]) is None:
            return
        key = here[1]
        if window.data[self._at - 1 : self._at] != b"}" or not match[1].endswith(b'"%b"' % key):
            return
        self._key = key.decode(errors="replace")
        self._starts = re.compile(rb'\{[ \t\r\n]*+"%b"' % re.escape(key))
        self._separator = b"}" + match[0]

    def _value(self, top: bool) -> Generator[Frame | Lost, None, bool]:
        """The one value here. Returns whether it was a whole one; if not, what follows is the next whole record."""
        end: int | Bad = self._open_line() or self._end() if top and self._lines else self._end()
        if isinstance(end, Bad):
            yield from self._broken(end, top)
            return False
        window = self._window
        raw = window.data[self._at : end]
        value = parse(raw, self._mended)
        if isinstance(value, Bad):
            if value.reason in BROKEN_SYNTAX:
                yield from self._broken(value, top)
                return False
            yield self._lost(value.reason, value.detail, self._at, len(raw))
        else:
            yield self._offset, value
        self._at = end
        if top and not self._lines:
            rest = _LINE_END.match(window.data, end)
            self._lines = rest is not None and b"\n" not in raw and (bool(rest[1]) or window.ended)
        return True

    def _open_line(self) -> Bad | None:
        """In a file of lines: what is wrong with a line that ends inside its value, where the next one is whole.

        Without this look ahead, one such line would take all that follow for its own.
        """
        data = self._window.data
        newline = data.find(b"\n", self._at)
        following = data.find(b"\n", newline + 1)
        if newline < 0 or following < 0:
            return None
        try:
            end_of_value(data, self._at, newline)
        except Broken:
            return None
        except NeedMore as more:
            if isinstance(parse(data[newline + 1 : following], Mended()), dict):
                return Bad(RejectReason.INVALID_JSON, f"the line ends inside {more.inside}")
        return None

    def _whole_lines(self) -> Iterator[Frame | Lost]:
        """Records of a line each, as far as whole lines are at hand and nothing else comes. Stands at a value."""
        window = self._window
        loads = orjson.loads
        while True:
            if self._peek() is None:
                return
            last = window.data.rfind(b"\n", self._at)
            if last < 0:
                return
            at = self._at
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
                    self._at = at
                    return
                if type(value) is not dict:
                    self._at = at
                    return
                yield base + at, value
                at = end + 1
            self._at = at

    def _end(self) -> int | Bad:
        """Where the value here ends, reading on as far as it takes."""
        window = self._window
        while True:
            limit = len(window.data)
            try:
                return end_of_value(window.data, self._at, limit)
            except Broken as broken:
                return Bad(RejectReason.INVALID_JSON, f"{broken.what} (byte {window.base + broken.at:,})")
            except NeedMore as more:
                if limit - self._at > MAX_RECORD:
                    return Bad(RejectReason.TOO_LARGE, f"no end of {more.inside} within {MAX_RECORD:,} bytes")
                if self._more():
                    continue
                if more.inside == "a number or word" and self._source.problem is None:
                    return limit
                return Bad(RejectReason.CUT_OFF, f"the file is cut off inside {more.inside}")

    # What is broken

    def _broken(self, bad: Bad, top: bool) -> Iterator[Frame | Lost]:
        """Says what is lost from here on, and goes to where the next whole record begins."""
        start = self._offset
        excerpt = self._window.data[self._at : self._at + _EXCERPT_BYTES]
        found = self._next_line() if top and self._lines else self._next_record()
        if not found:
            self._rest_lost = True
            if bad.reason is RejectReason.CUT_OFF or self._source.problem is not None:
                yield self._lost_rest(start, excerpt, bad.detail)
            else:
                yield Lost(bad.reason, bad.detail, _readable(excerpt), start, start)
            return
        reason, detail = bad.reason, bad.detail
        if reason is RejectReason.CUT_OFF:
            reason, detail = RejectReason.INVALID_JSON, "the record doesn't end where the next one begins"
        yield Lost(reason, detail, _readable(excerpt[: self._offset - start]), start, start)

    def _next_line(self) -> bool:
        window = self._window
        while True:
            newline = window.data.find(b"\n", self._at)
            if newline >= 0:
                self._at = newline + 1
                return self._peek() is not None
            self._at = len(window.data)
            if not self._more():
                return False

    def _next_record(self) -> bool:
        """Goes to the next object that reads well and is a record. False at the end of the file."""
        window = self._window
        pattern = self._starts or _ANY_START
        searched = 0
        self._at += 1
        while True:
            match = pattern.search(window.data, self._at)
            if match is None:
                # A start may lie across the window's edge.
                self._at = max(self._at, len(window.data) - 256)
                if self._more():
                    continue
            else:
                self._at = match.start()
                end = self._end()
                if isinstance(end, int) and looks_like_record(parse(window.data[self._at : end], Mended())):
                    return True
                searched += (end if isinstance(end, int) else len(window.data)) - self._at
                self._at += 1
                if searched < _SEARCH:
                    continue
            while self._at < len(window.data) or self._more():
                self._at = len(window.data)
            return False

    def _ended_inside(self, what: str) -> Iterator[Lost]:
        if not self._rest_lost:
            self._rest_lost = True
            yield self._lost_rest(self._offset, b"", f"the file is cut off inside {what}")

    def _lost_rest(self, offset: int, excerpt: bytes, detail: str = "") -> Lost:
        """The end of a file that should go on: what a decompressor says about it goes before what the syntax shows."""
        problem = self._source.problem
        cut_off = problem is None or self._source.cut_off
        reason = RejectReason.CUT_OFF if cut_off else RejectReason.DAMAGED_FILE
        if problem is not None:
            detail = f"the file is {'cut off' if cut_off else 'damaged'}: {problem}"
        return Lost(reason, detail, _readable(excerpt), offset, self._offset)

    def _lost(self, reason: RejectReason, detail: str, position: int, length: int) -> Lost:
        data = self._window.data[position : position + min(length, _EXCERPT_BYTES)]
        offset = self._window.base + position
        return Lost(reason, detail, _readable(data), offset, offset)

    # The window

    @property
    def _offset(self) -> int:
        return self._window.base + self._at

    def _peek(self) -> int | None:
        """The next byte that is not white space, where `_at` then stands; None at the end of the file."""
        window = self._window
        while True:
            match = _SPACE.match(window.data, self._at)
            if match is not None:
                self._at = match.end()
            # Three bytes at least: a BOM may lie across the window's edge.
            if self._at + 3 <= len(window.data) or window.ended:
                return window.data[self._at] if self._at < len(window.data) else None
            self._more()

    def _more(self) -> bool:
        """Reads on, and forgets what lies behind."""
        self._window.drop(self._at)
        self._at = 0
        return self._window.more()


def _holds_array_of_records(data: bytes, at: int) -> bool:
    stop = len(data)

    def space(position: int) -> int:
        match = _SPACE.match(data, position)
        end = match.end() if match is not None else position
        if end >= stop:
            raise NeedMore("an object")
        return end

    at = space(at)
    while data[at] == 0x22:
        at = space(end_of_value(data, at, stop))
        if data[at] != 0x3A:
            return False
        at = space(at + 1)
        if data[at] == 0x5B:
            inner = space(at + 1)
            if data[inner] == 0x7B:
                element = parse(data[inner : end_of_value(data, inner, stop)], Mended())
                if looks_like_turn(element):
                    return False
                if looks_like_record(element):
                    return True
        at = space(end_of_value(data, at, stop))
        if data[at] != 0x2C:
            return False
        at = space(at + 1)
    return False


def _readable(raw: bytes) -> str:
    return raw.decode(errors="replace")
