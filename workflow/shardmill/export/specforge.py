"""SpecForge's pre-tokenized JSONL (`data.prompts_path`), in slices that its loader has the memory for.

The rules are those of `specforge/data/prompt_builder.py` as of SpecForge 0.2.0: an object a line with `input_ids` and
`loss_mask`, lists of integers of one length, the mask of 0 and 1; other keys are ignored; one malformed line and the
whole file is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import orjson

from shardmill.errors import DataError
from shardmill.export.source import Row

# What the loader holds of a row: a pointer and an int object for each id, a pointer for each mask value, and two lists
# and two dicts around them. Measured on SpecForge 0.2.0: 55.9, 50.0, 49.5 and 48.9 bytes a token in rows of 100, 1,000,
# 3,000 and 20,000 tokens; this is a little more than each.
BYTES_PER_TOKEN = 50
BYTES_PER_ROW = 700


def loader_bytes(tokens: int) -> int:
    """Memory in bytes that SpecForge's loader takes for a row of `tokens` tokens."""
    return BYTES_PER_TOKEN * tokens + BYTES_PER_ROW


class SpecForge:
    """Writes `<split>-00000-of-00003.jsonl`, …, each within `memory_gb` (10^9 bytes) of the trainer's memory."""

    def __init__(self, folder: Path, splits: Sequence[str], memory_gb: float) -> None:
        self._slices = {name: _Slices(folder, name, memory_gb) for name in splits}

    def add(self, split: str, row: Row) -> None:
        self._slices[split].add(row)

    def finish(self) -> list[str]:
        """Gives the slices their final names, and returns them."""
        return [name for slices in self._slices.values() for name in slices.finish()]

    def advice(self, rows: dict[str, int]) -> str:
        return "Give SpecForge one slice as data.prompts_path; data.max_length cuts again, and is 2048 unless set."


class _Slices:
    def __init__(self, folder: Path, split: str, memory_gb: float) -> None:
        self._folder, self._split, self._memory_gb = folder, split, memory_gb
        self._count = 0
        self._held = 0
        self._stream: BinaryIO | None = None

    def add(self, row: Row) -> None:
        needs = loader_bytes(len(row.input_ids))
        if needs > self._memory_gb * 1e9:
            raise DataError(
                f"Turn {row.turn} of {row.source_id} has {len(row.input_ids)} tokens, for which SpecForge takes "
                f"{needs / 1e9:.6f} GB: raise --memory-gb, or give --max-length."
            )
        if self._stream is None or self._held + needs > self._memory_gb * 1e9:
            self._open_next()
        assert self._stream is not None
        self._held += needs
        self._stream.write(
            orjson.dumps(
                {
                    "id": f"{row.conversation_id}_{row.turn}",
                    "input_ids": row.input_ids,
                    "loss_mask": row.loss_mask,
                },
                option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE,
            )
        )

    def finish(self) -> list[str]:
        if self._stream is not None:
            self._stream.close()
        names = []
        for index in range(self._count):
            names.append(f"{self._split}-{index:05d}-of-{self._count:05d}.jsonl")
            self._unnamed(index).replace(self._folder / names[-1])
        return names

    def _open_next(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = self._unnamed(self._count).open("wb", buffering=1 << 20)
        self._count += 1
        self._held = 0

    def _unnamed(self, index: int) -> Path:
        return self._folder / f"{self._split}-{index:05d}.unfinished"
