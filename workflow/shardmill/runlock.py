"""The lock of a run: held by one process for its life, so that who holds it is never guessed from a pid.

An flock goes with its process, also at kill -9. The file says in words who took it last; only the lock says whether
that one still lives, so the file is never deleted.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import socket
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import orjson

from shardmill.errors import UsageError

# `holder` takes the lock for a moment to see that nobody has it; an `acquire` that meets it tries again this long.
_GRACE_S = 0.3
_PAUSE_S = 0.02


class Held(UsageError):
    """Another process holds the lock; `who` is what it wrote about itself."""

    def __init__(self, path: Path, who: dict[str, Any]) -> None:
        self.who = who
        super().__init__(
            f"Another run is at work in {path.parent}: {who.get('command', 'a process')} "
            f"(pid {who.get('pid', '?')} on {who.get('host', '?')}, user {who.get('user', '?')}, "
            f"since {who.get('started', '?')}). Wait for its end, or stop it."
        )


@dataclass(slots=True)
class RunLock:
    """A lock that is held until `release`, or until the process ends. Children started by exec don't inherit it."""

    path: Path
    _stream: IO[bytes]

    def release(self) -> None:
        self._stream.close()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def myself(command: str | None = None) -> dict[str, Any]:
    """What a process writes about itself: pid, host, user, command, started (UTC, ISO 8601)."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "user": _user(),
        "command": command or " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def acquire(path: Path, who: dict[str, Any] | None = None) -> RunLock:
    """Takes the lock at `path` and writes `who` into it (default: `myself()`).

    Raises Held at once, in one sentence that says who has it, when another process does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
    until = time.monotonic() + _GRACE_S
    while not _try(stream, fcntl.LOCK_EX):
        if time.monotonic() > until:
            taken_by = _read(stream)
            stream.close()
            raise Held(path, taken_by)
        time.sleep(_PAUSE_S)
    stream.seek(0)
    stream.truncate()
    stream.write(orjson.dumps(who if who is not None else myself()))
    stream.flush()
    return RunLock(path, stream)


def holder(path: Path) -> dict[str, Any] | None:
    """Who holds the lock at `path` now; None when nobody does. Empty when its holder has not written yet."""
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        return None
    with stream:
        if _try(stream, fcntl.LOCK_SH):
            return None
        return _read(stream)


def last_holder(path: Path) -> bytes:
    """What who held the lock at `path` last has written about itself; nothing where nobody ever did."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _try(stream: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(stream, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(stream: IO[bytes]) -> dict[str, Any]:
    stream.seek(0)
    try:
        who = orjson.loads(stream.read())
    except orjson.JSONDecodeError:
        return {}
    return who if isinstance(who, dict) else {}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
