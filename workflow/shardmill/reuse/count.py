"""How many prompts of a plan have an answer in older builds already."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from shardmill.paths import BuildPaths
from shardmill.reuse.index import OldFile, owner_key, prompt_key, write_index
from shardmill.reuse.limits import Limits
from shardmill.reuse.prepare import downloaded, index_key, index_path, known_index, old_file
from shardmill.reuse.sources import find_sources
from shardmill.schemas import read_rows
from shardmill.settings import Settings
from shardmill.store.discarded import discarded_among

_COUNT = """
    WITH others AS (
        SELECT prompt, count(*) AS wanted FROM prompts AS p
        WHERE NOT EXISTS (SELECT 1 FROM old.answers AS a WHERE a.prompt = p.prompt AND a.owner = p.owner)
        GROUP BY prompt
    ), taken AS (
        SELECT min(wanted, (SELECT count(DISTINCT answer) FROM old.answers AS a WHERE a.prompt = others.prompt)) AS rows
        FROM others
    )
    SELECT (SELECT count(*) FROM prompts) - (SELECT coalesce(sum(wanted), 0) FROM others)
        + (SELECT coalesce(sum(rows), 0) FROM taken)
"""


def count_reusable(
    settings: Settings, build: BuildPaths, identity: Mapping[str, Any], shards: Sequence[str]
) -> int | None:
    """Prompts of `shards` that need not be asked, among those whose ids are known; later turns only show as they come.

    None where nothing can tell it yet: the prompts are not made, or rows that may do are in the store alone. Reads,
    and changes nothing. Raises StoreError when the store can't be listed.
    """
    if not all(build.prompts(shard).exists() for shard in shards):
        return None
    again = discarded_among(settings, build, shards) if shards else set()
    prompts = [build.prompts(shard) for shard in shards if shard not in again]
    if not prompts:
        return 0
    files: list[OldFile] = []
    for source in find_sources(settings, build, identity, shards):
        path = source.path or downloaded(build, source)
        if path is None:
            return None
        files.append(old_file(source, path))
    limits = Limits.of(identity)
    known = known_index(build)
    if not files:
        return 0
    if known is not None and known.key == index_key(limits, files):
        return _count(index_path(build), prompts) if known.rows else 0
    with tempfile.TemporaryDirectory(prefix="shardmill-plan-") as scratch:
        path = Path(scratch) / "index.sqlite"
        return _count(path, prompts) if write_index(path, files, limits) else 0


def _count(index: Path, prompts: Sequence[Path]) -> int:
    # An unnamed main database lies in a temporary file of SQLite's own, and not in memory.
    with closing(sqlite3.connect("", uri=True)) as database:
        database.execute("ATTACH ? AS old", (f"{index.absolute().as_uri()}?immutable=1",))
        database.execute("CREATE TABLE prompts (prompt BLOB, owner INTEGER)")
        database.executemany("INSERT INTO prompts VALUES (?, ?)", _known_prompts(prompts))
        (count,) = database.execute(_COUNT).fetchone()
    return int(count)


def _known_prompts(prompts: Sequence[Path]) -> Iterator[tuple[bytes, int]]:
    for path in prompts:
        for row in read_rows(path, ["prompt_id", "conversation_id", "turn"]):
            if row["prompt_id"] is not None:
                yield prompt_key(row["prompt_id"]), owner_key(row["conversation_id"], row["turn"])
