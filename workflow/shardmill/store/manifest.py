"""A shard's manifest: what was published, by content. Where it is, everything that it names is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from shardmill import __version__
from shardmill.errors import DamagedFile, DataError
from shardmill.facts import build_facts
from shardmill.files import sha256_file
from shardmill.paths import BuildPaths
from shardmill.settings import S3

# Raised when a manifest's meaning changes.
FORMAT = 1

# A shard's files that are published, in the order of publishing. A folder of the build each.
KINDS = ("completions", "tokens")


@dataclass(frozen=True, slots=True)
class Entry:
    """One object. `path` is relative in the build; `key` is the whole S3 key, None in a build without a bucket."""

    kind: str
    path: str
    key: str | None
    size: int  # bytes
    sha256: str
    rows: int


@dataclass(frozen=True, slots=True)
class Manifest:
    build: str
    shard: str
    rows: Mapping[str, int]  # all, and by status: {"prompts": 12, "ok": 11, "failed": 1}
    objects: tuple[Entry, ...]
    created_at: str
    shardmill: str
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    def same_content(self, other: Manifest) -> bool:
        """Whether both name the same objects; when and by which version they were written doesn't matter."""
        return self.objects == other.objects

    @classmethod
    def from_bytes(cls, content: bytes, build: str, shard: str, where: str) -> Manifest:
        """The manifest of `shard` in `build`, read from `where`. Raises DamagedFile for anything else than that,
        DataError for a format of another version.

        Paths are held to the build's own layout: a manifest comes from the store, and must not write elsewhere.
        """
        try:
            values = orjson.loads(content)
            if values["format"] != FORMAT:
                raise DataError(
                    f"The manifest {where} has format {values['format']}, this shardmill reads {FORMAT}: "
                    f"use the version that wrote it ({values.get('shardmill')})."
                )
            manifest = cls(
                build=values["build"],
                shard=values["shard"],
                rows={str(status): int(count) for status, count in values["rows"].items()},
                objects=tuple(_entry(item) for item in values["objects"]),
                created_at=str(values["created_at"]),
                shardmill=str(values["shardmill"]),
            )
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
            raise DamagedFile(f"{where} is not a manifest: {_MEND}.") from None
        if (manifest.build, manifest.shard) != (build, shard):
            raise DamagedFile(f"{where} is the manifest of {manifest.shard} in {manifest.build}: {_MEND}.")
        files = [(kind, f"{kind}/{shard}.parquet") for kind in KINDS]
        if [(item.kind, item.path) for item in manifest.objects] != files:
            raise DamagedFile(f"{where} doesn't name the files of {shard}: {_MEND}.")
        return manifest


_OBJECT = re.compile(r"shard-\d{5,}-of-\d{5,}\.[0-9a-f]{16}\.parquet")
_MEND = "a run where the shard lies whole publishes it again; else `shardmill discard` has it made again"


def is_object_name(name: str) -> bool:
    """Whether an object under a kind's folder can be one that describe_shard named."""
    return _OBJECT.fullmatch(name) is not None


def describe_shard(s3: S3, build: BuildPaths, shard: str) -> Manifest:
    """The manifest of a shard as it lies on disk: reads both files once for their digests and counts.

    Keys carry the first 16 hex digits of the content's sha256, so that two machines that made the same shard never
    overwrite each other's objects.
    """
    import pyarrow.parquet as pq

    from shardmill.schemas import count_rows

    root = s3.root(build.name) if s3.used else None
    objects = []
    for kind, path in ((KINDS[0], build.completions(shard)), (KINDS[1], build.tokens(shard))):
        sha256 = sha256_file(path)
        objects.append(
            Entry(
                kind=kind,
                path=f"{kind}/{shard}.parquet",
                key=f"{root}{kind}/{shard}.{sha256[:16]}.parquet" if root is not None else None,
                size=path.stat().st_size,
                sha256=sha256,
                rows=count_rows(path),
            )
        )
    status = pq.read_table(build.completions(shard), columns=["status"])["status"].to_pylist()
    counts: Counter[str | None] = Counter(status)
    return Manifest(
        build=build.name,
        shard=shard,
        rows={"prompts": len(status), **{name: counts[name] for name in ("ok", "failed")}},
        objects=tuple(objects),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        shardmill=__version__,
    )


def read_manifest(build: BuildPaths, shard: str) -> Manifest:
    """The local manifest. Raises DataError when it is damaged, FileNotFoundError when there is none."""
    path = build.manifest(shard)
    return Manifest.from_bytes(path.read_bytes(), build.name, shard, str(path))


def manifest_matches(build: BuildPaths, shard: str) -> bool:
    """Whether the local manifest is there and its files have the sizes that it names. Cheap: nothing else is read."""
    try:
        manifest = read_manifest(build, shard)
        return all((build.root / item.path).stat().st_size == item.size for item in manifest.objects)
    except (FileNotFoundError, NotADirectoryError, DataError):
        return False


def refuse_renamed(build: BuildPaths) -> None:
    """Raises DataError when the folder has another name than its build: its manifests hold for that name alone."""
    name = build_facts(build).get("build")
    if name is not None and name != build.name:
        raise DataError(
            f"The folder {build.root} holds the build {name} under another name, so that its manifests don't count: "
            f"rename it to {name} (in another folder, should there be one of that name beside it)."
        )


def _entry(item: Mapping[str, Any]) -> Entry:
    key = item["key"]
    if not (isinstance(item["sha256"], str) and len(item["sha256"]) == 64 and (key is None or isinstance(key, str))):
        raise ValueError("not an entry")
    return Entry(item["kind"], item["path"], key, int(item["size"]), item["sha256"], int(item["rows"]))
