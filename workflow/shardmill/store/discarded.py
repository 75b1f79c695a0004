"""The mark of a shard that was taken out: until it is finished anew, no older row and no copy is taken for it.

What was thrown away may have come from an older build, and would come from there again, or lie on another machine,
whose run would publish it again. The mark lies in the run folder and, with a bucket, as a small object
`discarded/<shard>` of the build, since another machine may be the one that makes the shard. It says nothing about what
a build is, and is no part of the identity.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from shardmill.errors import StoreError
from shardmill.paths import BuildPaths
from shardmill.settings import Settings

log = logging.getLogger(__name__)


def mark_discarded(settings: Settings, build: BuildPaths, shard: str) -> None:
    """Raises StoreError when the store refuses; nothing is marked then."""
    if settings.s3.used:
        from shardmill.store.client import open_store

        open_store(settings.s3).put(_key(settings, build, shard), b"discarded\n", "text/plain")
    _mark_here(build, shard)


def is_discarded(settings: Settings, build: BuildPaths, shard: str) -> bool:
    """Whether the shard is to be made without older rows, for the job that makes it. One request with a bucket."""
    if build.discarded(shard).exists():
        return True
    if not settings.s3.used:
        return False
    from shardmill.store.client import open_store

    if open_store(settings.s3).head(_key(settings, build, shard)) is None:
        return False
    # Whoever finishes the shard ends the mark, and knows by this one that there is one.
    _mark_here(build, shard)
    return True


def discarded_among(settings: Settings, build: BuildPaths, shards: Iterable[str]) -> set[str]:
    """Those of `shards` that are marked, here or in the store: one listing, for the plan."""
    marked = {shard for shard in shards if build.discarded(shard).exists()}
    if settings.s3.used:
        from shardmill.store.client import Store

        prefix = _key(settings, build, "")
        stored = {listed.key[len(prefix) :] for listed in Store(settings.s3, hasty=True).objects(prefix)}
        marked |= stored.intersection(shards)
    return marked


def end_mark(settings: Settings, build: BuildPaths, shard: str) -> None:
    """For a shard that is finished. A mark that can't be deleted stays: it may cost answers, and spoils nothing."""
    if not build.discarded(shard).exists():
        return
    if settings.s3.used:
        from shardmill.store.client import open_store

        try:
            open_store(settings.s3).delete([_key(settings, build, shard)])
        except StoreError as error:
            log.warning("The mark of %s as discarded is left in the store. %s", shard, error)
    build.discarded(shard).unlink()


def _mark_here(build: BuildPaths, shard: str) -> None:
    build.discarded(shard).parent.mkdir(parents=True, exist_ok=True)
    build.discarded(shard).touch()


def _key(settings: Settings, build: BuildPaths, shard: str) -> str:
    return f"{settings.s3.root(build.name)}discarded/{shard}"
