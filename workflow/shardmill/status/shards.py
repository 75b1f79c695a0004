"""Where each shard of a build stands, from the files that are there and from the progress that its job writes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from shardmill.errors import DamagedFile, DataError
from shardmill.files import read_json
from shardmill.paths import BuildPaths, shard_names
from shardmill.plan import Plan
from shardmill.settings import Settings
from shardmill.store.manifest import Manifest, read_manifest
from shardmill.store.uploads import Upload, read_upload

# A job writes its progress every 5 s. One that is silent for so long is gone, whatever it wrote last.
SILENT_S = 60.0

Stamp = tuple[int, int]  # a file's time (ns) and size
_NONE = (0, 0)
_LAST_UPLOADS = 20


class Stage(Enum):
    PUBLISHED = "published"
    ANSWERED = "answered"
    GENERATING = "generating"
    BEGUN = "begun"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class ShardNow:
    name: str
    stage: Stage
    progress: dict[str, Any] | None  # generate/progress.py; None where no job was at it, or its file is damaged
    manifest: Manifest | None  # one that fits the files here
    bytes_here: int  # of completions and tokens
    answered_at: float | None  # when its completions were whole; None while they are not


class ManifestCache:
    """Manifests already read, by the file's time and size."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Stamp, Manifest | None]] = {}

    def read(self, build: BuildPaths, shard: str, stamp: Stamp) -> Manifest | None:
        """None where it is damaged (the next run writes it anew)."""
        entry = self._known.get(shard)
        if entry is None or entry[0] != stamp:
            entry = (stamp, _manifest(build, shard))
            self._known[shard] = entry
        return entry[1]


@dataclass(frozen=True, slots=True)
class Here:
    """Which of a build's files are here, by shard: one listing a folder, however many shards there are."""

    completions: dict[str, Stamp]
    tokens: dict[str, Stamp]
    manifests: dict[str, Stamp]
    progress: dict[str, Stamp]
    journals: dict[str, Stamp]
    uploads: dict[str, Stamp]

    @classmethod
    def of(cls, build: BuildPaths) -> Here:
        kinds = [build.root / kind for kind in ("completions", "tokens", "manifests")]
        states = [build.run / "progress", build.run / "journals", build.uploads]
        return cls(*(_listing(folder) for folder in (*kinds, *states)))


def look(
    settings: Settings, build: BuildPaths, here: Here, manifests: ManifestCache, at_work: bool, now: float
) -> list[ShardNow]:
    """Every shard of the build. `at_work`: a run holds the build's lock, so that its jobs may be at work too."""
    root = settings.s3.root(build.name) if settings.s3.used else None
    names = shard_names(settings.prompts.shards)
    return [_look(build, shard, here, manifests, root, at_work, now) for shard in names]


def last_uploads(build: BuildPaths, here: Here) -> list[Upload]:
    """Those of this folder's shards, the newest first."""
    newest = sorted(here.uploads, key=lambda shard: here.uploads[shard], reverse=True)[:_LAST_UPLOADS]
    return [upload for shard in newest if (upload := read_upload(build.upload(shard))) is not None]


def read_plan(build: BuildPaths) -> Plan | None:
    """The plan of the run at work or the last one."""
    try:
        return Plan.load(build.plan)
    except (FileNotFoundError, DamagedFile, TypeError):
        return None


def _look(
    build: BuildPaths, shard: str, here: Here, manifests: ManifestCache, root: str | None, at_work: bool, now: float
) -> ShardNow:
    progress = _progress(build, shard) if shard in here.progress else None
    sizes = {"completions": here.completions.get(shard, _NONE)[1], "tokens": here.tokens.get(shard, _NONE)[1]}
    size = sum(sizes.values())
    if shard not in here.completions:
        running = progress is not None and progress["state"] == "running" and now - progress["updated_at"] < SILENT_S
        if running and at_work:
            stage = Stage.GENERATING
        else:
            stage = Stage.BEGUN if shard in here.journals else Stage.WAITING
        return ShardNow(shard, stage, progress, None, size, None)
    manifest = manifests.read(build, shard, here.manifests[shard]) if shard in here.manifests else None
    if manifest is not None:
        published = root is None or all((item.key or "").startswith(root) for item in manifest.objects)
        if not published or sizes != {item.kind: item.size for item in manifest.objects}:
            manifest = None
    stage = Stage.ANSWERED if manifest is None else Stage.PUBLISHED
    return ShardNow(shard, stage, progress, manifest, size, here.completions[shard][0] / 1e9)


def _progress(build: BuildPaths, shard: str) -> dict[str, Any] | None:
    try:
        return read_json(build.progress(shard))
    except (FileNotFoundError, DamagedFile):
        return None


def _listing(folder: Path) -> dict[str, Stamp]:
    """By the name up to its first dot; half-written files, which begin with one, left out."""
    found: dict[str, Stamp] = {}
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return found
    for entry in entries:
        name = entry.name.partition(".")[0]
        if name:
            try:
                status = entry.stat()
            except FileNotFoundError:  # it went between the two
                continue
            found[name] = (status.st_mtime_ns, status.st_size)
    return found


def _manifest(build: BuildPaths, shard: str) -> Manifest | None:
    try:
        return read_manifest(build, shard)
    except (DataError, FileNotFoundError):
        return None
