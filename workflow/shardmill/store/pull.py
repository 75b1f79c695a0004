"""A finished or partial build from the store onto this machine, verified, and resumed where it was broken off."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from shardmill.errors import ShardmillError, StoreError
from shardmill.files import sha256_file
from shardmill.paths import BuildPaths, shard_index
from shardmill.settings import Settings
from shardmill.store.answers import Listed
from shardmill.store.client import Store
from shardmill.store.restore import fetch_manifest, take_shard
from shardmill.store.transfer import download_file

_THREADS = 8
# Files of the build that are no shard's. Logs and progress stay in the store.
_FOLDERS = ("quality/", "prompts/")


@dataclass
class Pulled:
    """What truly came. `shards` is the build's own count, None when nothing tells it."""

    shards: int | None
    published: int
    complete: list[str] = field(default_factory=list)
    files: int = 0
    downloaded: int = 0  # bytes
    problems: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return not self.problems and self.published > 0 and len(self.complete) == self.shards


def find_build(settings: Settings, name: str) -> list[Listed]:
    """Everything that the store holds of a build. Raises StoreError when it can't be listed, or holds no such build."""
    store, root = Store(settings.s3), settings.s3.root(name)
    listing = list(store.objects(root))
    if not listing:
        prefix = root.removesuffix(f"{name}/")
        builds = [folder[len(prefix) :].rstrip("/") for folder in store.folders(prefix)]
        close = difflib.get_close_matches(name, builds, n=1)
        hint = f"did you mean {close[0]}?" if close else "`shardmill inventory` lists what is there."
        raise StoreError(f"There is no build {name} in {store.url(prefix)} at {store.host}: {hint}")
    return listing


def pull_build(
    settings: Settings, build: BuildPaths, listing: Sequence[Listed], progress: Callable[[int, int], None]
) -> Pulled:
    """Brings every published shard and the build's own files here. What is here and right is not fetched again.

    `listing` is of `find_build`. `progress` is called with shards done and shards in all. One shard's trouble doesn't
    stop the others: it stands in `problems`.
    """
    store, root = Store(settings.s3), settings.s3.root(build.name)
    names = sorted(shard for listed in listing if (shard := _shard_of(listed.key[len(root) :])) is not None)
    pulled = Pulled(int(names[0].rpartition("-")[2]) if names else None, len(names))

    def take(shard: str) -> tuple[str, int | str]:
        try:
            found = fetch_manifest(store, settings.s3, build, shard)
            if found is None:
                return shard, "its manifest went while it was pulled"
            return shard, take_shard(store, build, *found)
        except ShardmillError as error:
            return shard, str(error)

    with ThreadPoolExecutor(_THREADS) as pool:
        for done, (shard, outcome) in enumerate(pool.map(take, names), 1):
            if isinstance(outcome, int):
                pulled.complete.append(shard)
                pulled.downloaded += outcome
            else:
                pulled.problems.append(f"{shard}: {outcome}")
            progress(done, len(names))
    for listed in listing:
        _take_file(store, build, root, listed, pulled)
    return pulled


def _take_file(store: Store, build: BuildPaths, root: str, listed: Listed, pulled: Pulled) -> None:
    relative = listed.key[len(root) :]
    wanted = "/" not in relative or relative.startswith(_FOLDERS)
    if not wanted or not relative or ".." in relative.split("/"):
        return
    path = build.root / relative
    try:
        head = store.head(listed.key)
        same = head is not None and path.exists() and path.stat().st_size == head.size
        if not (same and head is not None and head.sha256 == sha256_file(path)):
            download_file(store, listed.key, path)
            pulled.downloaded += path.stat().st_size
        pulled.files += 1
    except StoreError as error:
        pulled.problems.append(f"{relative}: {error}")


def _shard_of(relative: str) -> str | None:
    if not (relative.startswith("manifests/") and relative.endswith(".json")):
        return None
    name = relative[len("manifests/") : -len(".json")]
    try:
        shard_index(name)
    except ValueError:
        return None
    return name
