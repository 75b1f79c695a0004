"""The journal of a shard: finished rows in an append-only file, so that no kill and no power cut loses them.

A record is `<crc32 of the JSON, 8 hex> <length of the JSON, decimal> <JSON>\\n`. The checksum finds a flipped byte, the
length keeps the next record readable when the flipped byte is the newline. A record that is wrong anywhere is skipped
and counted; its prompt is done again. A torn tail is cut off before anything is appended.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from shardmill.errors import NO_SPACE, ShardmillError
from shardmill.files import sync

_HEAD = re.compile(rb"([0-9a-f]{8}) ([0-9]{1,10}) ")
_LONGEST_HEAD = 32


@dataclass(frozen=True, slots=True)
class Damage:
    """What reading the journal found wrong."""

    torn: int  # bytes of an unfinished last record
    bad: int  # records, or pieces between records, that fail their checksum
    first_bad: int | None  # byte offset of the first of them


class Journal:
    """One shard's journal, held under its own lock: a context manager, made by `open_journal`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._dirty = False
        self.damage = Damage(0, 0, None)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.sync()
        finally:
            os.close(self._descriptor)  # which also frees the lock

    def replay(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(byte offset, record) of every sound record, oldest first. Then `damage` is known, and a torn tail gone."""
        self.damage = Damage(0, 0, None)
        for offset, record, after in _records(self._descriptor, self._size):
            if record is None:
                self._note_damage(offset, after)
            else:
                yield offset, record
        if self.damage.torn:
            self._size -= self.damage.torn
            os.ftruncate(self._descriptor, self._size)
            self._dirty = True

    def append(self, record: dict[str, Any]) -> int:
        """Writes one record out to the operating system, and returns its byte offset. `sync` brings it to the disk."""
        body = orjson.dumps(record)
        line = b"%08x %d %b\n" % (zlib.crc32(body), len(body), body)
        offset = self._size
        try:
            _write_all(self._descriptor, line, offset)
        except OSError as error:
            os.ftruncate(self._descriptor, offset)  # half a record is of no use, and shrinking needs no space
            raise self._full(error) from error
        self._size += len(line)
        self._dirty = True
        return offset

    def read(self, offset: int) -> dict[str, Any]:
        """The record at an offset that `replay` or `append` gave."""
        head = os.pread(self._descriptor, _LONGEST_HEAD, offset)
        match = _HEAD.match(head)
        body = b"" if match is None else os.pread(self._descriptor, int(match[2]), offset + match.end())
        if match is None or zlib.crc32(body) != int(match[1], 16):
            raise ShardmillError(
                f"The journal {self.path} changed at byte {offset} while it was in use: check the disk, and run again."
            )
        record: dict[str, Any] = orjson.loads(body)
        return record

    def sync(self) -> None:
        """To the disk (fsync). May run in another thread than `append`."""
        if not self._dirty:
            return
        self._dirty = False
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._dirty = True
            raise self._full(error) from error

    def _note_damage(self, offset: int, after: int) -> None:
        seen = self.damage
        if after >= self._size:
            self.damage = Damage(self._size - offset, seen.bad, seen.first_bad)
        else:
            self.damage = Damage(seen.torn, seen.bad + 1, offset if seen.first_bad is None else seen.first_bad)

    def _full(self, error: OSError) -> ShardmillError:
        if error.errno in NO_SPACE:
            return ShardmillError(
                f"No space is left for the journal {self.path}. The rows in it are safe: free some, and run again."
            )
        return ShardmillError(f"The journal {self.path} cannot be written ({error.strerror}); its rows are kept.")


def open_journal(path: Path, wait_s: float = 60.0) -> Journal:
    """Opens or makes the journal and takes its lock.

    Another job may hold it for a while: one that outlives its killed Snakemake leaves when it sees that. Raises
    ShardmillError when the lock isn't free after `wait_s`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    while True:
        descriptor = _try_lock(path)
        if descriptor is not None:
            sync(path.parent)
            return Journal(path, descriptor)
        if time.monotonic() > deadline:
            raise ShardmillError(
                f"Another job is writing the journal {path}: wait for it to end, or stop it, and run again."
            )
        time.sleep(0.1)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Every sound record of a journal that another process may be writing. None where there is no journal."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        size = os.fstat(descriptor).st_size
        yield from (record for _, record, _ in _records(descriptor, size) if record is not None)
    finally:
        os.close(descriptor)


def finished_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows among them, without notes and what else generate/rows.py writes."""
    return (entry for entry in read_records(path) if "prompt_id" in entry)


def _try_lock(path: Path) -> int | None:
    """A locked descriptor of the file that is at `path` now, or None."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ShardmillError(f"The journal {path} cannot be opened: {error.strerror}.") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass  # held, or deleted by who held it: try again
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _records(descriptor: int, size: int) -> Iterator[tuple[int, dict[str, Any] | None, int]]:
    """(start, record, end) of each record, in order; (start, None, end) of each piece that is none."""
    if size == 0:
        return
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as content:
        position = 0
        while position < size:
            body = _body_at(content, position, size)
            if body is not None:
                start, end = body
                # The newline's own byte isn't looked at: where it was flipped, both its neighbours are sound.
                yield position, orjson.loads(content[start:end]), end + 1
                position = end + 1
                continue
            newline = content.find(b"\n", position)
            after = size if newline < 0 else newline + 1
            yield position, None, after
            position = after


def _body_at(content: mmap.mmap, position: int, size: int) -> tuple[int, int] | None:
    """Where the JSON of a sound record that begins at `position` lies."""
    head = _HEAD.match(content, position)
    if head is None:
        return None
    start, end = head.end(), head.end() + int(head[2])
    if end >= size or zlib.crc32(content[start:end]) != int(head[1], 16):
        return None
    return start, end


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written
