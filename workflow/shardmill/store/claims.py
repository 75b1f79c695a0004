"""Claims on shards, so that two machines on one build don't generate the same one.

A claim is a small object with a lease, `claims/<shard>.json`. It is created and taken over by conditional writes where
the store has them; where it hasn't, the last writer wins and is told by reading back after a moment. A claim only
saves work: that nothing is corrupted is up to publishing, which lets the first one win. Ages are by the store's clock.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import orjson

from shardmill.errors import StoreError
from shardmill.files import sha256_json
from shardmill.paths import BuildPaths
from shardmill.settings import S3, Settings
from shardmill.store.patience import hurried

if TYPE_CHECKING:
    from shardmill.store.answers import Content
    from shardmill.store.client import Store

log = logging.getLogger(__name__)

LEASE_S = 120.0
# A generated shard is still to be tokenized and published: the claim outlives the job by this, unless publish ends it.
HANDOVER_S = 300.0
# How long a rival's write may take to be seen in a store without conditional writes.
_SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a shard: a machine, and for how many seconds yet unless it renews."""

    machine: str
    seconds_left: float


class Claim:
    """A shard that is ours to generate. As a context it renews itself; left by an error, it is given back at once."""

    def __init__(self, store: Store | None, key: str, body: dict[str, Any]) -> None:
        self._store = store
        self._key = key
        self._body = body
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost = False

    def __enter__(self) -> Claim:
        if self._store is not None:
            self._thread = threading.Thread(target=self._keep, name=f"claim {self._key}", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._store is None or self.lost:
            return
        if error is not None:
            self.release()
            return
        try:
            with hurried():
                self._renew(HANDOVER_S)
        except StoreError as fault:
            log.warning("The claim %s was not ended; it expires. %s", self._key, fault)

    def release(self) -> None:
        """Gives the shard back, so that another machine needn't wait for the lease to end. A claim that can't be
        deleted, as without the right to, expires."""
        if self._store is None:
            return
        try:
            with hurried():
                if self._is_ours(self._store.get(self._key)):
                    self._store.delete([self._key])
        except StoreError as fault:
            log.warning("The claim %s was not given back; it expires. %s", self._key, fault)

    def _keep(self) -> None:
        lease = float(self._body["lease_s"])
        while not self._ended.wait(lease / 4) and not self.lost:
            try:
                with hurried():
                    self._renew(lease)
            except StoreError as error:
                log.warning("The claim %s could not be renewed, it is tried again. %s", self._key, error)

    def _renew(self, lease_s: float) -> None:
        assert self._store is not None
        found = self._store.get(self._key)
        body = {**self._body, "lease_s": lease_s, "renewed": self._body["renewed"] + 1}
        if found is not None and self._is_ours(found):
            self._store.replace(self._key, orjson.dumps(body), found.etag)
            # Where an answer is lost on its way, the write is repeated, and refused over what it wrote itself.
            found = self._store.get(self._key)
        if not self._is_ours(found):
            self.lost = True
            whose = "is gone from the store" if found is None else "is lost to another machine"
            log.warning("The claim %s %s: whoever publishes the shard first wins.", self._key, whose)
            return
        self._body = body

    def _is_ours(self, found: Content | None) -> bool:
        return found is not None and _parse(found.body).get("token") == self._body["token"]


def claim(settings: Settings, build: BuildPaths, shard: str, lease_s: float = LEASE_S) -> Claim | None:
    """Claims a shard, or None while another machine holds it (`holder` tells which).

    Without a bucket every shard is free. What this folder's own, killed run still holds is taken over at once, since
    the folder's lock admits one run. Raises StoreError when the store refuses.
    """
    body = {
        "owner": owner_of(build),
        "machine": platform.node(),
        "pid": os.getpid(),
        "token": uuid4().hex,
        "lease_s": lease_s,
        "renewed": 0,
    }
    key = claim_key(settings.s3, build, shard)
    if not settings.s3.used:
        return Claim(None, key, body)
    from shardmill.store.client import open_store

    store, content = open_store(settings.s3), orjson.dumps(body)
    found = store.get(key)
    if found is None:
        won = store.create(key, content)
    elif _left(found) <= 0 or _parse(found.body).get("owner") == body["owner"]:
        won = store.replace(key, content, found.etag)
    else:
        return None
    if not won:
        return None
    if store.create(key, content):
        # Writing over what is there: this store has no conditions, and a rival may be writing at this moment.
        time.sleep(_SETTLE_S)
    found = store.get(key)
    if found is None or found.body != content:
        return None
    return Claim(store, key, body)


def holder(settings: Settings, build: BuildPaths, shard: str) -> Holder | None:
    """Who holds a shard at the moment; None when it is free."""
    if not settings.s3.used:
        return None
    from shardmill.store.client import open_store

    found = open_store(settings.s3).get(claim_key(settings.s3, build, shard))
    if found is None or _left(found) <= 0:
        return None
    return Holder(str(_parse(found.body).get("machine", "another machine")), _left(found))


def claim_or_published(settings: Settings, build: BuildPaths, shard: str, poll_s: float = 5.0) -> Claim | None:
    """Waits until the shard is ours (a Claim), or another machine has published it (None: restore it then)."""
    from shardmill.store.restore import is_published

    told = False
    while True:
        ours = claim(settings, build, shard)
        if settings.s3.used and is_published(settings, build, shard):
            if ours is not None:
                ours.release()
            return None
        if ours is not None:
            return ours
        if not told and (other := holder(settings, build, shard)) is not None:
            log.info("Shard %s is being generated on %s; waiting for it.", shard, other.machine)
            told = True
        time.sleep(poll_s)


def claim_key(s3: S3, build: BuildPaths, shard: str) -> str:
    return f"{s3.root(build.name)}claims/{shard}.json"


def _left(found: Content) -> float:
    lease = _parse(found.body).get("lease_s")
    return (float(lease) if isinstance(lease, int | float) else LEASE_S) - found.age_s


def _parse(body: bytes) -> dict[str, Any]:
    """A claim that can't be read is one without an owner: it expires like any other."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def owner_of(build: BuildPaths) -> str:
    """An id of this folder on this machine: over a random number, made when it is first asked for, and where it lies.

    A copy of the folder, as in a snapshot that several nodes start from, has the number and is another owner.
    """
    path = build.owner
    if not path.exists():
        mine = path.with_name(f".{path.name}.{uuid4().hex}")
        mine.parent.mkdir(parents=True, exist_ok=True)
        mine.write_text(uuid4().hex)
        with suppress(FileExistsError):
            # A link appears whole, and only once: several jobs may come here at the same time.
            os.link(mine, path)
        mine.unlink()
    return sha256_json([path.read_text(), platform.node(), str(build.root.resolve())])[:32]
