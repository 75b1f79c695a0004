"""Doing parts of a finished build again: failed rows (`retry`) and whole shards (`discard`). The next run makes them.

Both are for the holder of the build's lock. A shard leaves the store before it leaves the disk, and its rows are in the
journal before the files that hold them go: a kill at any moment loses none, and the same command goes on from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardmill.effort import read_efforts
from shardmill.files import atomic_path, read_json, write_json
from shardmill.generate.prompts import Key
from shardmill.generate.rows import effort_record, record_key, record_of
from shardmill.journal import finished_rows, open_journal, read_records
from shardmill.paths import BuildPaths, shard_names
from shardmill.schemas import read_rows
from shardmill.settings import Settings
from shardmill.store.discarded import mark_discarded
from shardmill.store.publish import unpublish_shard


@dataclass(frozen=True, slots=True)
class Failed:
    """Failed rows of one shard by reason. `finished`: they are in its completions, else in the journal of a stop."""

    shard: str
    rows: dict[str, int]
    finished: bool


def find_failed(settings: Settings, build: BuildPaths, reasons: Collection[str]) -> list[Failed]:
    """Shards here with rows that failed for one of `reasons`."""
    found = []
    for shard in shard_names(settings.prompts.shards):
        finished = build.completions(shard).exists()
        rows = Counter(_completed(build, shard, reasons) if finished else _journalled(build, shard, reasons))
        if rows:
            found.append(Failed(shard, dict(rows), finished))
    return found


def forget_failed(settings: Settings, build: BuildPaths, failed: Failed) -> None:
    """Takes the failed rows out: all other rows of the shard go back into its journal, and its files go.

    Raises StoreError when the store refuses to take the shard back; everything is as it was then.
    """
    shard, reasons = failed.shard, failed.rows.keys()
    if failed.finished:
        _write_journal(build, shard, _kept(build.completions(shard), reasons))
        # Another machine may hold the shard whole, and must not publish it again.
        mark_discarded(settings, build, shard)
        unpublish_shard(settings, build, shard)
        build.tokens(shard).unlink(missing_ok=True)
        build.completions(shard).unlink()
    else:
        # With what counted against these prompts: a note before their row.
        again = {record_key(row) for row in finished_rows(build.journal(shard)) if row["reason"] in reasons}
        _write_journal(build, shard, _left(build.journal(shard), again))
    _correct_progress(build, failed)


def discard_shard(settings: Settings, build: BuildPaths, shard: str) -> list[str]:
    """Takes out everything that was made of a shard's prompts, in the store and here; returns what went from here.

    It is made anew by servers: what an older build has for these prompts is not taken, since it may be what was bad.
    Raises StoreError when the store refuses; nothing has gone from here then.
    """
    files = (build.manifest(shard), build.tokens(shard), build.completions(shard), build.journal(shard))
    there = [path for path in (*files, build.progress(shard)) if path.exists()]
    mark_discarded(settings, build, shard)
    unpublish_shard(settings, build, shard)
    for path in there:
        path.unlink(missing_ok=True)
    return [str(path.relative_to(build.root)) for path in there]


def _completed(build: BuildPaths, shard: str, reasons: Collection[str]) -> Iterator[str]:
    table = pq.read_table(build.completions(shard), columns=["reason"], filters=pc.field("status") == "failed")
    yield from (str(reason) for reason in table.column("reason").to_pylist() if reason in reasons)


def _journalled(build: BuildPaths, shard: str, reasons: Collection[str]) -> Iterator[str]:
    seen = set()
    for row in finished_rows(build.journal(shard)):
        if row["reason"] in reasons and record_key(row) not in seen:
            seen.add(record_key(row))
            yield row["reason"]


def _kept(completions: Path, reasons: Collection[str]) -> Iterator[dict[str, Any]]:
    """Journal entries for the file's rows that failed for none of `reasons`, and for what all of them took."""
    effort = read_efforts([completions]).get(completions.stem)
    if effort is not None:
        yield effort_record(effort)
    yield from (record_of(row) for row in read_rows(completions) if row["reason"] not in reasons)


def _left(journal: Path, again: Collection[Key]) -> Iterator[dict[str, Any]]:
    """Its entries without the rows of these prompts, and without the notes about them."""
    return (entry for entry in read_records(journal) if "effort" in entry or record_key(entry) not in again)


def _write_journal(build: BuildPaths, shard: str, records: Iterable[dict[str, Any]]) -> None:
    with atomic_path(build.journal(shard)) as temporary, open_journal(temporary) as journal:
        for record in records:
            journal.append(record)


def _correct_progress(build: BuildPaths, failed: Failed) -> None:
    """What `status` shows until the shard's next job counts for itself."""
    path = build.progress(failed.shard)
    try:
        progress = read_json(path)
    except (FileNotFoundError, ValueError):
        return
    left = Counter(progress["failed"])
    left.subtract(failed.rows)
    rows = sum(failed.rows.values())
    progress |= {"state": "stopped", "failed": dict(+left), "done": progress["done"] - rows, "not_reached": 0}
    write_json(path, progress)
