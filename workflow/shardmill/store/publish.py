"""A finished shard to the store: objects first, each checked, and the manifest last. Whoever sees it can read all."""

from __future__ import annotations

import logging
import mimetypes
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from shardmill.errors import DamagedFile, DataError, StoreError
from shardmill.files import write_bytes
from shardmill.paths import BuildPaths
from shardmill.settings import S3, Settings
from shardmill.store.discarded import end_mark
from shardmill.store.manifest import Entry, Manifest, describe_shard, read_manifest
from shardmill.store.uploads import note_upload

if TYPE_CHECKING:
    from shardmill.store.client import Store

log = logging.getLogger(__name__)

_FILES_AT_ONCE = 8
_CREATIONS = 5


def publish_shard(settings: Settings, build: BuildPaths, shard: str) -> None:
    """Publishes a shard's completions and tokens, and writes its manifest, in the store and then here.

    The first machine to publish a shard wins: another takes the winner's files, so that what lies here is what is in
    the store. Without a bucket (or with s3.offline) there is the local manifest alone. The shard's journal goes last.
    Raises StoreError when the store refuses or holds something else than was sent.
    """
    manifest = _same_as_before(build, describe_shard(settings.s3, build, shard))
    local = build.manifest(shard)
    # An older manifest, of files that are made anew by now, must not stand beside them.
    local.unlink(missing_ok=True)
    if settings.s3.used:
        from shardmill.store.client import open_store

        _publish(open_store(settings.s3), settings.s3, build, manifest)
    else:
        write_bytes(local, manifest.to_bytes())
    end_mark(settings, build, shard)
    build.journal(shard).unlink(missing_ok=True)


def _same_as_before(build: BuildPaths, ours: Manifest) -> Manifest:
    """The manifest that is here already, where it names the same objects: another time in it would make it differ from
    what other machines have of the shard."""
    try:
        earlier = read_manifest(build, ours.shard)
    except (FileNotFoundError, DataError):
        return ours
    return earlier if earlier.same_content(ours) else ours


def publish_files(settings: Settings, build: BuildPaths, paths: Iterable[Path]) -> None:
    """Uploads files of the build that are no shard's (build.json, rejects, reports) under their own names.

    Each replaces what is there. Does nothing without a bucket. Raises DataError for a file that is missing.
    """
    if not settings.s3.used:
        return
    from shardmill.files import sha256_file
    from shardmill.store.client import open_store
    from shardmill.store.transfer import PART_BYTES, upload_file

    store, root = open_store(settings.s3), settings.s3.root(build.name)

    def upload(path: Path) -> None:
        key = root + path.relative_to(build.root).as_posix()
        if not path.is_file():
            raise DataError(f"{path} is to be uploaded and does not exist: run again, and it is made.")
        if path.stat().st_size <= PART_BYTES:
            store.put(key, path.read_bytes(), mimetypes.guess_type(path.name)[0] or "application/octet-stream")
        else:
            upload_file(store, key, path, sha256_file(path))

    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        # A list, so that the first error is raised here.
        list(pool.map(upload, paths))


def unpublish_shard(settings: Settings, build: BuildPaths, shard: str) -> None:
    """Takes a shard back, for one that is to be made again: manifests first, in the store and here, then the objects.

    The local files stay. Of a damaged manifest the objects stay as well, named by none (`shardmill inventory`).
    Raises StoreError when the store refuses.
    """
    from shardmill.store.restore import fetch_manifest, manifest_key

    if settings.s3.used:
        from shardmill.store.client import open_store

        store, root = open_store(settings.s3), settings.s3.root(build.name)
        keys: list[str] = []
        try:
            found = fetch_manifest(store, settings.s3, build, shard)
            objects = found[0].objects if found is not None else ()
            keys = [item.key for item in objects if item.key is not None and item.key.startswith(root)]
        except DataError as error:
            log.warning("%s", error)
        store.delete([manifest_key(settings.s3, build, shard)])
        store.delete(keys)
    build.manifest(shard).unlink(missing_ok=True)


def _publish(store: Store, s3: S3, build: BuildPaths, ours: Manifest) -> None:
    from shardmill.store.claims import claim_key
    from shardmill.store.restore import fetch_manifest, manifest_key, take_shard

    try:
        found = fetch_manifest(store, s3, build, ours.shard)
    except DamagedFile as error:
        log.warning("%s It is replaced by that of this machine.", error)
        store.delete([manifest_key(s3, build, ours.shard)])
        found = None
    uploaded: list[str] = []
    if found is None:
        began = time.monotonic()
        with ThreadPoolExecutor(len(ours.objects)) as pool:
            uploaded += pool.map(lambda item: _upload(store, build, item), ours.objects)
        size, spent = sum(item.size for item in ours.objects), time.monotonic() - began
        log.info("Shard %s: %.1f MB uploaded and checked in %.1f s.", ours.shard, size / 1e6, spent)
        note_upload(build, ours.shard, size, spent)
        found, seen = _create_manifest(store, s3, build, ours)
        if seen:
            uploaded.clear()
    if found[0].same_content(ours):
        write_bytes(build.manifest(ours.shard), found[1])
    else:
        log.warning("Shard %s was published by another machine first: its files are taken.", ours.shard)
        _forget(store, uploaded, found[0])
        take_shard(store, build, *found)
    _end_claim(store, claim_key(s3, build, ours.shard))


def _upload(store: Store, build: BuildPaths, item: Entry) -> str:
    from shardmill.store.transfer import upload_file

    assert item.key is not None
    upload_file(store, item.key, build.root / item.path, item.sha256)
    return item.key


def _create_manifest(store: Store, s3: S3, build: BuildPaths, ours: Manifest) -> tuple[tuple[Manifest, bytes], bool]:
    """The manifest that stands in the store afterwards, ours or another machine's, and whether ours was seen there.

    Where it was, if only until another machine wrote over it, a reader may go by it, and its objects must stay.
    It is read back, since a store without conditional writes doesn't say who was first; and created again when there is
    none, since S3 answers 409 while another machine's write, which may yet fail, is under way.
    """
    from shardmill.store.restore import fetch_manifest, manifest_key

    key = manifest_key(s3, build, ours.shard)
    seen = False
    for _ in range(_CREATIONS):
        seen = store.create(key, ours.to_bytes()) or seen
        found = fetch_manifest(store, s3, build, ours.shard)
        if found is not None:
            return found, seen
        time.sleep(1.0)
    raise StoreError(f"{store.url(key)} is not at {store.host} although it was just written: run again.")


def _end_claim(store: Store, key: str) -> None:
    """A published shard needs no claim; one that can't be deleted expires."""
    try:
        store.delete([key])
    except StoreError as error:
        log.warning("The claim of a published shard is left, and expires. %s", error)


def _forget(store: Store, uploaded: list[str], winner: Manifest) -> None:
    """Deletes the loser's objects, which no manifest will ever name. They do no harm where that is not allowed."""
    named = {item.key for item in winner.objects}
    try:
        store.delete([key for key in uploaded if key not in named])
    except StoreError as error:
        log.warning("Objects that no manifest names are left, `shardmill inventory` shows them. %s", error)
