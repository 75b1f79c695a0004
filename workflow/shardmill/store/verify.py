"""A build's files, here and in the store, against its manifests. Changes nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardmill.errors import DataError, StoreError, is_machines
from shardmill.files import sha256_file
from shardmill.paths import BuildPaths, shard_names
from shardmill.settings import Settings
from shardmill.store.discarded import discarded_among
from shardmill.store.manifest import KINDS, Entry, Manifest, refuse_renamed

if TYPE_CHECKING:
    from shardmill.store.client import Store

_THREADS = 8


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `kind`: missing, extra, size, hash, unreadable, counts, or differs."""

    where: str  # 'here' | 'store'
    kind: str
    path: str
    detail: str

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.path}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Verified:
    """What was looked at, and what was wrong with it. Unfinished shards are no problem.

    Each shard is whole here, wrong here, or without a manifest here.
    """

    shards: int
    whole: int
    wrong: tuple[str, ...]
    unfinished: tuple[str, ...]
    store: int | None  # shards with a manifest in the store; None without one
    problems: tuple[Problem, ...]


def verify_build(settings: Settings, build: BuildPaths, deep: bool = False) -> Verified:
    """Checks every finished shard: files there and in the store, sizes, local sha256, footers and counts.

    `deep` also reads every Parquet file to its end, counts its rows by status, and downloads every object to hash it.
    Raises StoreError when the store can't be read at all, DataError when the build's folder was renamed.
    """
    refuse_renamed(build)
    shards = shard_names(settings.prompts.shards)
    present = [shard for shard in shards if build.manifest(shard).exists()]
    found_here = dict(zip(present, _each(partial(_local_shard, build, deep), present), strict=True))
    wrong = tuple(shard for shard, problems in found_here.items() if problems)
    problems = [*itertools.chain.from_iterable(found_here.values()), *_local_extra(build, shards)]
    published = None
    if settings.s3.used:
        found, more = _verify_store(settings, build, shards, deep)
        published = len(found)
        problems += more
        problems += _not_published(settings, build, [shard for shard in present if shard not in found])
    unfinished = tuple(shard for shard in shards if shard not in found_here)
    return Verified(len(shards), len(present) - len(wrong), wrong, unfinished, published, tuple(problems))


def _not_published(settings: Settings, build: BuildPaths, shards: list[str]) -> Iterator[Problem]:
    """`shards`: finished here, without a manifest in the store."""
    taken_out = discarded_among(settings, build, shards) if shards else set()
    for shard in shards:
        path = f"manifests/{shard}.json"
        if shard in taken_out:
            yield Problem("store", "discarded", path, "taken out by `discard` or `retry`: the copy here is void")
        else:
            yield Problem("store", "missing", path, "finished on this machine, and not published there")


def _each(check: Callable[[str], list[Problem]], names: Iterable[str]) -> list[list[Problem]]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(check, names))


def _local_shard(build: BuildPaths, deep: bool, shard: str) -> list[Problem]:
    path = build.manifest(shard)
    try:
        manifest = Manifest.from_bytes(path.read_bytes(), build.name, shard, str(path))
    except DataError as error:
        return [Problem("here", "unreadable", f"manifests/{shard}.json", str(error))]
    problems = []
    for item in manifest.objects:
        problems += _local_file(build.root / item.path, item, manifest, deep)
    return problems


def _local_file(path: Path, item: Entry, manifest: Manifest, deep: bool) -> list[Problem]:
    def problem(kind: str, detail: str) -> list[Problem]:
        return [Problem("here", kind, item.path, detail)]

    if not path.is_file():
        return problem("missing", "its manifest names it")
    size = path.stat().st_size
    if size != item.size:
        return problem("size", f"{size} bytes, its manifest says {item.size}")
    sha256 = sha256_file(path)
    if sha256 != item.sha256:
        return problem("hash", f"sha256 is {sha256}, its manifest says {item.sha256}")
    return _parquet(path, item, manifest, deep, problem)


