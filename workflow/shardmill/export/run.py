"""One export: every row of the finished shards through the rules into its split, and the account of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardmill.errors import DataError
from shardmill.export.folder import new_folder
from shardmill.export.rules import Rules
from shardmill.export.source import Row, Source, read_shard
from shardmill.export.splits import Splits
from shardmill.files import write_text


class Format(Protocol):
    """A trainer's form, written into one folder."""

    def add(self, split: str, row: Row) -> None: ...

    def finish(self) -> list[str]: ...

    def advice(self, rows: dict[str, int]) -> str: ...


@dataclass
class Part:
    """What went into one split. Lengths in tokens."""

    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    longest: int = 0


@dataclass
class Account:
    """rows_in = the rows of all splits + dropped. `cut` and `kept_longer` are of rows that went out."""

    build: str
    trainer: str
    shards: int
    rules: Rules
    splits: Splits
    lacking: tuple[str, ...]
    rows_in: int = 0
    supervised_in: int = 0
    cut: int = 0
    kept_longer: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    parts: dict[str, Part] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    advice: str = ""

    @property
    def rows_out(self) -> int:
        return sum(part.rows for part in self.parts.values())

    def as_dict(self) -> dict[str, Any]:
        return {
            "build": self.build,
            "trainer": self.trainer,
            "shards": self.shards,
            "partial": bool(self.lacking),
            "lacking": list(self.lacking),
            "max_length": self.rules.max_length,
            "longer": self.rules.longer,
            "min_supervised": self.rules.min_supervised,
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "dropped": dict(sorted(self.dropped.items())),
            "cut": self.cut,
            "kept_longer": self.kept_longer,
            "supervised_in": self.supervised_in,
            "splits": {
                name: {
                    "asked": share,
                    "rows": self.parts[name].rows,
                    "tokens": self.parts[name].tokens,
                    "supervised": self.parts[name].supervised,
                    "longest": self.parts[name].longest,
                }
                for name, share in self.splits.shares
            },
            "files": self.files,
        }

    def summary(self) -> str:
        """One line with every count."""
        dropped = self.dropped.total()
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.dropped.items()))
        supervised = sum(part.supervised for part in self.parts.values())
        kept = f", {100 * supervised / self.supervised_in:.1f}% of the supervised tokens" if self.supervised_in else ""
        return (
            f"{self.rows_in:,} rows in = {self.rows_out:,} out ({self._splits()}) + {dropped:,} dropped"
            f"{f' ({reasons})' if reasons else ''}; {self.cut:,} cut, {self.kept_longer:,} longer and kept; "
            f"{sum(part.tokens for part in self.parts.values()):,} tokens, {supervised:,} supervised{kept}; "
            f"longest row {max(part.longest for part in self.parts.values()):,}."
        )

    def _splits(self) -> str:
        return ", ".join(
            f"{name} {self.parts[name].rows:,}"
            + (
                f" = {100 * self.parts[name].rows / self.rows_out:.2f}% of {100 * share:g}% asked"
                if len(self.splits.shares) > 1
                else ""
            )
            for name, share in self.splits.shares
        )


def export_build(
    source: Source,
    trainer: str,
    rules: Rules,
    splits: Splits,
    out: Path,
    open_format: Callable[[Path, Sequence[str]], Format],
    progress: Callable[[], None],
) -> Account:
    """Writes `out`, which appears whole or not at all; memory doesn't grow with the build. `progress`: a shard is done.

    Raises DataError when a file of the build is not what it should be, or nothing is left for a split.
    """
    account = Account(source.build.name, trainer, len(source.finished), rules, splits, source.lacking)
    account.parts = {name: Part() for name in splits.names}
    with new_folder(out) as folder:
        form = open_format(folder, splits.names)
        for shard in source.finished:
            for row in read_shard(source, shard):
                _take(row, account, form)
            progress()
        _refuse_empty(account)
        account.files = form.finish()
        account.advice = form.advice({name: part.rows for name, part in account.parts.items()})
        write_text(folder / "README.md", _readme(account))
    return account


def _take(row: Row, account: Account, form: Format) -> None:
    rules = account.rules
    account.rows_in += 1
    account.supervised_in += int(np.count_nonzero(row.loss_mask))
    kept = rules.apply(row)
    if not isinstance(kept, Row):
        account.dropped[kept] += 1
        return
    account.cut += len(kept.input_ids) < len(row.input_ids)
    account.kept_longer += rules.max_length is not None and len(kept.input_ids) > rules.max_length
    split = account.splits.of(kept)
    part = account.parts[split]
    part.rows += 1
    part.tokens += len(kept.input_ids)
    part.supervised += int(np.count_nonzero(kept.loss_mask))
    part.longest = max(part.longest, len(kept.input_ids))
    form.add(split, kept)


def _refuse_empty(account: Account) -> None:
    if account.rows_out == 0:
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(account.dropped.items())) or "there are none"
        raise DataError(f"No row of {account.build} is left to export: of {account.rows_in} rows, {why}.")
    empty = [name for name, part in account.parts.items() if part.rows == 0]
    if empty:
        raise DataError(
            f"No conversation fell into the split {empty[0]}. There may be too few; or their ids are numbers behind "
            f"one word (conv_1, conv_2), which read as parts of one conversation: then give --split-ids whole."
        )


def _readme(account: Account) -> str:
    lines = [f"# {account.build} for {account.trainer}", "", account.summary(), "", account.advice]
    if account.lacking:
        lines += ["", f"Exported with --partial: {'; '.join(account.lacking)}."]
    return "\n".join([*lines, ""])
