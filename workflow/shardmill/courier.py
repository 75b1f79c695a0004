"""Progress and logs of a run at work, to the store every minute: its node can be thrown away at any moment.

What other machines on the build have sent comes back with the same round, for `status`.

A thread of the process that runs the workflow, which sees what all jobs write down. What it can't send costs nothing
but the sending: generation never waits for it, and a store that refuses is told of once.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from shardmill.errors import ShardmillError
from shardmill.home import Home
from shardmill.paths import BuildPaths
from shardmill.settings import Settings
from shardmill.status.elsewhere import look_elsewhere
from shardmill.status.shards import Here, ManifestCache, Stage, look
from shardmill.store.claims import owner_of

if TYPE_CHECKING:
    from shardmill.store.client import Store

EVERY_S = 60.0
# Of a longer log its beginning and its end: a server writes for hours, and is sent again each minute.
_HEAD_BYTES = 256 << 10
_TAIL_BYTES = 4 << 20
_THREADS = 4
_LAST_WORDS_S = 30.0

Stamp = tuple[int, int]  # a file's time (ns) and size


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    key: str
    stamp: Stamp


class Courier:
    """Runs from `start` to `stop`. Does nothing without a bucket."""

    def __init__(self, settings: Settings, build: BuildPaths, every_s: float = EVERY_S) -> None:
        self._settings = settings
        self._build = build
        self._every_s = every_s
        self._machine = f"{platform.node()}-{owner_of(build)[:8]}"
        self._root = settings.s3.root(build.name)
        self._sent: dict[str, Stamp] = {}
        self._before = _time_of(build.couriered)
        self._began = time.time()
        self._manifests = ManifestCache()
        self._store: Store | None = None
        self._told = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Sends what is left, and gives up on a store that takes too long."""
        self._ending.set()
        self._thread.join(_LAST_WORDS_S)

    def _run(self) -> None:
        ending = False
        while not ending:
            ending = self._ending.wait(self._every_s)
            try:
                self._round("ended" if ending else "running")
            except ShardmillError as error:
                self._tell(str(error))
            except OSError as error:
                self._tell(f"{error.filename or self._build.root}: {error.strerror}.")

    def _round(self, state: str) -> None:
        from shardmill.store.client import Store

        began = time.time_ns()
        store = self._store = self._store or Store(self._settings.s3, hasty=True)
        changed = [file for file in self._files() if self._is_new(file)]
        with ThreadPoolExecutor(_THREADS) as pool:
            for file in pool.map(lambda file: self._send(store, file), changed):
                self._sent[file.key] = file.stamp
        folder = f"{self._root}progress/"
        own = f"{folder}{self._machine}.json"
        store.put(own, orjson.dumps(self._progress(state)), "application/json")
        look_elsewhere(store, folder, own, self._build)
        # A run that goes on from here sends no log twice.
        self._build.couriered.touch()
        os.utime(self._build.couriered, ns=(began, began))

    def _files(self) -> Iterator[_File]:
        home, logs = Home.of(self._settings), f"{self._root}logs/{self._machine}/"
        for folder, prefix in ((self._build.logs, logs), (home.logs, f"{logs}servers/")):
            for path in folder.rglob("*"):
                yield from _file(path, prefix + path.relative_to(folder).as_posix())
        yield from _file(home.log, f"{logs}servers/{home.log.name}")

    def _is_new(self, file: _File) -> bool:
        sent = self._sent.get(file.key)
        return file.stamp != sent if sent is not None else file.stamp[0] > self._before

    def _send(self, store: Store, file: _File) -> _File:
        store.put(file.key, _ends_of(file.path), "text/plain; charset=utf-8")
        return file

    def _progress(self, state: str) -> dict[str, Any]:
        now, here = time.time(), Here.of(self._build)
        shards = look(self._settings, self._build, here, self._manifests, state == "running", now)
        stages = Counter(shard.stage for shard in shards)
        return {
            "build": self._build.name,
            "machine": self._machine,
            "pid": os.getpid(),
            "state": state,
            "started_at": self._began,
            "updated_at": now,
            "shards": {stage.value: stages[stage] for stage in Stage},
            "jobs": [shard.progress for shard in shards if shard.stage is Stage.GENERATING],
        }

    def _tell(self, why: str) -> None:
        if not self._told:
            self._told = True
            sys.stderr.write(
                f"Progress and logs don't reach the store; nothing waits for that, it is tried again. {why}\n"
            )


def start_courier(settings: Settings, build: BuildPaths) -> Courier | None:
    """None without a bucket."""
    if not settings.s3.used:
        return None
    courier = Courier(settings, build)
    courier.start()
    return courier


def _file(path: Path, key: str) -> Iterator[_File]:
    """Nothing for a folder, an empty file, or one that went."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    if status.st_size and path.is_file():
        yield _File(path, key, (status.st_mtime_ns, status.st_size))


def _ends_of(path: Path) -> bytes:
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        if size <= _HEAD_BYTES + _TAIL_BYTES:
            return stream.read()
        head = stream.read(_HEAD_BYTES)
        stream.seek(size - _TAIL_BYTES)
        left_out = size - _HEAD_BYTES - _TAIL_BYTES
        return head + b"\n[... %d bytes are left out here ...]\n" % left_out + stream.read(_TAIL_BYTES)


def _time_of(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
