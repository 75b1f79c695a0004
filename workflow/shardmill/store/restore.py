"""A finished shard from the store to this machine. It counts only when its content is what the manifest says."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import orjson

from shardmill.errors import BadObject, DataError
from shardmill.facts import build_facts
from shardmill.files import sha256_file, write_bytes, write_json
from shardmill.paths import BuildPaths
from shardmill.settings import S3, Settings
from shardmill.store.manifest import Entry, Manifest

if TYPE_CHECKING:
    from shardmill.store.client import Store

log = logging.getLogger(__name__)

_READS = 3
_PAUSE_S = 0.5


def restore_shard(settings: Settings, build: BuildPaths, shard: str) -> None:
    """Downloads a published shard: its objects, each checked against the manifest's sha256, then the manifest.

    A file that is already there and right is kept. The shard's journal goes: nothing in it is needed any more.
    Raises BadObject or DamagedFile when the manifest or an object is missing or wrong, StoreError for other faults.
    """
    from shardmill.store.client import open_store

    store = open_store(settings.s3)
    found = fetch_manifest(store, settings.s3, build, shard)
    if found is None:
        raise BadObject(
            f"{store.url(manifest_key(settings.s3, build, shard))} is no longer at {store.host}: run again, and the "
            f"shard is planned anew."
        )
    take_shard(store, build, *found)


def restore_facts(settings: Settings, build: BuildPaths) -> None:
    """What a build that was restored whole lacks: the store's counts, model, rejects and reports.

    Does nothing without a store, or where this machine has them. Raises StoreError when the store can't be read.
    """
    if not settings.s3.used:
        return
    known = build_facts(build)
    sources = {
        build.rejects: "prompts/rejects.parquet",
        build.pilot_report: "quality/pilot.json",
        # What the checks found where the prompts were.
        build.judged: "quality/report.json",
    }
    lacking = [path for path in sources if not path.exists()]
    if known.get("counts") and known.get("model") and not lacking:
        return
    from shardmill.store.client import open_store
    from shardmill.store.transfer import download_file

    store, root = open_store(settings.s3), settings.s3.root(build.name)
    content = store.get(f"{root}build.json")
    if content is not None:
        theirs = orjson.loads(content.body)
        missing = {key: theirs.get(key) for key in ("counts", "model") if not known.get(key)}
        write_json(build.build_json, {**theirs, **known, **missing})
    for path in lacking:
        if store.head(root + sources[path]) is not None:
            download_file(store, root + sources[path], path)


def is_published(settings: Settings, build: BuildPaths, shard: str) -> bool:
    """Whether the shard's manifest is in the store: one request."""
    from shardmill.store.client import open_store

    return open_store(settings.s3).head(manifest_key(settings.s3, build, shard)) is not None


def fetch_manifest(store: Store, s3: S3, build: BuildPaths, shard: str) -> tuple[Manifest, bytes] | None:
    """A shard's manifest in the store, parsed and as it stands there; None when the shard is not published.

    One that can't be read is read again before it is believed: some stores show an object while it is written over.
    Raises DataError when it stays so.
    """
    key = manifest_key(s3, build, shard)
    for attempt in range(1, _READS + 1):
        content = store.get(key)
        if content is None:
            return None
        try:
            return Manifest.from_bytes(content.body, build.name, shard, store.url(key)), content.body
        except DataError:
            if attempt == _READS:
                raise
            time.sleep(_PAUSE_S)
    raise AssertionError("unreachable")


def take_shard(store: Store, build: BuildPaths, manifest: Manifest, raw: bytes) -> int:
    """Makes the local files those that `manifest` names, the manifest last; returns how many bytes were downloaded."""
    local = build.manifest(manifest.shard)
    for path in (local, *(build.root / item.path for item in manifest.objects)):
        for left in path.parent.glob(f".{path.name}.*.tmp"):
            # What a killed restore left; this build's lock lets nobody else write here.
            left.unlink(missing_ok=True)
    if not local.exists() or local.read_bytes() != raw:
        # A manifest that names other content must be gone before the first file is replaced.
        local.unlink(missing_ok=True)
    with ThreadPoolExecutor(len(manifest.objects)) as pool:
        downloaded = sum(pool.map(lambda item: _take_object(store, build, item), manifest.objects))
    write_bytes(local, raw)
    # The mark in the store is ended by the machine that published.
    build.discarded(manifest.shard).unlink(missing_ok=True)
    build.journal(manifest.shard).unlink(missing_ok=True)
    return downloaded


def manifest_key(s3: S3, build: BuildPaths, shard: str) -> str:
    return f"{s3.root(build.name)}manifests/{shard}.json"


def _take_object(store: Store, build: BuildPaths, item: Entry) -> int:
    from shardmill.store.transfer import download_file

    path = build.root / item.path
    if item.key is None:
        raise BadObject(f"The manifest of {path.stem} names no object in {store.bucket}: publish the shard again.")
    if path.exists() and path.stat().st_size == item.size and sha256_file(path) == item.sha256:
        return 0
    download_file(store, item.key, path, item.size, item.sha256)
    return item.size
