"""What of a build can be exported, and its rows, a few at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.errors import DataError
from shardmill.facts import build_facts
from shardmill.files import read_json, sha256_file
from shardmill.paths import BuildPaths, shard_names
from shardmill.schemas import TOKENS
from shardmill.store.manifest import manifest_matches, read_manifest, refuse_renamed

_COLUMNS = ["conversation_id", "source_id", "turn", "input_ids", "loss_mask"]
# 256 rows of 32 K tokens are 40 MB.
_BATCH = 256
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One training row. `loss_mask` holds 0 and 1 and is as long as `input_ids`, which is never empty."""

    conversation_id: str
    source_id: str
    turn: int
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Source:
    """`finished`: the shards with a manifest whose files are here. `lacking`: why the build is not whole, in words."""

    build: BuildPaths
    finished: tuple[str, ...]
    lacking: tuple[str, ...]
    vocabulary: int


def open_source(build: BuildPaths, shards: int) -> Source:
    """Looks at `build`, which has `shards` shards.

    Raises DataError when nothing tells its model's vocabulary, or the folder was renamed.
    """
    refuse_renamed(build)
    facts = build_facts(build)
    if not facts.get("model"):
        raise DataError(f"{build.build_json} doesn't name the model's vocabulary: run the prompts step first.")
    names = shard_names(shards)
    finished = tuple(shard for shard in names if manifest_matches(build, shard))
    missing = sorted(set(names) - set(finished))
    return Source(build, finished, tuple(_lacking(build, names, missing)), int(facts["model"]["vocab_size"]))


def _lacking(build: BuildPaths, names: Sequence[str], missing: Sequence[str]) -> Iterator[str]:
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        yield f"{len(missing)} of {len(names)} shards are not finished here ({', '.join(missing[:_NAMED])}{more})"
    if not build.quality_report.exists():
        yield "its quality checks have not run"
        return
    report = read_json(build.quality_report)
    if not report["passed"]:
        failed = [check["name"] for check in report["checks"] if not check["passed"]]
        yield f"it did not pass its quality checks ({', '.join(failed) or 'accounting'})"


def read_shard(source: Source, shard: str) -> Iterator[Row]:
    """The rows of a finished shard, in file order, with a few MB of them in memory.

    Raises DataError when the file is not the one that the manifest names, or a row is not a training row.
    """
    path = source.build.tokens(shard)
    entry = next(item for item in read_manifest(source.build, shard).objects if item.kind == "tokens")
    if sha256_file(path) != entry.sha256:
        raise DataError(f"{path} is not the file that its manifest names: `shardmill verify` says what else is wrong.")
    number = 0
    with pq.ParquetFile(path) as parquet:
        wrong = [name for name in _COLUMNS if not _is_as_planned(parquet.schema_arrow, name)]
        if wrong:
            raise DataError(f"{path} has no column {wrong[0]} of the type that training rows have.")
        for batch in parquet.iter_batches(batch_size=_BATCH, columns=_COLUMNS):
            for row in _rows(batch):
                number += 1
                fault = _fault(row, source.vocabulary)
                if fault is not None:
                    raise DataError(
                        f"{path}, row {number}: {fault}. `shardmill discard` takes the shard out, to be made again."
                    )
                yield row


def _rows(batch: pa.RecordBatch) -> Iterator[Row]:
    columns = {name: batch.column(name) for name in _COLUMNS}
    keys = zip(*(columns[name].to_pylist() for name in _COLUMNS[:3]), strict=True)
    lists = zip(_lists(columns["input_ids"]), _lists(columns["loss_mask"]), strict=True)
    for (conversation, source, turn), (input_ids, loss_mask) in zip(keys, lists, strict=True):
        yield Row(conversation, source, turn, input_ids, loss_mask)


def _lists(column: pa.Array[Any]) -> Iterator[npt.NDArray[Any]]:
    """Views into the column's values; a null list is an empty one, which no training row may have."""
    lists = cast("pa.ListArray[Any]", column)
    offsets, values = lists.offsets.to_numpy(), lists.values.to_numpy(zero_copy_only=False)
    for start, end in itertools.pairwise(offsets):
        yield values[start:end]


def _is_as_planned(schema: pa.Schema, name: str) -> bool:
    return name in schema.names and bool(schema.field(name).type == TOKENS.field(name).type)


def _fault(row: Row, vocabulary: int) -> str | None:
    if len(row.input_ids) == 0:
        return "it has no ids"
    if len(row.input_ids) != len(row.loss_mask):
        return f"it has {len(row.input_ids)} ids and a loss mask of {len(row.loss_mask)}"
    if row.input_ids.dtype != np.int32 or row.loss_mask.dtype != np.uint8:
        # pyarrow makes floats of a column's values when one of them is null.
        return "it, or a row soon after it, has a null among its ids or in its loss mask"
    if row.input_ids.min() < 0 or row.input_ids.max() >= vocabulary:
        return f"it has an id outside the vocabulary of {vocabulary}"
    if row.loss_mask.max() > 1:
        return "its loss mask holds something else than 0 and 1"
    return None
