"""The jobs of a fleet as it knows them, and the locks of the runs that they belong to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmill import runlock
from shardmill.fleet import wire


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
    run: dict[str, Any] | None  # who held the lock when the job began; None for a job under no run
    joined: float
    wanted: int = 0
    told_to_stop: bool = False
    granted_at: dict[int, float] = field(default_factory=dict)

    def tell(self, message: wire.Message) -> None:
        wire.write(self.writer, message)


@dataclass
class Runs:
    """The locks of the runs that jobs have named, which keep the fleet alive."""

    _locks: set[Path] = field(default_factory=set)

    def note(self, lock: Path) -> None:
        self._locks.add(lock)

    def over(self, job: Job) -> bool:
        """Whether the run that started `job` has ended. Its lock may be held again already, by the run after it.

        A job by itself, under no run, is never over.
        """
        return job.run is not None and runlock.holder(job.lock) != job.run

    def any_alive(self) -> bool:
        return any(runlock.holder(lock) is not None for lock in self._locks)

    def describe(self) -> list[dict[str, Any]]:
        return [{"lock": str(lock), "holder": runlock.holder(lock)} for lock in sorted(self._locks)]
