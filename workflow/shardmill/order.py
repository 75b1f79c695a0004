"""The order in which a machine takes the shards of a build.

Alone it is their own. With a store, where other machines may work on the same build, each has an order of its own, so
that they meet at a shard, and one waits for the other, only near the end.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import uuid
from pathlib import Path

from shardmill.paths import BuildPaths, shard_names
from shardmill.settings import Settings


def places(settings: Settings, build: BuildPaths) -> dict[str, int]:
    """The place of every shard in this machine's order, from 0."""
    names = shard_names(settings.prompts.shards)
    if settings.s3.used:
        names = _shuffled(tuple(names), _machine(build.root))
    return {shard: place for place, shard in enumerate(names)}


@functools.lru_cache(maxsize=4)
def _shuffled(names: tuple[str, ...], machine: str) -> list[str]:
    return sorted(names, key=lambda name: hashlib.sha256(f"{machine} {name}".encode()).digest())


def _machine(folder: Path) -> str:
    """This machine and folder: the same for every process of a run, written down nowhere."""
    return f"{platform.node()} {uuid.getnode()} {folder.absolute()}"
