"""Everything under the bucket or prefix: what it is, what it costs, what no manifest names, and how to be rid of it."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import orjson

from shardmill.errors import DataError, Refused, UsageError
from shardmill.paths import is_build_name
from shardmill.settings import S3
from shardmill.store.answers import Listed, Unfinished
from shardmill.store.client import Store
from shardmill.store.manifest import KINDS, Manifest, is_object_name

_THREADS = 16
_GB = 1e9
# A run sends its progress every minute.
_SILENT_S = 180.0


@dataclass
class Group:
    """Objects of one kind in one build, or outside of any."""

    build: str
    kind: str
    count: int = 0
    size: int = 0  # bytes
    oldest: datetime = field(default_factory=lambda: datetime.max.replace(tzinfo=UTC))
    newest: datetime = field(default_factory=lambda: datetime.min.replace(tzinfo=UTC))

    def add(self, listed: Listed) -> None:
        self.count += 1
        self.size += listed.size
        self.oldest = min(self.oldest, listed.modified)
        self.newest = max(self.newest, listed.modified)


@dataclass(frozen=True, slots=True)
class Build:
    name: str
    published: int  # shards with a manifest
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """A multipart upload that was never ended, and the bytes that it holds."""

    upload: Unfinished
    size: int | None  # None where these credentials may not list parts


@dataclass(frozen=True, slots=True)
class Inventory:
    groups: tuple[Group, ...]
    builds: tuple[Build, ...]
    unnamed: tuple[Listed, ...]  # completions and tokens that no manifest names
    unreadable: tuple[str, ...]  # manifests that can't be read: nothing of their builds counts as unnamed
    uploads: tuple[Left, ...]
    uploads_known: bool  # False where unfinished uploads are not listed, or not to these credentials

    @property
    def size(self) -> int:
        """Bytes that are paid for."""
        return sum(group.size for group in self.groups) + sum(left.size or 0 for left in self.uploads)

    def usd_per_month(self, usd_per_gb_month: float | None) -> float | None:
        return None if usd_per_gb_month is None else self.size / _GB * usd_per_gb_month


def take_inventory(s3: S3, store: Store) -> Inventory:
    """Lists everything under bucket and prefix and reads every manifest. Changes nothing. Raises StoreError."""
    prefix = f"{s3.prefix}/" if s3.prefix else ""
    everything = list(store.objects(prefix))
    names = _build_names(everything, prefix)
    groups: dict[tuple[str, str], Group] = {}
    keys: dict[str, list[str]] = {name: [] for name in names}
    manifests: list[tuple[str, str, str]] = []
    for listed in everything:
        first, slash, rest = listed.key[len(prefix) :].partition("/")
        build = first if slash and first in keys else ""
        kind = (rest.partition("/")[0] if "/" in rest else "build files") if build else "not a build"
        groups.setdefault((build, kind), Group(build, kind)).add(listed)
        if build:
            keys[build].append(listed.key)
        if kind == "manifests" and rest.endswith(".json"):
            manifests.append((build, rest[len("manifests/") : -len(".json")], listed.key))
    named, unreadable = _named(store, manifests)
    spoiled = {build for build, _, key in manifests if key in unreadable}
    uploads, known = _uploads(store, prefix)
    return Inventory(
        groups=tuple(groups[key] for key in sorted(groups)),
        builds=tuple(Build(name, sum(b == name for b, _, _ in manifests), tuple(keys[name])) for name in sorted(names)),
        unnamed=tuple(
            listed for listed in everything if _is_unnamed(listed.key[len(prefix) :], listed.key, named, keys, spoiled)
        ),
        unreadable=tuple(sorted(unreadable)),
        uploads=uploads,
        uploads_known=known,
    )


@dataclass(frozen=True, slots=True)
class Deletion:
    """What would be deleted: keys in the order of deleting (manifests first), and uploads to be aborted."""

    keys: tuple[str, ...]
    uploads: tuple[Unfinished, ...]


def plan_deletion(inventory: Inventory, what: Iterable[str], older_than: timedelta) -> Deletion:
    """Resolves names (`unnamed`, `uploads`, or a build's folder name) to what they stand for.

    `older_than` protects what another machine may be uploading now; a build that is named goes whole.
    Raises UsageError for a name that is nothing in this inventory.
    """
    before = datetime.now(UTC) - older_than
    builds = {build.name: build for build in inventory.builds}
    keys: dict[str, None] = {}
    uploads: list[Unfinished] = []
    for name in what:
        if name == "unnamed":
            keys |= {listed.key: None for listed in inventory.unnamed if listed.modified < before}
        elif name == "uploads":
            uploads += [left.upload for left in inventory.uploads if left.upload.started < before]
        elif name in builds:
            manifests_first = sorted(builds[name].keys, key=lambda key: ("/manifests/" not in key, key))
            keys |= dict.fromkeys(manifests_first)
        else:
            known = ", ".join(sorted(builds)) or "none"
            raise UsageError(f"Nothing here is called {name}: give unnamed, uploads, or a build (there are: {known}).")
    return Deletion(tuple(keys), tuple(uploads))


def at_work(store: Store, inventory: Inventory, names: Iterable[str]) -> list[str]:
    """Those of the builds `names` at which a run is at work, by what it has sent within the last minutes."""
    builds = {build.name: build for build in inventory.builds}
    return [name for name in names if name in builds and any(map(partial(_is_running, store), builds[name].keys))]


def _is_running(store: Store, key: str) -> bool:
    if "/progress/" not in key or not key.endswith(".json"):
        return False
    content = store.get(key)
    if content is None or content.age_s > _SILENT_S:
        return False
    try:
        return bool(orjson.loads(content.body)["state"] == "running")
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return False


def delete(store: Store, deletion: Deletion) -> None:
    """Deletes what was planned. Raises StoreError; running it again goes on from there."""
    store.delete(deletion.keys)
    for upload in deletion.uploads:
        store.abort(upload.key, upload.upload_id)


def as_json(inventory: Inventory, usd_per_gb_month: float | None) -> dict[str, Any]:
    return {
        "bytes": inventory.size,
        "usd_per_month": inventory.usd_per_month(usd_per_gb_month),
        "groups": [
            {
                "build": group.build or None,
                "kind": group.kind,
                "count": group.count,
                "bytes": group.size,
                "oldest": group.oldest.isoformat(),
                "newest": group.newest.isoformat(),
            }
            for group in inventory.groups
        ],
        "builds": [{"build": build.name, "published_shards": build.published} for build in inventory.builds],
        "unnamed": [listed.key for listed in inventory.unnamed],
        "unreadable_manifests": list(inventory.unreadable),
        "unfinished_uploads": [
            {"key": left.upload.key, "bytes": left.size, "started": left.upload.started.isoformat()}
            for left in inventory.uploads
        ],
    }


def _build_names(everything: Iterable[Listed], prefix: str) -> set[str]:
    """Folders with a build's name that hold a build.json, a run's progress, a manifest, or a shard's objects."""
    names = set()
    for listed in everything:
        parts = listed.key[len(prefix) :].split("/")
        if not is_build_name(parts[0]):
            continue
        if parts[1:] == ["build.json"] or (len(parts) == 3 and parts[1] == "progress"):
            names.add(parts[0])
        if len(parts) == 3 and parts[1] in (*KINDS, "manifests") and parts[2].startswith("shard-"):
            names.add(parts[0])
    return names


def _named(store: Store, manifests: list[tuple[str, str, str]]) -> tuple[set[str], set[str]]:
    """Keys that some manifest names, and the keys of manifests that can't be read."""

    def read(item: tuple[str, str, str]) -> Manifest | None:
        build, shard, key = item
        content = store.get(key)
        try:
            return Manifest.from_bytes(content.body, build, shard, store.url(key)) if content is not None else None
        except DataError:
            return None

    with ThreadPoolExecutor(_THREADS) as pool:
        read_all = list(pool.map(read, manifests))
    named = {item.key for manifest in read_all if manifest is not None for item in manifest.objects if item.key}
    unreadable = {key for (_, _, key), manifest in zip(manifests, read_all, strict=True) if manifest is None}
    return named, unreadable


def _is_unnamed(relative: str, key: str, named: set[str], builds: dict[str, list[str]], spoiled: set[str]) -> bool:
    build, _, rest = relative.partition("/")
    kind, _, name = rest.partition("/")
    ours = kind in KINDS and is_object_name(name)
    return ours and build in builds and build not in spoiled and key not in named


def _uploads(store: Store, prefix: str) -> tuple[tuple[Left, ...], bool]:
    found = store.unfinished(prefix)
    if found is None:
        return (), False
    return tuple(left for upload in found if (left := _left(store, upload)) is not None), True


def _left(store: Store, upload: Unfinished) -> Left | None:
    """None for an upload that has ended since it was listed."""
    try:
        size = store.size_of_parts(upload)
    except Refused:
        return Left(upload, None)
    return None if size is None else Left(upload, size)
