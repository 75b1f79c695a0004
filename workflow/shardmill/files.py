"""Files that appear whole or not at all, and their digests."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from shardmill.errors import DamagedFile

_CHUNK = 4 << 20
# Files of a build that a run makes when they are missing.
_MADE_AGAIN = {
    "build.json": "delete it, and the next run makes it again from the dataset",
    "pilot.json": "delete it, and the next run makes it again from the rows",
    "report.json": "delete it, and the next run makes it again from the rows",
}


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; it takes the place of `path`, fsynced, when the block ends well.

    On an error the temporary file goes and `path` stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    write_bytes(path, content.encode())


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, keys in the order given, NaN never written (orjson writes null)."""
    write_bytes(path, orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, which is what all of ours hold. Raises DamagedFile for anything else."""
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(value, dict):
        raise _damaged(path, "it holds no JSON object")
    return value


def _damaged(path: Path, problem: str) -> DamagedFile:
    way = _MADE_AGAIN.get(path.name, "put a whole copy back, or `shardmill verify` says more")
    return DamagedFile(f"{path} is damaged ({problem}): {way}.")


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def canonical_json(value: Any) -> bytes:
    """The one byte string of a JSON value: keys sorted, no spaces. What digests are taken of."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def sha256_json(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sync(path: Path) -> None:
    """Brings a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
