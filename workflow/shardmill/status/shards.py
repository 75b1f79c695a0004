"""Where each shard of a build stands, from the files that are there and from the progress that its job writes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import orjson

from shardmill.errors import DataError
from shardmill.files import read_json
from shardmill.paths import BuildPaths
from shardmill.plan import Plan
from shardmill.settings import Settings
from shardmill.store.manifest import Manifest, read_manifest, root_key, uses_store

# A job writes its progress every 5 s. One that is silent for so long is gone, whatever it wrote last.
SILENT_S = 60.0


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


class ManifestCache:
    """Manifests already read, by the file's time and size."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, int], Manifest | None]] = {}

    def read(self, build: BuildPaths, shard: str) -> Manifest | None:
        """None where there is none, or where it is damaged (the next run writes it anew)."""
        try:
            status = build.manifest(shard).stat()
            stamp = (status.st_mtime_ns, status.st_size)
            entry = self._known.get(shard)
            if entry is None or entry[0] != stamp:
                entry = (stamp, _manifest(build, shard))
                self._known[shard] = entry
        except FileNotFoundError:
            self._known.pop(shard, None)
            return None
        return entry[1]


def look(
    settings: Settings, build: BuildPaths, shards: list[str], manifests: ManifestCache, at_work: bool, now: float
) -> list[ShardNow]:
    """`at_work`: a run holds the build's lock, so that its jobs may be at work too."""
    root = root_key(settings.s3, build.name) if uses_store(settings.s3) else None
    there = {path.stem for path in (build.run / "progress").glob("*.json")}
    return [_look(build, shard, manifests, root, shard in there, at_work, now) for shard in shards]


def read_plan(build: BuildPaths) -> Plan | None:
    """The plan of the run at work or the last one."""
    try:
        return Plan.load(build.plan)
    except (FileNotFoundError, orjson.JSONDecodeError, TypeError):
        return None


def _look(
    build: BuildPaths, shard: str, manifests: ManifestCache, root: str | None, begun: bool, at_work: bool, now: float
) -> ShardNow:
    progress = _progress(build, shard) if begun else None
    completions, tokens = _size(build, "completions", shard), _size(build, "tokens", shard)
    size = (completions or 0) + (tokens or 0)
    if completions is None:
        running = progress is not None and progress["state"] == "running" and now - progress["updated_at"] < SILENT_S
        if running and at_work:
            stage = Stage.GENERATING
        else:
            stage = Stage.BEGUN if build.journal(shard).exists() else Stage.WAITING
        return ShardNow(shard, stage, progress, None, size)
    manifest = manifests.read(build, shard)
    if manifest is not None:
        sizes = {item.kind: item.size for item in manifest.objects}
        published = root is None or all((item.key or "").startswith(root) for item in manifest.objects)
        if not published or sizes != {"completions": completions, "tokens": tokens}:
            manifest = None
    return ShardNow(shard, Stage.ANSWERED if manifest is None else Stage.PUBLISHED, progress, manifest, size)


def _progress(build: BuildPaths, shard: str) -> dict[str, Any] | None:
    try:
        progress: dict[str, Any] = read_json(build.progress(shard))
    except (FileNotFoundError, orjson.JSONDecodeError):
        return None
    return progress


def _size(build: BuildPaths, kind: str, shard: str) -> int | None:
    try:
        return (build.root / kind / f"{shard}.parquet").stat().st_size
    except FileNotFoundError:
        return None


def _manifest(build: BuildPaths, shard: str) -> Manifest | None:
    try:
        return read_manifest(build, shard)
    except DataError:
        return None
