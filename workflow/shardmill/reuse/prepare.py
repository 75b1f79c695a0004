"""The index of a run: made by the first generate job that needs it, while the others wait, and then only opened.

It is no output of a rule: a lost index would be planned again, and with it, by Snakemake's clocks, more than the shards
that are missing. It is known by what it was made from, so the next run makes it anew only when that has changed.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from shardmill.errors import BadObject
from shardmill.files import read_json, sha256_json, write_json
from shardmill.paths import BuildPaths
from shardmill.plan import Plan
from shardmill.reuse.index import FORMAT, OldFile, write_index
from shardmill.reuse.limits import Limits
from shardmill.reuse.sources import Source, find_sources
from shardmill.settings import Settings

_log = logging.getLogger(__name__)

_THREADS = 8


@dataclass(frozen=True, slots=True)
class Index:
    """An index on disk, and what tells whether it is still the right one."""

    run: str  # the run that it was last found right in
    key: str  # over what it was made from
    rows: int


def prepare_index(settings: Settings, build: BuildPaths) -> Path | None:
    """The index of this run, made if need be; None when no older build has a row for this one.

    Raises StoreError when the store can't be listed.
    """
    run = _run_of(build)
    known = known_index(build)
    if known is None or known.run != run:
        with _alone(build.reuse / "lock"):
            known = known_index(build)
            if known is None or known.run != run:
                known = _prepare(settings, build, run, known)
    return index_path(build) if known.rows else None


def index_path(build: BuildPaths) -> Path:
    return build.reuse / "index.sqlite"


def _description(build: BuildPaths) -> Path:
    return build.reuse / "index.json"


def _prepare(settings: Settings, build: BuildPaths, run: str, known: Index | None) -> Index:
    identity = read_json(build.build_json)["identity"]
    limits = Limits.of(identity)
    sources = find_sources(settings, build, identity, Plan.load(build.plan).generate)
    files = _brought_here(settings, build, sources)
    key = index_key(limits, files)
    if known is not None and known.key == key:
        index = Index(run, key, known.rows)
    else:
        # Never a description of one index beside another one, wherever a kill falls.
        _description(build).unlink(missing_ok=True)
        rows = write_index(index_path(build), files, limits) if files else 0
        index = Index(run, key, rows)
        if files:
            builds = ", ".join(sorted({file.build for file in files}))
            _log.info("%d rows of %s are still right and can be reused.", rows, builds)
    write_json(_description(build), asdict(index))
    return index


def index_key(limits: Limits, files: Sequence[OldFile]) -> str:
    """What an index is made from, as a digest."""
    described = [[file.build, asdict(file.limits), str(file.path), file.sha256] for file in files]
    return sha256_json([FORMAT, asdict(limits), described])


def _brought_here(settings: Settings, build: BuildPaths, sources: list[Source]) -> list[OldFile]:
    """The sources' files on this machine; those in the store alone are downloaded, checked by content."""
    far = [source for source in sources if source.path is None]
    fetched = _download(settings, build, far) if far else {}
    here = [(source, source.path or fetched[source.entry.sha256]) for source in sources]
    return [old_file(source, path) for source, path in here if path is not None]


def old_file(source: Source, path: Path) -> OldFile:
    return OldFile(source.build, source.limits, path, source.entry.sha256)


def downloaded(build: BuildPaths, source: Source) -> Path | None:
    """The file of a source that is in the store alone, when it was fetched already."""
    path = _object(build, source)
    # The name carries the digest by which it was checked when it was downloaded.
    return path if path.exists() and path.stat().st_size == source.entry.size else None


def _object(build: BuildPaths, source: Source) -> Path:
    return build.reuse / "objects" / f"{source.entry.sha256}.parquet"


def _download(settings: Settings, build: BuildPaths, sources: list[Source]) -> dict[str, Path | None]:
    """The files by their sha256, None for one that is missing or wrong in the store.

    Each content once: shards without a row have the same one. Raises StoreError when the store doesn't answer.
    """
    from shardmill.store.client import Store
    from shardmill.store.transfer import download_file

    store = Store(settings.s3)
    _log.info("%d shards of older builds are fetched from %s for what can be reused.", len(sources), store.host)

    def fetch(source: Source) -> Path | None:
        entry, path = source.entry, _object(build, source)
        known = downloaded(build, source)
        if known is not None:
            return known
        assert entry.key is not None
        try:
            download_file(store, entry.key, path, entry.size, entry.sha256)
        except BadObject as error:
            _log.warning("Nothing is reused of %s of %s: %s", source.shard, source.build, error)
            return None
        return path

    once = {source.entry.sha256: source for source in sources}
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(once, pool.map(fetch, once.values()), strict=True))


def _run_of(build: BuildPaths) -> str:
    """Differs from run to run: each writes its plan when it starts."""
    return sha256_json([build.plan.read_text(), build.plan.stat().st_mtime_ns])


def known_index(build: BuildPaths) -> Index | None:
    """The index that is on disk; None where there is none."""
    try:
        index = Index(**read_json(_description(build)))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return index if index.rows == 0 or index_path(build).exists() else None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One job at a time; a lock goes with its process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
