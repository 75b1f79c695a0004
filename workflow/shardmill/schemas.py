"""The Arrow schemas of every Parquet file in a build, and how they are read and written. One place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.errors import DamagedFile, is_machines
from shardmill.files import atomic_path

_IDS = pa.list_(pa.int32())


def _schema(*fields: pa.Field[Any]) -> pa.Schema:
    return pa.schema(list(fields))


PROMPTS = _schema(
    pa.field("prompt_id", pa.string()),  # null for a turn whose prompt depends on an answer not yet given
    pa.field("conversation_id", pa.string()),
    pa.field("source_id", pa.string()),
    pa.field("turn", pa.int16()),
    pa.field("prompt_ids", _IDS),  # null like prompt_id
    pa.field("prompt_tokens", pa.int32()),  # null like prompt_id
    pa.field("max_new_tokens", pa.int32()),  # capped to the room that the context leaves; null like prompt_id
    pa.field("messages", pa.string()),  # JSON: the messages that this turn adds before its answer
    pa.field("tools", pa.string()),  # JSON: tool declarations, or null
)

REJECTS = _schema(
    pa.field("source_file", pa.string()),
    pa.field("record", pa.int64()),  # 1-based in its file
    pa.field("byte_offset", pa.int64()),  # of the record's first byte in the decompressed file; null where unknown
    pa.field("source_id", pa.string()),
    pa.field("reason", pa.string()),  # one of reading.reasons.RejectReason
    pa.field("detail", pa.string()),
    pa.field("excerpt", pa.string()),
)

COMPLETIONS = _schema(
    pa.field("prompt_id", pa.string()),
    pa.field("conversation_id", pa.string()),
    pa.field("source_id", pa.string()),
    pa.field("turn", pa.int16()),
    pa.field("status", pa.string()),  # 'ok' | 'failed'
    pa.field("reason", pa.string()),  # null when ok
    pa.field("prompt_ids", _IDS),
    pa.field("output_ids", _IDS),
    pa.field("text", pa.string()),
    pa.field("finish_reason", pa.string()),  # 'stop' | 'length' | null
    pa.field("prompt_tokens", pa.int32()),
    pa.field("completion_tokens", pa.int32()),
    pa.field("accept_length", pa.float64()),
    pa.field("attempts", pa.int16()),
    pa.field("server", pa.string()),
    pa.field("latency_s", pa.float64()),
    pa.field("finished_at", pa.timestamp("ms", tz="UTC")),
    pa.field("reused_from", pa.string()),
)

TOKENS = _schema(
    pa.field("prompt_id", pa.string()),
    pa.field("conversation_id", pa.string()),
    pa.field("source_id", pa.string()),
    pa.field("turn", pa.int16()),
    pa.field("input_ids", _IDS),
    pa.field("loss_mask", pa.list_(pa.uint8())),
    pa.field("prompt_len", pa.int32()),
    pa.field("seq_len", pa.int32()),
    pa.field("finish_reason", pa.string()),
    pa.field("accept_length", pa.float64()),
    pa.field("reused_from", pa.string()),
)

# Small row groups keep a reader's memory low and stay far below 2^31 list elements.
_ROW_GROUP = 1024


# Where a file's footer keeps JSON of this program's own.
_NOTES_KEY = b"shardmill"


def write_table(
    path: Path, schema: pa.Schema, rows: Iterable[dict[str, Any]], notes: Mapping[str, Any] | None = None
) -> int:
    """Writes `rows` as Parquet (zstd) under `schema`, atomically; returns how many. No rows make a schema-true file.

    `notes` go into the footer as JSON: readers see the same columns with them and without.
    """
    count = 0
    if notes is not None:
        schema = schema.with_metadata({_NOTES_KEY: orjson.dumps(notes)})
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
    try:
        with pq.ParquetFile(path) as parquet:
            for batch in parquet.iter_batches(batch_size=_ROW_GROUP, columns=columns):
                yield from batch.to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, FileNotFoundError) or is_machines(error):
            raise
        raise DamagedFile(
            f"{path} can't be read as Parquet ({error}): `shardmill discard` takes its shard out."
        ) from None


def read_notes(path: Path) -> dict[str, Any] | None:
    """What write_table was given as `notes`, from the file's footer alone."""
    noted = (pq.read_metadata(path).metadata or {}).get(_NOTES_KEY)
    notes: dict[str, Any] | None = None if noted is None else orjson.loads(noted)
    return notes


def count_rows(path: Path) -> int:
    """From the file's footer alone."""
    with pq.ParquetFile(path) as parquet:
        return int(parquet.metadata.num_rows)
