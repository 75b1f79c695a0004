"""Records out of a Parquet file, a batch of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardmill.errors import is_machines
from shardmill.reading.cursor import Lost
from shardmill.reading.reasons import RejectReason

_ROWS = 512


def parquet_records(path: Path) -> Iterator[Any | Lost]:
    """Each row as a dict; nested lists and structs as Python's own.

    What can't be read any more is one `Lost`, with which the file ends.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as parquet:
            for batch in parquet.iter_batches(batch_size=_ROWS):
                yield from _rows(batch)
    except (pa.ArrowException, OSError, ValueError, LookupError, OverflowError, MemoryError) as error:
        if is_machines(error):
            raise  # the file may be well, and the rest of its records must not be lost for that
        # Arrow passes on what Python's own decoding of damaged names and values raises.
        message = " ".join(str(error).split())
        yield Lost(RejectReason.DAMAGED_FILE, f"the Parquet file can't be read: {message}", "", -1)


def _rows(batch: Any) -> Iterator[Any | Lost]:
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass  # some row of the batch: one at a time, to find out which
    for index in range(batch.num_rows):
        try:
            yield batch.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield Lost(RejectReason.INVALID_UTF8, f"a text of the row is not UTF-8 ({error.reason})", "", -1)
