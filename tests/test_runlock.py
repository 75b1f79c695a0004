"""The run's lock: one holder, known by name, free the moment its process is gone."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardmill import runlock

HOLD = """
import sys, time
from pathlib import Path
from shardmill import runlock
lock = runlock.acquire(Path(sys.argv[1]), runlock.myself("snakemake --cores 7"))
print("held", flush=True)
time.sleep(60)
"""


def test_second_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    assert runlock.holder(path) is None
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            with pytest.raises(runlock.Held, match=rf"snakemake --cores 7 \(pid {process.pid} on "):
                runlock.acquire(path)
            who = runlock.holder(path)
            assert who is not None and who["pid"] == process.pid
        finally:
            process.kill()
    assert runlock.holder(path) is None
    with runlock.acquire(path):
        assert runlock.holder(path) is not None


def test_looking_never_refuses_a_taker(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            runlock.holder(path)

    watchers = [threading.Thread(target=look) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(50):
            runlock.acquire(path).release()
    finally:
        done.set()
        for watcher in watchers:
            watcher.join()


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = runlock.acquire(path)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        lock.release()
        try:
            assert runlock.holder(path) is None
        finally:
            child.kill()
