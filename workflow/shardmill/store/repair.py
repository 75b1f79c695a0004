"""What is damaged in the store and whole here goes up again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from shardmill.paths import BuildPaths
from shardmill.settings import Settings
from shardmill.store.publish import publish_shard
from shardmill.store.restore import manifest_key
from shardmill.store.verify import Problem, Verified
from shardmill.wording import counted

# A run sees by itself, from a listing of the manifests, what concerns them. Objects it takes to be as they were sent.
_OF_OBJECTS = {"missing", "size", "hash"}


def to_upload_again(found: Verified) -> tuple[str, ...]:
    """Shards with an object that is missing or wrong in the store, and all right here."""
    spoilt = {_shard(problem) for problem in found.problems if _is_object(problem)}
    return tuple(shard for shard in sorted(spoilt) if shard not in found.wrong and shard not in found.unfinished)


def upload_again(settings: Settings, build: BuildPaths, shard: str) -> None:
    """Takes the manifest back first, so that no reader goes by it meanwhile. For the holder of the build's lock.

    Raises StoreError when the store refuses; killed in between, the next run publishes the shard.
    """
    from shardmill.store.client import open_store

    open_store(settings.s3).delete([manifest_key(settings.s3, build, shard)])
    publish_shard(settings, build, shard)


def ways_out(found: Verified) -> Iterator[str]:
    """What to do about the problems, a sentence for each kind that there is."""
    if again := to_upload_again(found):
        shards = counted(len(again), "shard")
        yield f"`shardmill verify --repair` uploads again what is wrong in the store and whole here ({shards})."
    if any(item.kind == "discarded" for item in found.problems):
        yield "The next run of snakemake makes again what was taken out, unless another machine has by then."
    of_manifests = [item for item in found.problems if item.where == "store" and not _is_object(item)]
    if any(item.kind not in ("extra", "discarded") for item in of_manifests):
        yield "The next run of snakemake publishes what the store lacks, and takes the store's shard where it differs."
    if found.wrong:
        source = "restores them from the store" if found.store else "makes them again"
        yield f"Delete the wrong files here, and the next run {source}."
    if any(item.kind == "extra" for item in found.problems):
        yield "What no manifest names harms nothing; in the store, `shardmill inventory` lists it and can delete it."


def _is_object(problem: Problem) -> bool:
    return problem.where == "store" and problem.kind in _OF_OBJECTS and "manifests/" not in problem.path


def _shard(problem: Problem) -> str:
    return PurePosixPath(problem.path).name.partition(".")[0]
