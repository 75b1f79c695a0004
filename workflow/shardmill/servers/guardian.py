"""A server's parent: starts it, and sees to it that nothing of it outlives its fleet.

`python -m shardmill.servers.guardian FILE` with FILE a JSON of `Charge`. A guardian outlives a fleet process that is
killed, so that the answers under way go on and the next fleet can take the server over; without another fleet it stops
the server after `orphan_s`. It holds `Charge.lock` for its life, which is how others know that the server's there.

It is a child subreaper (prctl(2)): whatever the server starts stays its descendant, also with a session of its
own. The kernel kills the server when the guardian is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shardmill import runlock
from shardmill.files import read_json, write_json

_SIGNALS = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_LOOK_S = 1.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Charge:
    """What a guardian is given. Paths are absolute."""

    name: str
    argv: list[str]
    env: dict[str, str]  # laid over the guardian's own
    log: str  # appended to
    record: str  # where it writes what it has started
    lock: str  # held by the guardian
    resource: str | None  # a second lock, of what the server needs for itself alone (a GPU)
    fleet_lock: str  # held by the fleet that the server belongs to
    stay: str  # while this file is there, the server outlives its fleet
    grace_s: float  # from SIGTERM to SIGKILL
    orphan_s: float  # without a fleet
    about: dict[str, Any]  # goes into the record as it is


def main(path: Path) -> int:
    charge = Charge(**read_json(path))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    me = runlock.myself(f"guardian of {charge.name}")
    with contextlib.ExitStack() as locks:
        try:
            locks.enter_context(runlock.acquire(Path(charge.lock), me))
            if charge.resource is not None:
                locks.enter_context(runlock.acquire(Path(charge.resource), me))
        except runlock.Held as held:
            what = Path(charge.resource or charge.lock).stem
            sys.stderr.write(f"{what} is in use by another fleet's server (guardian {held.who.get('pid', '?')})\n")
            return 1
        return _guard(charge, libc)


def _guard(charge: Charge, libc: ctypes.CDLL) -> int:
    me = os.getpid()

    def before_exec() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != me:
            os._exit(1)

    Path(charge.log).parent.mkdir(parents=True, exist_ok=True)
    with Path(charge.log).open("ab") as log:
        server = subprocess.Popen(
            charge.argv,
            env={**os.environ, **charge.env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=before_exec,  # this process has one thread
        )
    record = {
        "name": charge.name,
        "guardian": me,
        "pid": server.pid,
        "started": time.time(),
        "argv": charge.argv,
        "log": charge.log,
        "exit": None,
        **charge.about,
    }
    write_json(Path(charge.record), record)
    code = _wait(charge, server.pid)
    server.returncode = code
    _kill_orphans()
    write_json(Path(charge.record), record | {"exit": code})
    return 0


def _wait(charge: Charge, pid: int) -> int:
    """The server's exit code (negative: the signal). Tells it to stop when told so, or when its fleet stays away."""
    orphan_since: float | None = None
    kill_at: float | None = None
    while True:
        received = signal.sigtimedwait(_SIGNALS, _LOOK_S)
        code = _reap(pid)
        if code is not None:
            return code
        now = time.monotonic()
        if runlock.holder(Path(charge.fleet_lock)) is not None or Path(charge.stay).exists():
            orphan_since = None
        elif orphan_since is None:
            orphan_since = now
        told = received is not None and received.si_signo != signal.SIGCHLD
        orphaned = orphan_since is not None and now - orphan_since > charge.orphan_s
        if kill_at is None and (told or orphaned):
            kill_at = now + charge.grace_s
            _signal_group(pid, signal.SIGTERM)
        if kill_at is not None and now > kill_at:
            _kill_descendants()


def _reap(pid: int) -> int | None:
    """Takes in every child that has ended; the exit code of `pid` when it is among them."""
    code = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if ended == 0:
            return code
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def _kill_descendants() -> None:
    for descendant in psutil.Process().children(recursive=True):
        try:
            descendant.kill()
        except psutil.NoSuchProcess:
            continue


def _kill_orphans() -> None:
    """Once the server has ended: kills what it left behind, until there is nothing more to wait for."""
    while True:
        _kill_descendants()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
