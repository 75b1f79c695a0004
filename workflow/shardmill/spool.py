"""Rows that arrive in any order, kept on disk until each shard's can be read back sorted. Memory stays flat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_BUCKETS = 64
_BATCH = 64  # rows that wait for each file: ids are ten times larger in Python than in Arrow


class ShardSpool:
    """Rows by shard index, in at most 64 Arrow IPC files under `folder`: one bucket is in memory at a time."""

    def __init__(self, folder: Path, schema: pa.Schema, shards: int) -> None:
        self._shards = shards
        self._buckets = min(shards, _BUCKETS)
        self._schema = schema.append(pa.field("shard", pa.int32()))
        self._paths = [folder / f"bucket-{bucket:02d}.arrow" for bucket in range(self._buckets)]
        self._writers = [pa.ipc.new_stream(str(path), self._schema) for path in self._paths]
        self._waiting: list[list[dict[str, Any]]] = [[] for _ in self._paths]

    def __enter__(self) -> ShardSpool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._writers:
            writer.close()

    def add(self, shard: int, rows: Sequence[dict[str, Any]]) -> None:
        bucket = self._bucket(shard)
        waiting = self._waiting[bucket]
        waiting.extend({**row, "shard": shard} for row in rows)
        if len(waiting) >= _BATCH:
            self._flush(bucket)

    def shards(self, wanted: Sequence[int]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Each wanted shard (ascending) with its rows, ordered by conversation_id and turn. Ends the writing."""
        for bucket, writer in enumerate(self._writers):
            self._flush(bucket)
            writer.close()
        current, table = -1, pa.table({})
        for shard in wanted:
            if self._bucket(shard) != current:
                current = self._bucket(shard)
                with pa.memory_map(str(self._paths[current])) as source, pa.ipc.open_stream(source) as stream:
                    table = stream.read_all()
            rows = table.filter(pc.field("shard") == shard).drop_columns(["shard"]).to_pylist()
            rows.sort(key=lambda row: (row["conversation_id"], row["turn"]))
            yield shard, rows

    def _bucket(self, shard: int) -> int:
        return shard * self._buckets // self._shards

    def _flush(self, bucket: int) -> None:
        if self._waiting[bucket]:
            self._writers[bucket].write_table(pa.Table.from_pylist(self._waiting[bucket], schema=self._schema))
            self._waiting[bucket].clear()
