"""Copies a model to a RAM disk, so that every start of every server reads it from memory.

A copy appears under its final name only when it is whole (a rename), with a list of its files and their sizes, and is
looked through against its source before it is used again. Nothing else is ever served.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardmill import runlock
from shardmill.errors import ShardmillError
from shardmill.files import read_json, sha256_json, write_json

_LIST = "shardmill-files.json"
_CHUNK = 64 << 20
_MARGIN = 1.02  # file systems need a little besides
_MEMORY_LEFT = 4 << 30  # bytes, for everything else on the machine
_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class File:
    name: str  # relative to the model's folder
    size: int  # bytes
    modified_ns: int


class _Stopped(Exception):
    pass


async def copy(source: Path, cache: Path) -> Path | None:
    """The folder of the model's copy in `cache`, made now if it isn't there; None when it doesn't fit.

    Raises ShardmillError when it should fit and can't be written. Cancelling leaves nothing behind.
    """
    files = list_files(source)
    target = folder_for(source, files, cache)
    stop = threading.Event()
    lock = await _only_one(target.with_name(f".{target.name}.lock"))
    with lock:
        if _is_whole(target, files):
            return target
        work = asyncio.get_running_loop().run_in_executor(None, _make, source, files, target, stop)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([work])
            raise


def list_files(folder: Path) -> list[File]:
    """All files below `folder`, links followed (the hub's snapshots are links), sorted by name."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != _LIST:
            status = path.stat()
            found.append(File(str(path.relative_to(folder)), status.st_size, status.st_mtime_ns))
    return found


def folder_for(source: Path, files: list[File], cache: Path) -> Path:
    """Where a copy of exactly these files lies: another version of the model is another folder."""
    digest = sha256_json([[str(source)], *([file.name, file.size, file.modified_ns] for file in files)])[:10]
    return cache / f"shardmill-{os.getuid()}" / f"{source.name}-{digest}"


def room_for(files: list[File], cache: Path) -> bool:
    """Whether a copy fits, with some to spare. A RAM disk also needs that much memory."""
    needed = int(sum(file.size for file in files) * _MARGIN)
    if shutil.disk_usage(cache).free < needed:
        return False
    return not _in_memory(cache) or psutil.virtual_memory().available - _MEMORY_LEFT > needed


def _make(source: Path, files: list[File], target: Path, stop: threading.Event) -> Path | None:
    partial = target.with_name(f".{target.name}.partial")  # of a copy that was cut: the lock says that nobody makes it
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    if not room_for(files, target.parent):
        return None
    try:
        for file in files:
            _copy_file(source / file.name, partial / file.name, stop)
        write_json(partial / _LIST, _listing(files))
        partial.rename(target)
    except _Stopped:
        shutil.rmtree(partial, ignore_errors=True)
        return None
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ShardmillError(
            f"The model could not be copied to {target.parent} ({error.strerror}): free space there."
        ) from None
    return target


def _copy_file(source: Path, target: Path, stop: threading.Event) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(_CHUNK):
            if stop.is_set():
                raise _Stopped
            writer.write(chunk)


def _listing(files: list[File]) -> dict[str, object]:
    return {"files": [[file.name, file.size, file.modified_ns] for file in files]}


def _is_whole(target: Path, files: list[File]) -> bool:
    try:
        if read_json(target / _LIST) != _listing(files):
            return False
    except (OSError, ValueError):
        return False
    return all((target / file.name).is_file() and (target / file.name).stat().st_size == file.size for file in files)


def _in_memory(folder: Path) -> bool:
    kinds = {partition.mountpoint: partition.fstype for partition in psutil.disk_partitions(all=True)}
    for parent in [folder.resolve(), *folder.resolve().parents]:
        if str(parent) in kinds:
            return kinds[str(parent)] in ("tmpfs", "ramfs")
    return False


async def _only_one(path: Path) -> runlock.RunLock:
    while True:
        try:
            return runlock.acquire(path, runlock.myself("copying a model"))
        except runlock.Held:
            await asyncio.sleep(_WAIT_S)
