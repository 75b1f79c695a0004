"""A folder as `datasets.Dataset.save_to_disk` leaves it, with the columns that speculators' trainer reads.

Arrow IPC streams, `dataset_info.json` and `state.json`, as of datasets 4 and 5, which speculators 0.9.0 asks for; the
columns and the torch format are those of its `prepare_data.py`. Written with pyarrow alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from shardmill.export.source import Row
from shardmill.export.token_freq import TokenCounts, write_token_freq
from shardmill.files import sha256_json, write_json

_INT64 = {"dtype": "int64", "_type": "Value"}
_FEATURES = {
    "input_ids": {"feature": _INT64, "_type": "List"},
    "loss_mask": {"feature": _INT64, "_type": "List"},
    "seq_len": _INT64,
}
_SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int64())),
        pa.field("loss_mask", pa.list_(pa.int64())),
        pa.field("seq_len", pa.int64()),
    ],
    metadata={"huggingface": orjson.dumps({"info": {"features": _FEATURES}})},
)
# A batch's ids stay far below the 2^31 that a list column's offsets reach, and its memory at 16 MB for each column.
_BATCH_TOKENS = 1 << 20
# About 500 MB a file, the size that save_to_disk aims at.
_FILE_TOKENS = 1 << 25


class Speculators:
    """Writes one dataset of all rows, split after split, and one of each split where there are several.

    speculators' trainer takes one folder and cuts it by position (`--train-data-ratio`), so the order of the splits is
    what keeps conversations apart. The split's own folders hold the Arrow files; the outer one refers to them.
    """

    def __init__(self, folder: Path, splits: Sequence[str]) -> None:
        self._folder = folder
        self._parts = {name: _Dataset(folder / name if len(splits) > 1 else folder) for name in splits}

    def add(self, split: str, row: Row) -> None:
        self._parts[split].add(row)

    def finish(self) -> list[str]:
        """Closes the datasets, and returns the Arrow files of the outer one, in order."""
        files: list[str] = []
        counts = TokenCounts()
        for name, part in self._parts.items():
            part.close()
            files += [str((part.folder / file).relative_to(self._folder)) for file in part.files]
            counts.merge(part.counts)
            if part.folder != self._folder:
                _describe(part.folder, part.files, part.counts, name)
        _describe(self._folder, files, counts, None)
        return files

    def advice(self, rows: dict[str, int]) -> str:
        total, train = sum(rows.values()), next(iter(rows.values()))
        if len(rows) == 1:
            return "Give this folder as --data-path. Its training part is cut by position: --split keeps it exact."
        # speculators takes the first int(total * ratio) rows; half a row more keeps rounding away from the boundary.
        return (
            f"Give this folder as --data-path with --train-data-ratio {(train + 0.5) / total!r}: `train` is its start."
        )


class _Dataset:
    """The Arrow files of one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.files: list[str] = []
        self.counts = TokenCounts()
        self._writer: pa.RecordBatchStreamWriter | None = None
        self._in_file = 0
        self._ids: list[npt.NDArray[np.int64]] = []
        self._masks: list[npt.NDArray[np.int64]] = []
        self._waiting = 0  # tokens

    def add(self, row: Row) -> None:
        # Copies: a row's own arrays are views that would keep all of their batch in memory.
        self._ids.append(row.input_ids.astype(np.int64))
        self._masks.append(row.loss_mask.astype(np.int64))
        self._waiting += len(row.input_ids)
        if self._waiting >= _BATCH_TOKENS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._close_file()
        count = len(self.files)
        for index in range(count):
            final = f"data-{index:05d}-of-{count:05d}.arrow"
            (self.folder / self.files[index]).replace(self.folder / final)
            self.files[index] = final

    def _flush(self) -> None:
        if not self._ids:
            return
        if self._in_file >= _FILE_TOKENS:
            self._close_file()
        if self._writer is None:
            self.files.append(f"data-{len(self.files):05d}.unfinished")
            self._writer = pa.ipc.new_stream(str(self.folder / self.files[-1]), _SCHEMA)
        ids, mask = np.concatenate(self._ids), np.concatenate(self._masks)
        lengths = np.array([len(row) for row in self._ids], dtype=np.int64)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        self.counts.add(ids[mask == 1])
        self._writer.write_batch(
            pa.RecordBatch.from_arrays(
                [
                    pa.ListArray.from_arrays(offsets, pa.array(ids)),
                    pa.ListArray.from_arrays(offsets, pa.array(mask)),
                    pa.array(lengths),
                ],
                schema=_SCHEMA,
            )
        )
        self._in_file += self._waiting
        self._ids, self._masks, self._waiting = [], [], 0

    def _close_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._in_file = None, 0


def _describe(folder: Path, files: Sequence[str], counts: TokenCounts, split: str | None) -> None:
    """What makes Arrow files a dataset. state.json, without which nothing reads it, comes last."""
    write_token_freq(folder / "token_freq.pt", counts)
    write_json(
        folder / "dataset_info.json",
        {"citation": "", "description": "", "features": _FEATURES, "homepage": "", "license": ""},
    )
    write_json(
        folder / "state.json",
        {
            "_data_files": [{"filename": name} for name in files],
            "_fingerprint": sha256_json([*files, *counts.as_dict().items()])[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            # The trainer calls tensor methods on what it gets.
            "_format_type": "torch",
            "_output_all_columns": False,
            "_split": split,
        },
    )
