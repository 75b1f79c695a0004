"""The index of rows that are still right: prompt_id to file and row, in one SQLite file that is written once.

Only narrow columns are read for it, a row group at a time; what is kept is some 80 bytes a row, sorted on disk. Ids are
cut to 16 and 8 bytes, which no other id of any build will ever share; whoever fetches a row compares its full id.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.files import atomic_path
from shardmill.reuse.limits import Limits, still_right
from shardmill.schemas import COMPLETIONS

_log = logging.getLogger(__name__)

# Raised when the tables change: it is part of what an index is known by.
FORMAT = 1

_COLUMNS = (
    "prompt_id",
    "conversation_id",
    "turn",
    "status",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "finished_at",
    "reused_from",
)
_NARROW = pa.schema([COMPLETIONS.field(name) for name in _COLUMNS])

_TABLES = """
    CREATE TABLE files (file INTEGER PRIMARY KEY, build TEXT, path TEXT, sha256 TEXT);
    CREATE TABLE answers (prompt BLOB, owner INTEGER, answer INTEGER, file INTEGER, row_group INTEGER, row INTEGER);
"""

# What a Parquet file raises that is torn, or of another program.
UNREADABLE = (pa.ArrowException, OSError, KeyError, ValueError)


@dataclass(frozen=True, slots=True)
class OldFile:
    """Completions of an older build, on this machine."""

    build: str
    limits: Limits
    path: Path
    sha256: str


def prompt_key(prompt_id: str) -> bytes:
    return bytes.fromhex(prompt_id)[:16]


def owner_key(conversation_id: str, turn: int) -> int:
    """A conversation's turn, as a signed 64-bit integer."""
    return _hash(f"{conversation_id}\0{turn}")


def answer_key(prompt_id: str, maker: str, finished_ms: int) -> int:
    """One answer, whichever builds it was taken over by: the build that made it, and when it was finished."""
    return _hash(f"{prompt_id}\0{maker}\0{finished_ms}")


def write_index(path: Path, files: Iterable[OldFile], limits: Limits) -> int:
    """Indexes the rows of `files` that are still right under `limits`; returns how many. A bad file is left out."""
    with atomic_path(path) as temporary, closing(sqlite3.connect(temporary)) as database:
        # The file counts only once it is renamed, whole.
        database.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;" + _TABLES)
        for number, file in enumerate(files):
            try:
                rows = list(_rows(number, file, limits))
            except UNREADABLE as error:
                _log.warning("Nothing is reused of %s: it can't be read (%s).", file.path, error)
                continue
            if rows:
                database.execute(
                    "INSERT INTO files VALUES (?, ?, ?, ?)", (number, file.build, str(file.path), file.sha256)
                )
                database.executemany("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?)", rows)
        database.execute("CREATE INDEX by_prompt ON answers (prompt)")
        database.commit()
        (count,) = database.execute("SELECT count(*) FROM answers").fetchone()
    return int(count)


def open_index(path: Path) -> sqlite3.Connection:
    """For reading, by any number of jobs at once, without locks: nobody writes to it any more."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)


def _rows(number: int, file: OldFile, limits: Limits) -> Iterator[tuple[bytes, int, int, int, int, int]]:
    with pq.ParquetFile(file.path) as parquet:
        for group in range(parquet.num_row_groups):
            table = parquet.read_row_group(group, columns=list(_COLUMNS)).select(list(_COLUMNS)).cast(_NARROW)
            table = table.set_column(7, "finished_ms", table.column("finished_at").cast(pa.int64()))
            columns = [column.to_pylist() for column in table.columns]
            for row, values in enumerate(zip(*columns, strict=True)):
                prompt, conversation, turn, status, finish, prompt_tokens, tokens, finished_ms, made_by = values
                if status == "ok" and still_right(file.limits, limits, prompt_tokens, tokens, finish):
                    answer = answer_key(prompt, made_by or file.build, finished_ms)
                    yield prompt_key(prompt), owner_key(conversation, turn), answer, number, group, row


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
