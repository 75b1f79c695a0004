"""A place in a stream of JSON bytes: what stands here, where it ends, and how to get over what is broken."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from shardmill.reading.reasons import RejectReason
from shardmill.reading.shapes import SPACE, looks_like_record
from shardmill.reading.sources import ByteSource
from shardmill.reading.syntax import Bad, Broken, Mended, NeedMore, end_of_value, left_open, parse
from shardmill.reading.window import Window

# No record is longer, and nothing that is broken is searched further for its end.
MAX_RECORD = 128 << 20
# How much may be looked through for the next whole record behind a broken one, all false starts together.
_SEARCH = 1 << 27
_ENDLESS = 1 << 20
_EXCERPT_BYTES = 1600

_OBJECT = re.compile(rb'\{[ \t\r\n]*+"')

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Lost:
    """A piece of the stream that holds no good value: one record, for the accounting."""

    reason: RejectReason
    detail: str
    excerpt: str
    offset: int  # of its first byte


class Cursor:
    """Stands at byte `at` of a window on `source`."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.window = Window(source.chunks())
        self.at = 0
        # Offsets of values that are known to have no end, and why: many broken ones cost no more than linear time.
        self._endless: deque[tuple[array[int], Bad]] = deque(maxlen=4)
        self._scanned = 0  # bytes that were looked through for ends that aren't there
        self.rest_lost = False  # nothing more is to be said about the file's end
        self.window.more()
        self.window.base = source.bom

    @property
    def offset(self) -> int:
        return self.window.base + self.at

    def peek(self) -> int | None:
        """The next byte that is not white space, where `at` then stands; None at the end of the file."""
        window = self.window
        while True:
            match = SPACE.match(window.data, self.at)
            if match is not None:
                self.at = match.end()
            # Three bytes at least: a BOM may lie across the window's edge.
            if self.at + 3 <= len(window.data) or window.ended:
                return window.data[self.at] if self.at < len(window.data) else None
            self.more()

    def more(self) -> bool:
        """Reads on, and forgets what lies behind."""
        self.window.drop(self.at)
        self.at = 0
        return self.window.more()

    def end(self) -> int | Bad:
        """Where the value here ends, reading on as far as it takes."""
        for offsets, known in self._endless:
            if _contains(offsets, self.offset):
                return known
        window = self.window
        while True:
            limit = len(window.data)
            try:
                return end_of_value(window.data, self.at, limit)
            except Broken as broken:
                bad = Bad(RejectReason.INVALID_JSON, f"{broken.what} (byte {window.base + broken.at:,})")
            except NeedMore as more:
                if limit - self.at > MAX_RECORD:
                    self._scanned += limit - self.at
                    return Bad(RejectReason.TOO_LARGE, f"no end of {more.inside} within {MAX_RECORD:,} bytes")
                elif self.more():
                    continue
                elif more.inside == "a number or word" and self.source.problem is None:
                    return limit
                else:
                    bad = Bad(RejectReason.CUT_OFF, f"the file is cut off inside {more.inside}")
            self._scanned += limit - self.at
            opened = left_open(window.data, self.at, _ENDLESS)
            self._endless.append((array("q", (window.base + position for position in opened)), bad))
            return bad

    def look(self, question: Callable[[bytes, int], _Answer]) -> _Answer | None:
        """What `question` finds out about the value here, given as much of it as it needs; None: nothing."""
        while len(self.window.data) - self.at < MAX_RECORD:
            try:
                return question(self.window.data, self.at)
            except NeedMore:
                if not self.more():
                    return None
            except Broken:
                return None
        return None

    # What is broken

    def broken(self, bad: Bad, lines: bool) -> Iterator[Lost]:
        """Says what is lost from here on, and goes to where the next whole record begins, or the next line."""
        start = self.offset
        excerpt = self.window.data[self.at : self.at + _EXCERPT_BYTES]
        found = self._next_line() if lines else self._next_record()
        if not found:
            self.rest_lost = True
            if bad.reason is RejectReason.CUT_OFF or self.source.problem is not None:
                yield self.lost_rest(start, excerpt, bad.detail)
            else:
                yield Lost(bad.reason, bad.detail, _readable(excerpt), start)
            return
        reason, detail = bad.reason, bad.detail
        if reason is RejectReason.CUT_OFF:
            reason, detail = RejectReason.INVALID_JSON, "the record doesn't end where the next one begins"
        yield Lost(reason, detail, _readable(excerpt[: self.offset - start]), start)

    def _next_line(self) -> bool:
        window = self.window
        while True:
            newline = window.data.find(b"\n", self.at)
            if newline >= 0:
                self.at = newline + 1
                return self.peek() is not None
            self.at = len(window.data)
            if not self.more():
                return False

    def _next_record(self) -> bool:
        """Goes to the next object that reads well and is a record. False: to the end of the file."""
        window = self.window
        enough = self._scanned + _SEARCH
        self.at += 1
        while self._scanned < enough:
            match = _OBJECT.search(window.data, self.at)
            if match is None:
                # The start of one may lie across the window's edge.
                self.at = max(self.at, len(window.data) - 256)
                if not self.more():
                    break
                continue
            self.at = match.start()
            end = self.end()
            if isinstance(end, int) and looks_like_record(parse(window.data[self.at : end], Mended())):
                return True
            self.at += 1
        while self.at < len(window.data) or self.more():
            self.at = len(window.data)
        return False

    def ended_inside(self, what: str) -> Iterator[Lost]:
        if not self.rest_lost:
            self.rest_lost = True
            yield self.lost_rest(self.offset, b"", f"the file is cut off inside {what}")

    def lost_rest(self, offset: int, excerpt: bytes, detail: str = "") -> Lost:
        """The end of a file that should go on: what a decompressor says about it goes before what the syntax shows."""
        problem = self.source.problem
        cut_off = problem is None or self.source.cut_off
        reason = RejectReason.CUT_OFF if cut_off else RejectReason.DAMAGED_FILE
        if problem is not None:
            detail = f"the file is {'cut off' if cut_off else 'damaged'}: {problem}"
        return Lost(reason, detail, _readable(excerpt), offset)

    def lost(self, reason: RejectReason, detail: str, length: int) -> Lost:
        """The `length` bytes from here as one lost record."""
        data = self.window.data[self.at : self.at + min(length, _EXCERPT_BYTES)]
        return Lost(reason, detail, _readable(data), self.offset)


def _contains(ascending: array[int], wanted: int) -> bool:
    found = bisect_left(ascending, wanted)
    return found < len(ascending) and ascending[found] == wanted


def _readable(raw: bytes) -> str:
    return raw.decode(errors="replace")
