"""Which files a dataset is, and their bytes: decompressed, in UTF-8, told apart by content and never by name."""

from __future__ import annotations

import codecs
import glob
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

from shardmill.errors import DataError
from shardmill.files import sha256_file

CHUNK = 1 << 18  # bytes read at a time, and about as many decompressed

_ZSTD_PIECE = 1 << 16

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_PARQUET = b"PAR1"
_UTF8_BOM = b"\xef\xbb\xbf"


def dataset_files(path: str | Sequence[str], base: Path) -> list[Path]:
    """The dataset's files, sorted and each once, from a file's name, a glob, or a list of them, relative to `base`.

    Raises DataError when a file is not there or a glob matches none.
    """
    found: set[Path] = set()
    for pattern in [path] if isinstance(path, str) else path:
        whole = base / pattern
        if whole.is_file():
            found.add(whole)
        elif glob.has_magic(pattern):
            names = glob.glob(pattern, root_dir=base, recursive=True)  # noqa: PTH207 (Path.glob takes hidden files too)
            matches = [match for name in names if (match := base / name).is_file()]
            if not matches:
                raise DataError(f"No file matches {whole} (dataset.path): correct the pattern, or put the files there.")
            found.update(matches)
        elif whole.is_dir():
            raise DataError(f"{whole} (dataset.path) is a folder: name its files, for example {pattern}/*.jsonl.")
        else:
            raise DataError(f"The dataset {whole} (dataset.path) does not exist: correct the path.")
    if not found:
        raise DataError("dataset.path names no file.")
    return sorted(found)


def dataset_digest(files: Iterable[Path], digest: Callable[[Path], str] = sha256_file) -> str:
    """One file's sha256; of several, sha256 hex over their sorted digests, a line each. Paths don't matter."""
    digests = sorted(map(digest, files))
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(f"{each}\n" for each in digests).encode()).hexdigest()


@dataclass(slots=True)
class ByteSource:
    """The decompressed bytes of one file as UTF-8, and what was found out about them on the way."""

    path: Path
    problem: str | None = None  # set when the chunks have ended before the file's content has
    cut_off: bool = False  # whether that problem is that the file is too short
    transcoded: bool = False  # offsets in the chunks are none of the file's
    surrogates: int = 0  # lone surrogates in UTF-16, become U+FFFD
    bom: int = 0  # bytes of a UTF-8 BOM, not in the chunks
    _raw: int = field(default=0)  # bytes of the file read so far

    def chunks(self) -> Iterator[bytes]:
        plain = self._decompressed()
        first = b""
        for chunk in plain:
            first += chunk
            if len(first) >= 4:
                break
        encoding = _utf16_or_32(first)
        if encoding is not None:
            self.transcoded = True
            yield from self._transcoded(_chain(first, plain), encoding)
            return
        if first.startswith(_UTF8_BOM):
            self.bom = len(_UTF8_BOM)
            first = first[self.bom :]
        yield from _chain(first, plain)

    def _file(self) -> Iterator[bytes]:
        with self.path.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                self._raw += len(chunk)
                yield chunk

    def _decompressed(self) -> Iterator[bytes]:
        raw = self._file()
        first = next(raw, b"")
        if first.startswith(_GZIP):
            return self._gunzipped(_chain(first, raw))
        if first.startswith(_ZSTD) or _skippable(first):
            return self._unzstd(_chain(first, raw))
        return _chain(first, raw)

    def _gunzipped(self, raw: Iterator[bytes]) -> Iterator[bytes]:
        decoder = zlib.decompressobj(wbits=31)
        for chunk in raw:
            rest = chunk
            while rest:
                if decoder.eof:
                    rest = rest.lstrip(b"\0")  # tape padding, as gzip itself allows
                    if not rest:
                        break
                    decoder = zlib.decompressobj(wbits=31)
                try:
                    plain = decoder.decompress(rest, 4 * CHUNK)
                except zlib.error as error:
                    # With what this call has decoded: where in it the damage begins can't be told.
                    self.problem = f"its gzip data are damaged before byte {self._raw:,} of the file ({error})"
                    return
                rest = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
                if plain:
                    yield plain
        if not decoder.eof:
            self.problem, self.cut_off = "its gzip data end too early", True

    def _unzstd(self, raw: Iterator[bytes]) -> Iterator[bytes]:
        # One frame a decoder: zstandard's stream_reader ends without an error where a frame is cut off.
        context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        decoder = context.decompressobj()
        fed = False
        for chunk in raw:
            rest = chunk
            while rest:
                if decoder.eof:
                    decoder, fed = context.decompressobj(), False
                # A piece at a time: there is no limit to what one call may return.
                piece, rest = rest[:_ZSTD_PIECE], rest[_ZSTD_PIECE:]
                try:
                    plain = decoder.decompress(piece)
                except zstandard.ZstdError as error:
                    self.problem = f"its zstd data are damaged before byte {self._raw:,} of the file ({error})"
                    return
                fed = True
                if decoder.eof:
                    rest = decoder.unused_data + rest
                if plain:
                    yield plain
        if fed and not decoder.eof:
            self.problem, self.cut_off = "its zstd data end too early", True

    def _transcoded(self, chunks: Iterator[bytes], encoding: str) -> Iterator[bytes]:
        decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
        for chunk in chunks:
            try:
                yield self._utf8(decoder.decode(chunk))
            except UnicodeDecodeError as error:
                self.problem = f"its {encoding} text is damaged before byte {self._raw:,} of the file ({error.reason})"
                return
        try:
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            self.problem, self.cut_off = f"it ends inside a {encoding} character", True

    def _utf8(self, text: str) -> bytes:
        try:
            return text.encode()
        except UnicodeEncodeError:
            lone = sum("\ud800" <= character <= "\udfff" for character in text)
            self.surrogates += lone
            return text.translate(_SURROGATES).encode()


_SURROGATES = dict.fromkeys(range(0xD800, 0xE000), "\ufffd")


def is_parquet(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(4) == _PARQUET


def line_of(path: Path, offset: int) -> int:
    """The line, from 1, of a byte in the decompressed file. Reads the file up to there: for an error's message."""
    source = ByteSource(path)
    line, seen = 1, 0
    for chunk in source.chunks():
        if seen == 0:
            seen = source.bom
        line += chunk[: max(0, offset - seen)].count(b"\n")
        seen += len(chunk)
        if seen >= offset:
            break
    return line


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    if first:
        yield first
    yield from rest


def _skippable(first: bytes) -> bool:
    """A zstd stream may begin with a skippable frame: 0x184D2A5? in little-endian."""
    return len(first) >= 4 and first[1:4] == b"\x2a\x4d\x18" and first[0] & 0xF0 == 0x50


def _utf16_or_32(first: bytes) -> str | None:
    """By its BOM, or, without one, by the zero bytes beside the first ASCII character."""
    if first[:4] in (b"\xff\xfe\0\0", b"\0\0\xfe\xff"):
        return "utf-32"
    if first[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    if len(first) >= 4:
        zeros = (first[0] == 0, first[1] == 0, first[2] == 0, first[3] == 0)
        return {
            (False, True, False, True): "utf-16-le",
            (True, False, True, False): "utf-16-be",
            (False, True, True, True): "utf-32-le",
            (True, True, True, False): "utf-32-be",
        }.get(zeros)
    return None
