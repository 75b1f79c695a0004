"""How much room a build's disk has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# Tight is less than both. Some seven shards under way, each as journal, completions and tokens, are far below.
_RESERVE_BYTES = 2_000_000_000
_RESERVE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of the disk that a folder is on."""

    free: int
    needed: int

    @property
    def tight(self) -> bool:
        return self.free < self.needed


def room_of(folder: Path) -> Room:
    disk = os.statvfs(folder)
    needed = min(_RESERVE_BYTES, int(_RESERVE_SHARE * disk.f_blocks * disk.f_frsize))
    return Room(disk.f_bavail * disk.f_frsize, needed)
