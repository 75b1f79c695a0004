"""Waiting for disk: while it is tight nothing new is asked, so that what is under way can still be written down.

What frees it without anybody's doing is publishing, which ends a shard's journal. The workflow keeps a core for that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from shardmill.disk import room_of
from shardmill.errors import ShardmillError

_log = logging.getLogger(__name__)


class Space:
    """One job's view of its build's disk."""

    def __init__(self, folder: Path, patience_s: float, poll_s: float) -> None:
        self._folder = folder
        self._patience_s = patience_s
        self._poll_s = poll_s
        self._tight_since: float | None = None

    def wait(self) -> None:
        """Returns once there is room. Raises ShardmillError when there was none for `generate.patience_s`."""
        while not self._enough():
            time.sleep(self._poll_s)

    async def room(self) -> None:
        """As `wait`, for any number of tasks at once."""
        while not self._enough():
            await asyncio.sleep(self._poll_s)

    def _enough(self) -> bool:
        room, now = room_of(self._folder), time.monotonic()
        if not room.tight:
            if self._tight_since is not None:
                _log.info("The disk of %s has room again: asking goes on.", self._folder)
            self._tight_since = None
            return True
        if self._tight_since is None:
            self._tight_since = now
            _log.warning(
                "The disk of %s has %s left: nothing new is asked until it has %s, for %.0f s at most.",
                self._folder,
                _mb(room.free),
                _mb(room.needed),
                self._patience_s,
            )
        elif now - self._tight_since >= self._patience_s:
            raise ShardmillError(
                f"The disk of {self._folder} has had less than {_mb(room.needed)} left for {self._patience_s:.0f} s "
                f"(generate.patience_s): free some, and run again; what is answered is kept."
            )
        return False


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
