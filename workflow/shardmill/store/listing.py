"""What the store holds of a build, from one paginated listing."""

from __future__ import annotations

from shardmill.paths import BuildPaths
from shardmill.settings import Settings
from shardmill.store.manifest import root_key


def published_shards(settings: Settings, build: BuildPaths) -> frozenset[str]:
    """Names of the shards whose manifest is in the store: a request for each 1,000 of them.

    The prefix ends with a slash, so that `run1` doesn't also find `run10`. Raises StoreError when the store can't be
    read for whatever reason: that must never look like an empty store, or everything would be planned again.
    """
    from shardmill.store.client import Store

    prefix = f"{root_key(settings.s3, build.name)}manifests/"
    names = (listed.key[len(prefix) :] for listed in Store(settings.s3, hasty=True).objects(prefix))
    return frozenset(name.removesuffix(".json") for name in names if name.endswith(".json") and "/" not in name)
