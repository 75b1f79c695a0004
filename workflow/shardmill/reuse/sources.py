"""Older builds that may have rows for this one: their finished shards beside it, and in the same bucket.

A shard counts when it has a manifest that its file agrees with. What is missing or wrong, or isn't ours to read, is
left out with a warning, since all that it costs is to generate anew. A store that doesn't answer is an error, as
everywhere: to pay again for everything because of a network fault would be worse than to stop.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from shardmill.errors import DataError, Refused
from shardmill.paths import BuildPaths, shard_index
from shardmill.reuse.limits import Limits, same_answers
from shardmill.settings import Settings
from shardmill.store.manifest import Entry, Manifest, read_manifest

if TYPE_CHECKING:
    from shardmill.store.client import Store

_log = logging.getLogger(__name__)

_THREADS = 8
_SHARD_MANIFEST = re.compile(r"shard-\d{5,}-of-\d{5,}\.json")
_NO_IDENTITY = (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True, slots=True)
class Source:
    """Completions of one finished shard of an older build."""

    build: str
    shard: str
    limits: Limits
    entry: Entry  # the manifest's: size and sha256
    path: Path | None  # None: in the store alone


def find_sources(
    settings: Settings, build: BuildPaths, identity: Mapping[str, Any], wanted: Collection[str]
) -> list[Source]:
    """All of them, in the order in which their rows are preferred: those that are here first, then by name.

    `wanted`: our shards that are to be generated. Of what lies in the store alone, only shards are named that can hold
    conversations of these: a conversation's shard follows from its hash, so with equal numbers of shards one for each.
    Raises StoreError when the store can't be listed.
    """
    local = list(_local(build, identity))
    if not settings.s3.used:
        return local
    here = {(source.build, source.shard) for source in local}
    return [*local, *_stored(settings, build, identity, wanted, here)]


def _local(build: BuildPaths, identity: Mapping[str, Any]) -> Iterator[Source]:
    for folder in sorted(build.root.parent.iterdir()) if build.root.parent.is_dir() else []:
        other = BuildPaths(folder)
        if folder.is_symlink() or folder.name == build.name or not other.build_json.is_file():
            continue
        limits = _limits(other.build_json.read_bytes(), identity, str(other.build_json))
        if limits is not None:
            yield from _local_shards(other, limits)


def _local_shards(other: BuildPaths, limits: Limits) -> Iterator[Source]:
    for path in sorted((other.root / "manifests").glob("shard-*.json")):
        completions = other.completions(path.stem)
        try:
            entry = read_manifest(other, path.stem).objects[0]
            if completions.stat().st_size != entry.size:
                raise DataError(f"{completions} is not what {path} says")
        except (DataError, OSError) as error:
            _log.warning("Nothing is reused of %s here: %s", completions, error)
            continue
        yield Source(other.name, path.stem, limits, entry, completions)


def _stored(
    settings: Settings,
    build: BuildPaths,
    identity: Mapping[str, Any],
    wanted: Collection[str],
    here: Collection[tuple[str, str]],
) -> Iterator[Source]:
    from shardmill.store.client import Store

    store = Store(settings.s3)
    for folder in store.folders(f"{settings.s3.prefix}/" if settings.s3.prefix else ""):
        name = folder.rstrip("/").rpartition("/")[2]
        if name == build.name:
            continue
        other = BuildPaths(build.root.parent / name)
        root = settings.s3.root(name)
        try:
            found = store.get(f"{root}build.json")
        except Refused as error:
            _log.warning("Nothing is reused of the build %s in the store: %s", name, error)
            continue
        limits = None if found is None else _limits(found.body, identity, store.url(f"{root}build.json"))
        if limits is None:
            continue
        published = [shard for shard in _published(store, f"{root}manifests/") if (name, shard) not in here]
        yield from _stored_shards(store, settings, other, limits, _akin(published, wanted))


def _stored_shards(
    store: Store, settings: Settings, other: BuildPaths, limits: Limits, shards: list[str]
) -> Iterator[Source]:
    with ThreadPoolExecutor(_THREADS) as pool:
        manifests = pool.map(lambda shard: _stored_manifest(store, settings, other, shard), shards)
        for shard, manifest in zip(shards, manifests, strict=True):
            if manifest is not None and manifest.objects[0].key is not None:
                yield Source(other.name, shard, limits, manifest.objects[0], None)


def _stored_manifest(store: Store, settings: Settings, other: BuildPaths, shard: str) -> Manifest | None:
    from shardmill.store.restore import fetch_manifest

    try:
        found = fetch_manifest(store, settings.s3, other, shard)
    except DataError as error:
        _log.warning("Nothing is reused of %s in the store's %s: %s", shard, other.name, error)
        return None
    return found[0] if found is not None else None


def _published(store: Store, prefix: str) -> list[str]:
    names = (listed.key[len(prefix) :] for listed in store.objects(prefix))
    return [name.removesuffix(".json") for name in names if _SHARD_MANIFEST.fullmatch(name)]


def _akin(shards: list[str], wanted: Collection[str]) -> list[str]:
    """Those of an older build's `shards` that can hold conversations of our `wanted` ones.

    A hash h lies in shard h mod m there and h mod n here: both hold it only if their indexes agree modulo gcd(m, n).
    """
    if not shards or not wanted:
        return []
    divisor = math.gcd(*(_count(shard) for shard in (*shards, *wanted)))
    ours = {shard_index(shard) % divisor for shard in wanted}
    return [shard for shard in shards if shard_index(shard) % divisor in ours]


def _count(shard: str) -> int:
    return int(shard.rpartition("-")[2])


def _limits(build_json: bytes, ours: Mapping[str, Any], where: str) -> Limits | None:
    """The limits of an older build whose rows can serve ours; None when it has none that can, or is not readable."""
    try:
        identity = orjson.loads(build_json)["identity"]
        return Limits.of(identity) if same_answers(ours, identity) else None
    except _NO_IDENTITY:
        _log.warning("Nothing is reused of the build at %s: it doesn't say what made it.", where)
        return None
