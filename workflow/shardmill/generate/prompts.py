"""The prompts of one shard, read once: ids stay in Arrow's memory and become lists one prompt at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.errors import DataError, is_machines
from shardmill.generate.asked import Prompt
from shardmill.schemas import PROMPTS

Key = tuple[str, int]  # (conversation_id, turn): what makes a row itself


@dataclass(frozen=True, slots=True)
class Turn:
    """One row of prompts. `prompt` is None for a turn that depends on an answer not yet given."""

    key: Key
    source_id: str
    prompt: Prompt | None


class ShardPrompts:
    """Rows in the order of (conversation_id, turn)."""

    def __init__(self, path: Path) -> None:
        try:
            table = pq.read_table(path, schema=PROMPTS)
        except FileNotFoundError:
            raise DataError(f"{path} is missing: run snakemake again, which makes it.") from None
        except (pa.ArrowInvalid, OSError) as error:
            if is_machines(error):
                raise
            raise DataError(f"{path} cannot be read ({error}): delete it, and run snakemake again.") from error
        self._table = table.sort_by([("conversation_id", "ascending"), ("turn", "ascending")]).combine_chunks()
        keys = zip(
            self._table.column("conversation_id").to_pylist(), self._table.column("turn").to_pylist(), strict=True
        )
        self._rows: dict[Key, int] = {(str(name), int(turn or 0)): index for index, (name, turn) in enumerate(keys)}
        if len(self._rows) != len(self._table):
            raise DataError(f"{path} has two rows for one turn of a conversation: delete it, and run snakemake again.")

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[Key]:
        return iter(self._rows)

    def conversations(self) -> dict[str, list[Key]]:
        """The turns of each conversation, in order."""
        grouped: dict[str, list[Key]] = {}
        for key in self._rows:
            grouped.setdefault(key[0], []).append(key)
        return grouped

    def turn(self, key: Key) -> Turn:
        known = self.prompt_id(key)
        return Turn(
            key=key,
            source_id=self._value("source_id", key),
            prompt=None
            if known is None
            else Prompt(known, self._value("prompt_ids", key), self._value("max_new_tokens", key)),
        )

    def prompt_id(self, key: Key) -> str | None:
        value: str | None = self._value("prompt_id", key)
        return value

    def messages(self, key: Key) -> list[dict[str, Any]]:
        """What this turn adds before its answer."""
        loaded: list[dict[str, Any]] = orjson.loads(self._value("messages", key))
        return loaded

    def tools(self, key: Key) -> str | None:
        """Tool declarations as JSON, as the renderer takes them."""
        value: str | None = self._value("tools", key)
        return value

    def _value(self, column: str, key: Key) -> Any:
        return self._table.column(column)[self._rows[key]].as_py()
