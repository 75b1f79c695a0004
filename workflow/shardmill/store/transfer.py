"""Files to the store and back, checked by content at both ends."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from shardmill.errors import BadObject, StoreError
from shardmill.files import atomic_path
from shardmill.store.answers import Head
from shardmill.store.client import TORN, Store

log = logging.getLogger(__name__)

# Larger objects go up in parts of this size. 10,000 parts, S3's most, are 160 GB.
PART_BYTES = 16 << 20
_PARTS_AT_ONCE = 4
_DOWNLOADS = 5
_CHUNK = 1 << 20


class _Wrong(Exception):
    """What was downloaded is not what it should be."""


class _Torn(_Wrong):
    """It broke off on its way."""


def upload_file(store: Store, key: str, path: Path, sha256: str) -> None:
    """Uploads `path` with its sha256 in the metadata, then checks size and checksum as the store reports them.

    Raises StoreError when the store holds something else afterwards, or when the file no longer has the digest.
    """
    size = path.stat().st_size
    if size <= PART_BYTES:
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise _changed(path)
        etag = store.put(key, content, sha256=sha256)
    else:
        etag = _upload_parts(store, key, path, sha256)
    head = store.head(key)
    if head is None:
        raise StoreError(f"{store.url(key)} is not at {store.host} although it was just uploaded: run again.")
    if not _holds(store, key, head, size, sha256, etag):
        raise StoreError(
            f"{store.url(key)} was uploaded, but {store.host} reports another size or checksum ({head.size} bytes, "
            f"{size} sent): run again; if it stays so, something between here and the store changes what is sent."
        )


def download_file(store: Store, key: str, path: Path, size: int | None = None, sha256: str | None = None) -> str:
    """Downloads an object to `path`, which appears whole, with the expected size and sha256, or not at all.

    Without `sha256` the digest in the object's metadata is expected. What is torn or wrong is tried again. Returns the
    sha256. Raises BadObject when there is no such object or it is wrong, StoreError when it stays torn.
    """
    problem: _Wrong
    for attempt in range(1, _DOWNLOADS + 1):
        try:
            with store.asking("GetObject", key), atomic_path(path) as temporary:
                return _fetch(store, key, temporary, size, sha256)
        except _Wrong as error:
            problem = error
            log.warning("Download %d of %s went wrong: %s.", attempt, store.url(key), problem)
    raise (StoreError if isinstance(problem, _Torn) else BadObject)(
        f"{store.url(key)} at {store.host} could not be downloaded whole in {_DOWNLOADS} attempts: {problem}. "
        f"`shardmill verify --deep` tells whether the store still holds what was published."
    )


def digest_object(store: Store, key: str) -> str:
    """sha256 of an object as the store gives it out, nothing written here. Raises StoreError when it stays torn."""
    problem = ""
    for _ in range(_DOWNLOADS):
        try:
            with store.asking("GetObject", key):
                return _stream(store, key, lambda chunk: None)[1]
        except _Wrong as error:
            problem = str(error)
    raise StoreError(f"{store.url(key)} at {store.host} could not be read in {_DOWNLOADS} attempts: {problem}.")


def _fetch(store: Store, key: str, path: Path, size: int | None, sha256: str | None) -> str:
    with path.open("wb") as target:
        got, digest, promised = _stream(store, key, target.write)
    if size is not None and got != size:
        raise _Wrong(f"it has {got} bytes and not {size}")
    expected = sha256 or promised or digest
    if digest != expected:
        raise _Wrong(f"its sha256 is {digest} and not {expected}")
    return digest


def _stream(store: Store, key: str, write: Callable[[bytes], object]) -> tuple[int, str, str | None]:
    """Reads an object to its end: its size, its sha256, and the sha256 in its metadata."""
    opened = store.open(key)
    if opened is None:
        raise BadObject(
            f"{store.url(key)} does not exist at {store.host}: `shardmill verify --repair` uploads it again where "
            f"the shard lies whole; else `shardmill discard` has it made again."
        )
    body, promised_size, promised_sha256 = opened
    digest, got = hashlib.sha256(), 0
    try:
        for chunk in body.iter_chunks(_CHUNK):
            digest.update(chunk)
            write(chunk)
            got += len(chunk)
    except TORN as error:
        raise _Torn(f"it broke off after {got} bytes ({type(error).__name__})") from None
    finally:
        body.close()
    if got != promised_size:
        raise _Torn(f"it has {got} bytes, {promised_size} were promised")
    return got, digest.hexdigest(), promised_sha256


def _upload_parts(store: Store, key: str, path: Path, sha256: str) -> str:
    """Uploads in parts; returns the ETag that S3 gives such an object. Nothing is left behind on an error."""
    _abort_earlier(store, key)
    upload_id = store.begin(key, sha256)
    try:
        etags: list[str] = []
        digests: list[bytes] = []
        whole = hashlib.sha256()
        parts = enumerate(_parts(path), 1)
        with ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
            while batch := list(islice(parts, _PARTS_AT_ONCE)):
                for _, content in batch:
                    whole.update(content)
                    digests.append(hashlib.md5(content, usedforsecurity=False).digest())
                etags += pool.map(lambda part: store.put_part(key, upload_id, *part), batch)
        if whole.hexdigest() != sha256:
            raise _changed(path)
        store.complete(key, upload_id, etags)
    except BaseException:
        _abort(store, key, upload_id)
        raise
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


def _abort_earlier(store: Store, key: str) -> None:
    """Ends what a killed attempt left under this key, which carries the content's digest. Not needed to go on."""
    try:
        for unfinished in store.unfinished(key) or ():
            if unfinished.key == key:
                log.warning("An earlier upload of %s was never ended: it is aborted.", store.url(key))
                store.abort(unfinished.key, unfinished.upload_id)
    except StoreError as error:
        log.warning("Earlier uploads of %s can't be looked for. %s", store.url(key), error)


def _abort(store: Store, key: str, upload_id: str) -> None:
    try:
        store.abort(key, upload_id)
    except StoreError as error:
        log.warning(
            "The broken-off upload of %s could not be aborted; `shardmill inventory` shows it until it is. %s",
            store.url(key),
            error,
        )


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while content := stream.read(PART_BYTES):
            yield content


def _holds(store: Store, key: str, head: Head, size: int, sha256: str, etag: str) -> bool:
    """Whether the object is the one that was sent, by all that the store tells; by its content when that is nothing."""
    if head.size != size:
        return False
    if head.sha256 is not None and head.sha256 != sha256:
        return False
    if head.etag_is_md5:
        return head.etag == etag
    if head.sha256 is not None:
        return True
    return digest_object(store, key) == sha256


def _changed(path: Path) -> StoreError:
    return StoreError(f"{path} changed while it was being uploaded: run again.")
