"""The Arrow schemas of every Parquet file in a build, and how they are read and written. One place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.files import atomic_path

_IDS = pa.list_(pa.int32())

PROMPTS = pa.schema(
    [
        ("prompt_id", pa.string()),  # null for a turn whose prompt depends on an answer not yet given
        ("conversation_id", pa.string()),
        ("source_id", pa.string()),
        ("turn", pa.int16()),
        ("prompt_ids", _IDS),  # null like prompt_id
        ("prompt_tokens", pa.int32()),  # null like prompt_id
        ("max_new_tokens", pa.int32()),  # capped to the room that the context leaves; null like prompt_id
        ("messages", pa.string()),  # JSON: the messages that this turn adds before its answer
        ("tools", pa.string()),  # JSON: tool declarations, or null
    ]
)

REJECTS = pa.schema(
    [
        ("source_file", pa.string()),
        ("record", pa.int64()),  # 1-based in its file
        ("byte_offset", pa.int64()),  # of the record's first byte in the decompressed file; null where unknown
        ("source_id", pa.string()),
        ("reason", pa.string()),  # one of reading.reasons.RejectReason
        ("detail", pa.string()),
        ("excerpt", pa.string()),
    ]
)

COMPLETIONS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("conversation_id", pa.string()),
        ("source_id", pa.string()),
        ("turn", pa.int16()),
        ("status", pa.string()),  # 'ok' | 'failed'
        ("reason", pa.string()),  # null when ok
        ("prompt_ids", _IDS),
        ("output_ids", _IDS),
        ("text", pa.string()),
        ("finish_reason", pa.string()),  # 'stop' | 'length' | null
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("accept_length", pa.float64()),
        ("attempts", pa.int16()),
        ("server", pa.string()),
        ("latency_s", pa.float64()),
        ("finished_at", pa.timestamp("ms", tz="UTC")),
        ("reused_from", pa.string()),
    ]
)

TOKENS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("conversation_id", pa.string()),
        ("source_id", pa.string()),
        ("turn", pa.int16()),
        ("input_ids", _IDS),
        ("loss_mask", pa.list_(pa.uint8())),
        ("prompt_len", pa.int32()),
        ("seq_len", pa.int32()),
        ("finish_reason", pa.string()),
        ("accept_length", pa.float64()),
        ("reused_from", pa.string()),
    ]
)

# Small row groups keep a reader's memory low and stay far below 2^31 list elements.
_ROW_GROUP = 1024


def write_table(path: Path, schema: pa.Schema, rows: Iterable[dict[str, Any]]) -> int:
    """Writes `rows` as Parquet (zstd) under `schema`, atomically; returns how many. No rows make a schema-true file."""
    count = 0
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        batch: list[dict[str, Any]] = []
        for row in rows:
            batch.append(row)
            if len(batch) == _ROW_GROUP:
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                count += len(batch)
                batch.clear()
        if batch or count == 0:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def read_rows(path: Path, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of one Parquet file as dicts, a row group at a time."""
    with pq.ParquetFile(path) as parquet:
        for batch in parquet.iter_batches(batch_size=_ROW_GROUP, columns=columns):
            yield from batch.to_pylist()


def count_rows(path: Path) -> int:
    """From the file's footer alone."""
    with pq.ParquetFile(path) as parquet:
        return int(parquet.metadata.num_rows)
