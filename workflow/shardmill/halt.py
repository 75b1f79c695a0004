"""A job's word to its run: start nothing more, since every other job would fail as this one did.

The workflow goes on when a job fails (`keep-going` in profiles/default): one that was killed, or whose shard has a
prompt that no server survives, is no reason to leave all other shards undone over a weekend. But with no server left, a
wrong key or a full disk, 1,828 jobs would find that out one after another. Such a job leaves its reason in a file, and
the run, which may be on another machine, then starts no other job and lets those at work end, as it does on SIGTERM.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import Any

import orjson

from shardmill import runlock
from shardmill.files import read_json, write_bytes, write_json
from shardmill.paths import BuildPaths

_LOOK_S = 1.0
_RESERVE_BYTES = 4096
_LONGEST = 600  # characters of a reason in the reserve

_log = logging.getLogger(__name__)


def ask(build: BuildPaths, run: dict[str, Any] | None, why: str) -> None:
    """From a job that `run` (who held the build's lock when it began) has started. Nothing where that run is over."""
    if run is not None and runlock.holder(build.lock) == run:
        try:
            write_json(build.halt, {"why": why})
        except OSError:
            _write_into_reserve(build, why)
        time.sleep(2 * _LOOK_S)  # so that the run knows before this job's end frees a core for the next


def _write_into_reserve(build: BuildPaths, why: str) -> None:
    """On a full disk, which is a reason to halt, the word goes into blocks that the run has taken beforehand."""
    word = orjson.dumps({"why": why[:_LONGEST]})
    try:
        with build.halt_reserve.open("r+b") as reserve:
            reserve.write(word.ljust(_RESERVE_BYTES))
            os.fsync(reserve.fileno())
        build.halt_reserve.replace(build.halt)
    except OSError as error:
        _log.error("The run could not be told to halt (%s): other jobs may fail as this one did.", error)


def note(build: BuildPaths, why: str) -> None:
    """From a job whose own shard alone is in trouble: for the run's last lines."""
    try:
        with build.troubles.open("ab") as stream:
            stream.write(f"{' '.join(why.split())}\n".encode())
    except OSError as error:
        _log.warning("The run's last lines won't repeat this: %s", error)


def noted(build: BuildPaths) -> list[str]:
    """What jobs of the run at work have noted."""
    try:
        return list(dict.fromkeys(build.troubles.read_text(encoding="utf-8").splitlines()))
    except FileNotFoundError:
        return []


def reason(build: BuildPaths) -> str | None:
    """Why a job asked its run to halt; None when none did."""
    try:
        return str(read_json(build.halt)["why"])
    except (OSError, ValueError, KeyError):
        return None


def watch(build: BuildPaths) -> None:
    """For the run itself, once it holds the lock: looks out for such a word as long as the process lives."""
    build.halt.unlink(missing_ok=True)
    build.troubles.unlink(missing_ok=True)
    write_bytes(build.halt_reserve, b" " * _RESERVE_BYTES)
    threading.Thread(target=_watch, args=(build,), daemon=True, name="halt").start()


def _watch(build: BuildPaths) -> None:
    while not build.halt.exists():
        time.sleep(_LOOK_S)
    # Snakemake's own: it starts no more jobs, and waits for those at work. Called from this thread, since it takes a
    # lock that the main thread, which a signal would interrupt, may hold.
    stop = signal.getsignal(signal.SIGTERM)
    if callable(stop):
        stop(signal.SIGTERM, None)
