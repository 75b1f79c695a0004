"""A generate job's view of the index: the answer that an older build has for a prompt, if it may be taken over.

A conversation's own turn comes first: it gets the answer that it had. Another conversation that asks the very same (its
content was edited elsewhere, or it shares a first turn) gets one that no other such row of this build has taken, so
that an answer stands in at most two rows: that of the conversation it was made for, and one more. The takers are kept
in run/reuse/claims.sqlite; to lose them does no harm.
"""

from __future__ import annotations

import functools
import logging
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.errors import DataError, ShardmillError
from shardmill.files import sha256_file
from shardmill.paths import BuildPaths
from shardmill.reuse.index import UNREADABLE, open_index, owner_key, prompt_key
from shardmill.reuse.prepare import prepare_index
from shardmill.schemas import COMPLETIONS
from shardmill.settings import Settings
from shardmill.store.discarded import is_discarded

_log = logging.getLogger(__name__)

# By conversation_id, turn and prompt_id: a row, and the name of the build that it lies in.
Find = Callable[[str, int, str], tuple[Mapping[str, Any], str] | None]

# Neither the prompt's ids nor the text: the one is the asker's own, the other follows from the output's ids.
_COLUMNS = [name for name in COMPLETIONS.names if name not in ("prompt_ids", "text")]
# Row groups kept: 1,024 rows each, some 7 MB at 1,800 ids a row. Both builds' rows are in the order of conversations.
_KEPT_GROUPS = 8
_WAIT_S = 60.0


@contextmanager
def open_lookup(settings: Settings, build: BuildPaths, shard: str) -> Iterator[Find]:
    """For one generate job: finds nothing for a shard that was discarded, which is to be made anew.

    Raises StoreError when the store can't be listed, ShardmillError for a broken index.
    """
    path = None if is_discarded(settings, build, shard) else prepare_index(settings, build)
    if path is None:
        yield _nothing
        return
    try:
        with closing(open_index(path)) as index, closing(_open_claims(build)) as claims:
            yield Lookup(index, claims)
    except sqlite3.Error as error:
        raise ShardmillError(
            f"The index of older builds' rows in {build.reuse} can't be used ({error}): delete that folder, which "
            f"holds nothing else, and run again."
        ) from error


@dataclass(frozen=True, slots=True)
class _File:
    build: str
    path: Path
    sha256: str


@dataclass(frozen=True, slots=True)
class _Place:
    answer: int
    file: int
    row_group: int
    row: int


class Lookup:
    """Answers of older builds that are right under this one's settings, for one job."""

    def __init__(self, index: sqlite3.Connection, claims: sqlite3.Connection) -> None:
        self._index = index
        self._claims = claims
        self._files = {row[0]: _File(row[1], Path(row[2]), row[3]) for row in index.execute("SELECT * FROM files")}
        self._sound: set[int] = set()
        self._bad: set[int] = set()
        self._group = functools.lru_cache(_KEPT_GROUPS)(self._read_group)

    def __call__(self, conversation_id: str, turn: int, prompt_id: str) -> tuple[Mapping[str, Any], str] | None:
        """The row of completions that answers this turn, and the name of the build that it lies in.

        The row has all columns but `prompt_ids` and `text`. It counts as taken by this turn from now on; to ask again
        gives the same row.
        """
        for place in self._candidates(owner_key(conversation_id, turn), prompt_id):
            row = self._fetch(place)
            if row is not None and row["prompt_id"] == prompt_id:
                return row, self._files[place.file].build
        return None

    def _candidates(self, owner: int, prompt_id: str) -> Iterator[_Place]:
        prompt = prompt_key(prompt_id)
        found = self._index.execute(
            "SELECT owner = ?, answer, file, row_group, row FROM answers WHERE prompt = ? ORDER BY 1 DESC, file, rowid",
            (owner, prompt),
        ).fetchall()
        for own, *place in found:
            if own or self._claim(prompt, place[0], owner):
                yield _Place(*place)

    def _claim(self, prompt: bytes, answer: int, owner: int) -> bool:
        with self._claims:
            self._claims.execute("INSERT OR IGNORE INTO claims VALUES (?, ?, ?)", (prompt, answer, owner))
            (holder,) = self._claims.execute(
                "SELECT owner FROM claims WHERE prompt = ? AND answer = ?", (prompt, answer)
            ).fetchone()
        return bool(holder == owner)

    def _fetch(self, place: _Place) -> dict[str, Any] | None:
        if place.file in self._bad:
            return None
        try:
            row: dict[str, Any] = self._group(place.file, place.row_group).slice(place.row, 1).to_pylist()[0]
        except (*UNREADABLE, DataError, IndexError) as error:
            self._bad.add(place.file)
            _log.warning("Nothing more is reused of %s: %s", self._files[place.file].path, error)
            return None
        return row

    def _read_group(self, file: int, row_group: int) -> pa.Table:
        source = self._files[file]
        if file not in self._sound:
            if sha256_file(source.path) != source.sha256:
                raise DataError("its content is not what its manifest says")
            self._sound.add(file)
        with pq.ParquetFile(source.path) as parquet:
            return parquet.read_row_group(row_group, columns=_COLUMNS)


def _nothing(conversation_id: str, turn: int, prompt_id: str) -> None:
    return None


def _open_claims(build: BuildPaths) -> sqlite3.Connection:
    # isolation_level "IMMEDIATE": a claim takes the write lock at once, so that two jobs wait instead of colliding.
    claims = sqlite3.connect(build.reuse / "claims.sqlite", timeout=_WAIT_S, isolation_level="IMMEDIATE")
    claims.execute("PRAGMA synchronous = OFF")
    claims.execute(
        "CREATE TABLE IF NOT EXISTS claims (prompt BLOB, answer INTEGER, owner INTEGER, PRIMARY KEY (prompt, answer))"
    )
    return claims
