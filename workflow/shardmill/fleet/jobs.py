"""The jobs of a fleet as it knows them, and the locks of the runs that they belong to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmill.fleet import runlock, wire


@dataclass
class Job:
    """A connected job. Its leases are known by (`id`, the job's own number)."""

    id: str
    writer: asyncio.StreamWriter
    name: str
    order: int
    limit: int  # its generate.concurrency
    patience_s: float
    build: str
    lock: Path
    joined: float
    wanted: int = 0
    told_to_stop: bool = False
    granted_at: dict[int, float] = field(default_factory=dict)

    def tell(self, message: wire.Message) -> None:
        wire.write(self.writer, message)


@dataclass
class Runs:
    """Run locks that jobs have named. A run is over when its lock was held and no longer is."""

    _seen: dict[Path, bool] = field(default_factory=dict)  # whether it was ever held

    def note(self, lock: Path) -> None:
        self._seen[lock] = self._seen.get(lock, False) or runlock.holder(lock) is not None

    def over(self, lock: Path) -> bool:
        """Whether the run of `lock` has ended. A job by itself, under no run, is never over."""
        held = runlock.holder(lock) is not None
        was_held = self._seen.get(lock, False)
        self._seen[lock] = was_held or held
        return was_held and not held

    def any_alive(self) -> bool:
        return any(runlock.holder(lock) is not None for lock in self._seen)

    def describe(self) -> list[dict[str, Any]]:
        return [{"lock": str(lock), "holder": runlock.holder(lock)} for lock in self._seen]
