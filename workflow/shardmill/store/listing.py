"""What the store holds of a build, from one paginated listing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import orjson

from shardmill.paths import BuildPaths, shard_names
from shardmill.settings import Settings
from shardmill.store.answers import Listed
from shardmill.store.client import Store
from shardmill.store.discarded import discarded_among

_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Published:
    """Shards whose manifest is in the store, those of them for which another one is on this machine, and those that
    were taken out (`discard`, `retry`) and not made again yet, so that a copy on this machine doesn't count.

    `has_facts` asks for the build's counts and model, which few plans need to know of: one request.
    """

    shards: frozenset[str] = frozenset()
    otherwise_here: frozenset[str] = frozenset()
    taken_out: frozenset[str] = frozenset()
    has_facts: Callable[[], bool] = field(default=lambda: True, compare=False)


def published(settings: Settings, build: BuildPaths) -> Published:
    """What is published of a build: a request for each 1,000 shards, and one for each manifest that seems to differ.

    One more, where a shard that is finished here is not there: whether it was taken out.

    Raises StoreError when the store can't be read for whatever reason: that must never look like an empty store, or
    everything would be planned again.
    """
    store = Store(settings.s3, hasty=True)
    listed = dict(_manifests(store, settings, build))
    here = [shard for shard in shard_names(settings.prompts.shards) if build.manifest(shard).exists()]
    both = [shard for shard in here if shard in listed]
    gone = [shard for shard in here if shard not in listed]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        same = pool.map(lambda shard: _is_here(store, listed[shard], build, shard), both)
        others = frozenset(shard for shard, is_same in zip(both, same, strict=True) if not is_same)
    taken_out = discarded_among(settings, build, gone) if gone else set()
    return Published(frozenset(listed), others, frozenset(taken_out), lambda: _has_facts(store, settings, build))


def _manifests(store: Store, settings: Settings, build: BuildPaths) -> Iterator[tuple[str, Listed]]:
    # The prefix ends with a slash, so that `run1` doesn't also find `run10`.
    prefix = f"{settings.s3.root(build.name)}manifests/"
    for listed in store.objects(prefix):
        name = listed.key[len(prefix) :]
        if name.endswith(".json") and "/" not in name:
            yield name.removesuffix(".json"), listed


def _has_facts(store: Store, settings: Settings, build: BuildPaths) -> bool:
    found = store.get(f"{settings.s3.root(build.name)}build.json")
    if found is None:
        return False
    try:
        facts = orjson.loads(found.body)
        return bool(facts["counts"] and facts["model"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return False


def _is_here(store: Store, listed: Listed, build: BuildPaths, shard: str) -> bool:
    """Whether the manifest of this machine is the store's, which are the same bytes then."""
    content = build.manifest(shard).read_bytes()
    if listed.size != len(content):
        return False
    if listed.etag == hashlib.md5(content, usedforsecurity=False).hexdigest():
        return True
    # Another one, or a store whose ETags are no MD5 (KMS).
    found = store.get(listed.key)
    return found is not None and found.body == content
