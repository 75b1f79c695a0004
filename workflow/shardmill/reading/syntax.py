"""JSON syntax over bytes: where a value ends, and a parse that says what is wrong and mends what can be mended."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from typing import Any

import orjson

from shardmill.reading.reasons import RejectReason

# A string in one piece, or a bracket, or a quote that opens a string which doesn't end well. JSON strings hold no raw
# control characters, so that an open quote is found out at the end of its line.
_TOKEN = re.compile(rb'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+"|[{}\[\]"]')
_OPEN_STRING = re.compile(rb'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+\\?')
_SCALAR = re.compile(rb"[-+.\w]+")
_PAIRS = {ord("}"): ord("{"), ord("]"): ord("[")}


@dataclass(frozen=True, slots=True)
class Bad:
    """Not one good value."""

    reason: RejectReason
    detail: str


class NeedMore(Exception):
    """The bytes end inside the value; `inside` says in what."""

    def __init__(self, inside: str) -> None:
        super().__init__(inside)
        self.inside = inside


class Broken(Exception):
    """The bytes from the start on are no JSON value. `at` is where this shows."""

    def __init__(self, at: int, what: str) -> None:
        super().__init__(what)
        self.at = at
        self.what = what


def end_of_value(data: bytes, start: int, stop: int) -> int:
    """The position behind the value that begins at `start`, looking at strings and brackets only, up to `stop`.

    Raises NeedMore when `stop` comes first, Broken when brackets don't match, a string holds a control character, or
    no value begins there.
    """
    first = data[start]
    if first not in b'{["':
        match = _SCALAR.match(data, start, stop)
        if match is None:
            raise Broken(start, f"{_shown(data, start)} where a value should begin")
        if match.end() == stop:
            raise NeedMore("a number or word")
        return match.end()
    brackets = bytearray()
    for match in _TOKEN.finditer(data, start, stop):
        at = match.start()
        byte = data[at]
        if byte == 0x22:
            if match.end() - at == 1:
                raise _open_string(data, at, stop)
            if not brackets:
                return match.end()
        elif byte in b"{[":
            brackets.append(byte)
        else:
            if not brackets or brackets[-1] != _PAIRS[byte]:
                raise Broken(at, f"{chr(byte)!r} closes what is not open")
            brackets.pop()
            if not brackets:
                return match.end()
    raise NeedMore("an object" if brackets[-1] == 0x7B else "an array")


def left_open(data: bytes, start: int, limit: int) -> array[int]:
    """Positions, ascending, of the objects that `end_of_value` from `start` found no end of; at most `limit`.

    None of them is a whole value: whatever stopped the scan from `start` stops one from there, too.
    """
    opened = array("q")
    for match in _TOKEN.finditer(data, start):
        byte = data[match.start()]
        if byte == 0x22:
            if match.end() - match.start() == 1:
                break
        elif byte in b"{[":
            if len(opened) == limit:
                break
            opened.append(match.start())
        elif not opened or data[opened[-1]] != _PAIRS[byte]:
            break
        else:
            opened.pop()
    return opened


def _open_string(data: bytes, at: int, stop: int) -> NeedMore | Broken:
    match = _OPEN_STRING.match(data, at, stop)
    if match is None or match.end() >= stop:
        return NeedMore("a string")
    if data[match.end()] in b"\r\n":
        return Broken(match.end(), "the line ends inside a string")
    return Broken(match.end(), f"{_shown(data, match.end())} inside a string")


def _shown(data: bytes, at: int) -> str:
    byte = data[at]
    return repr(chr(byte)) if byte < 0x80 else f"byte 0x{byte:02x}"


@dataclass(slots=True)
class Mended:
    """What `parse` mended, counted over all its calls."""

    surrogates: int = 0
    nans: int = 0


def parse(raw: bytes, mended: Mended) -> Any | Bad:
    """The value of one JSON text. Lone surrogates become U+FFFD, NaN and Infinity null, both counted in `mended`."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return _mend(raw, str(error), mended)


# A string, kept as it is, or what JSON has no word for.
_STRING_OR_NAN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|-?(?<![\w.])(?:NaN|Infinity)(?![\w.])', re.DOTALL)
# An escape of another kind, kept; a real pair, kept; or a surrogate alone.
_ESCAPE = re.compile(
    rb"\\(?:[^u]|u(?![dD][89a-fA-F])|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2}))",
    re.DOTALL,
)
_DEPTH = 1024  # orjson's own limit


def _mend(raw: bytes, message: str, mended: Mended) -> Any | Bad:
    text, surrogates = raw, 0
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        decoded = _surrogate_bytes(raw)
        if decoded is None:
            where = f"byte 0x{raw[error.start]:02x} at byte {error.start:,} of the record is not UTF-8"
            # Only the text is wrong where the same bytes with U+FFFD in their places are JSON.
            whole = _mend(raw.decode(errors="replace").encode(), message, Mended())
            return whole if isinstance(whole, Bad) else Bad(RejectReason.INVALID_UTF8, where)
        text, surrogates = decoded
    nans = lone = 0

    def no_nan(match: re.Match[bytes]) -> bytes:
        nonlocal nans
        if match[0].startswith(b'"'):
            return match[0]
        nans += 1
        return b"null"

    def no_lone(match: re.Match[bytes]) -> bytes:
        nonlocal lone
        if match[1] is None:
            return match[0]
        lone += 1
        return b"\\ufffd"

    text = _ESCAPE.sub(no_lone, _STRING_OR_NAN.sub(no_nan, text))
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if too_deep(raw):
            return Bad(RejectReason.TOO_DEEP, f"nested deeper than {_DEPTH:,} levels")
        return Bad(RejectReason.INVALID_JSON, _plain(str(error) if text is not raw else message))
    mended.surrogates += surrogates + lone
    mended.nans += nans
    return value


def too_deep(raw: bytes) -> bool:
    depth = 0
    for match in _TOKEN.finditer(raw):
        if match[0] in b"{[":
            depth += 1
            if depth >= _DEPTH:
                return True
        elif match[0] in b"}]":
            depth -= 1
    return False


def _surrogate_bytes(raw: bytes) -> tuple[bytes, int] | None:
    """UTF-8 of bytes that hold surrogates as three bytes each (CESU-8, WTF-8): pairs joined, lone ones U+FFFD."""
    try:
        text = raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    lone = sum("\ud800" <= character <= "\udfff" for character in joined)
    return re.sub("[\ud800-\udfff]", "\ufffd", joined).encode(), lone


def _plain(message: str) -> str:
    """orjson's message without its own line and column: the record's place says where."""
    return re.sub(r": line \d+ column \d+ \(char \d+\)$", "", message)
