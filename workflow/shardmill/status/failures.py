"""Why prompts have no answer: counts by reason, and up to three examples of each, found without a scan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardmill.generate.reasons import MEANING, FailReason
from shardmill.journal import finished_rows
from shardmill.paths import BuildPaths
from shardmill.status.model import Example, Failure
from shardmill.status.rows import ShardRows
from shardmill.status.shards import ShardNow, Stage

EXAMPLES = 3
_SHARDS_LOOKED_AT = 12  # for one reason
_EXCERPT = 120
_COLUMNS = ["conversation_id", "turn", "reason", "attempts", "server"]

# (shard, conversation, turn, reason, attempts, server)
_Found = tuple[str, str, int, str, int, str | None]


class ExampleCache:
    """Examples already found: they are of rows that don't change while their shard has that many failed rows."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[tuple[str, int], ...], list[Example]]] = {}

    def find(self, build: BuildPaths, reason: str, places: Sequence[tuple[ShardNow, int]]) -> list[Example]:
        """`places`: shards with rows that failed for this reason, and how many."""
        stamp = tuple((shard.name, rows) for shard, rows in places[:_SHARDS_LOOKED_AT])
        known = self._known.get(reason)
        if known is None or known[0] != stamp:
            known = (stamp, _find(build, reason, [shard for shard, _ in places[:_SHARDS_LOOKED_AT]]))
            self._known[reason] = known
        return known[1]


def failures(
    build: BuildPaths, shards: Sequence[ShardNow], done: Mapping[str, ShardRows], examples: ExampleCache
) -> tuple[Failure, ...]:
    """Most frequent reason first."""
    places: dict[str, list[tuple[ShardNow, int]]] = {}
    for shard in shards:
        for reason, rows in failed_of(shard, done).items():
            if rows:
                places.setdefault(reason, []).append((shard, rows))
    totals = Counter({reason: sum(rows for _, rows in where) for reason, where in places.items()})
    return tuple(
        Failure(reason, meaning(reason), rows, tuple(examples.find(build, reason, places[reason])))
        for reason, rows in totals.most_common()
    )


def failed_of(shard: ShardNow, done: Mapping[str, ShardRows]) -> dict[str, int]:
    """Failed rows of a shard by reason: of its completions, or of its job's own count where there are none yet."""
    if shard.name in done:
        return done[shard.name].failed
    if shard.progress is not None and shard.stage in (Stage.GENERATING, Stage.BEGUN):
        return dict(shard.progress["failed"])
    return {}


def meaning(reason: str) -> str:
    try:
        return MEANING[FailReason(reason)]
    except ValueError:
        return "a reason of another version of shardmill"


def _find(build: BuildPaths, reason: str, shards: Sequence[ShardNow]) -> list[Example]:
    found: list[Example] = []
    for shard in shards:
        rows = [row for row in _failed_rows(build, shard) if row[3] == reason][: EXAMPLES - len(found)]
        prompts = _prompts(build, shard.name, {(row[1], row[2]) for row in rows})
        found += [Example(row[0], row[1], row[2], row[4], row[5], prompts.get((row[1], row[2]))) for row in rows]
        if len(found) == EXAMPLES:
            break
    return found


def _failed_rows(build: BuildPaths, shard: ShardNow) -> Iterator[_Found]:
    path = build.completions(shard.name)
    rows: Iterator[dict[str, Any]]
    if path.exists():
        failed = pq.read_table(path, columns=_COLUMNS, filters=pc.field("status") == "failed")
        rows = iter(failed.to_pylist())
    else:
        rows = (row for row in finished_rows(build.journal(shard.name)) if row["reason"] is not None)
    for row in rows:
        yield shard.name, row["conversation_id"], row["turn"], row["reason"], row["attempts"], row["server"]


def _prompts(build: BuildPaths, shard: str, keys: set[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """The beginning of the last message of each; nothing where the prompts are not here (a restored shard)."""
    path = build.prompts(shard)
    if not keys or not path.exists():
        return {}
    wanted = pc.field("conversation_id").isin(pa.array([conversation for conversation, _ in keys]))
    rows = pq.read_table(path, columns=["conversation_id", "turn", "messages"], filters=wanted).to_pylist()
    return {
        (row["conversation_id"], row["turn"]): _excerpt(row["messages"])
        for row in rows
        if (row["conversation_id"], row["turn"]) in keys
    }


def _excerpt(messages: str) -> str:
    content = orjson.loads(messages)[-1]["content"]
    text = " ".join((content if isinstance(content, str) else orjson.dumps(content).decode()).split())
    return text if len(text) <= _EXCERPT else text[: _EXCERPT - 1] + "…"