def _parquet(
    path: Path, item: Entry, manifest: Manifest, deep: bool, problem: Callable[[str, str], list[Problem]]
) -> list[Problem]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from shardmill.schemas import COMPLETIONS, TOKENS

    schema = COMPLETIONS if item.kind == "completions" else TOKENS
    try:
        with pq.ParquetFile(path) as parquet:
            rows = parquet.metadata.num_rows
            if not parquet.schema_arrow.equals(schema):
                return problem("unreadable", f"its columns are not those of {item.kind}")
            counts = Counter[str | None]()
            for batch in parquet.iter_batches() if deep else ():
                counts.update(batch.column("status").to_pylist() if item.kind == "completions" else ())
    except (pa.ArrowException, OSError) as error:
        if is_machines(error):
            raise
        return problem("unreadable", f"not a whole Parquet file ({type(error).__name__})")
    if rows != item.rows:
        return problem("counts", f"{rows} rows, its manifest says {item.rows}")
    expected = manifest.rows.get("prompts" if item.kind == "completions" else "ok")
    if rows != expected:
        return problem("counts", f"{rows} rows, its manifest counts {expected}")
    if deep and item.kind == "completions":
        for status in ("ok", "failed"):
            if counts[status] != manifest.rows.get(status):
                return problem(
                    "counts", f"{counts[status]} rows are {status}, its manifest says {manifest.rows.get(status)}"
                )
    return []


def _local_extra(build: BuildPaths, shards: list[str]) -> list[Problem]:
    """Files that belong to no shard of this build. Hidden ones are temporary."""
    known = set(shards)
    problems = []
    for kind, suffix in (*((kind, ".parquet") for kind in KINDS), ("manifests", ".json")):
        for path in sorted((build.root / kind).glob("*")):
            name = path.name
            if not name.startswith(".") and not (name.endswith(suffix) and name.removesuffix(suffix) in known):
                problems.append(Problem("here", "extra", f"{kind}/{name}", "no shard of this build has such a file"))
    return problems


def _verify_store(
    settings: Settings, build: BuildPaths, shards: list[str], deep: bool
) -> tuple[set[str], list[Problem]]:
    from shardmill.store.client import Store

    store, root = Store(settings.s3), settings.s3.root(build.name)
    sizes = {listed.key: listed.size for listed in store.objects(root)}
    published = {shard for shard in shards if _stored_manifest(root, shard) in sizes}
    named: set[str] = set()
    by_shard = _each(partial(_stored_shard, store, build, root, sizes, named, deep), sorted(published))
    problems = list(itertools.chain.from_iterable(by_shard))
    unreadable = {problem.path for problem in problems if problem.kind == "unreadable"}
    known = set(shards)
    for key in sorted(sizes):
        kind, _, name = key[len(root) :].partition("/")
        shard = name.partition(".")[0]
        if kind == "manifests" and shard not in known:
            problems.append(Problem("store", "extra", key, "no shard of this build has such a manifest"))
        # An unpublished shard's objects are on their way, or what a killed upload left: inventory shows those.
        on_its_way = shard in known and (shard not in published or _stored_manifest(root, shard) in unreadable)
        if kind in KINDS and key not in named and not on_its_way:
            problems.append(Problem("store", "extra", key, "no manifest names it"))
    return published, problems


def _stored_manifest(root: str, shard: str) -> str:
    return f"{root}manifests/{shard}.json"


def _stored_shard(
    store: Store, build: BuildPaths, root: str, sizes: dict[str, int], named: set[str], deep: bool, shard: str
) -> list[Problem]:
    key = _stored_manifest(root, shard)
    content = store.get(key)
    if content is None:
        return [Problem("store", "missing", key, "it went while this was checked")]
    try:
        manifest = Manifest.from_bytes(content.body, build.name, shard, store.url(key))
    except DataError as error:
        return [Problem("store", "unreadable", key, str(error))]
    problems = []
    local = build.manifest(shard)
    if local.exists() and local.read_bytes() != content.body:
        problems.append(Problem("store", "differs", key, "it is not the manifest on this machine"))
    for item in manifest.objects:
        if item.key is None:
            problems.append(Problem("store", "missing", item.path, "its manifest names no object"))
            continue
        named.add(item.key)
        problems += _stored_object(store, item.key, item, sizes.get(item.key), deep)
    return problems


def _stored_object(store: Store, key: str, item: Entry, size: int | None, deep: bool) -> list[Problem]:
    if size is None:
        return [Problem("store", "missing", key, "its manifest names it")]
    if size != item.size:
        return [Problem("store", "size", key, f"{size} bytes, its manifest says {item.size}")]
    if not deep:
        return []
    from shardmill.store.transfer import digest_object

    try:
        sha256 = digest_object(store, key)
    except StoreError as error:
        return [Problem("store", "unreadable", key, str(error))]
    if sha256 != item.sha256:
        return [Problem("store", "hash", key, f"sha256 is {sha256}, its manifest says {item.sha256}")]
    return []
