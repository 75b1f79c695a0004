"""What answers took that their rows don't tell: kept by each shard's file of completions, in its footer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmill.schemas import read_notes


@dataclass(slots=True)
class Effort:
    """Of rows that were asked here: reused ones cost nothing."""

    cut_at_stop: int = 0  # answers that went on after their end, and were cut there
    degenerate: Counter[str] = field(default_factory=Counter)  # answers of no use, asked again: by kind
    faults: Counter[str] = field(default_factory=Counter)  # of servers, asked again: by kind

    @classmethod
    def of(cls, counts: Mapping[str, Any]) -> Effort:
        effort = cls()
        effort.add(counts)
        return effort

    def add(self, counts: Mapping[str, Any]) -> None:
        """Counts as `as_dict` gives them and a job's progress has them, too."""
        self.cut_at_stop += counts["cut_at_stop"]
        self.degenerate.update(counts["degenerate"])
        self.faults.update(counts["faults"])

    def as_dict(self) -> dict[str, Any]:
        """The most frequent kinds first."""
        return {
            "cut_at_stop": self.cut_at_stop,
            "degenerate": dict(self.degenerate.most_common()),
            "faults": dict(self.faults.most_common()),
        }


def read_efforts(files: Iterable[Path]) -> dict[str, Effort]:
    """By shard. A file without a note (of an earlier version) has none."""
    found: dict[str, Effort] = {}
    for path in files:
        notes = read_notes(path)
        if notes is not None:
            found[path.stem] = Effort.of(notes)
    return found


def total(efforts: Iterable[Effort]) -> Effort:
    whole = Effort()
    for effort in efforts:
        whole.add(effort.as_dict())
    return whole
