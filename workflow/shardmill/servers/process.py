"""A server process and its guardian, seen from the fleet: started or taken over, looked after, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from shardmill import runlock
from shardmill.errors import ShardmillError
from shardmill.files import read_json, write_json
from shardmill.home import Home
from shardmill.servers.guardian import Charge

_PAUSE_S = 0.05
_GUARDIAN_START_S = 60.0
_LOG_TAIL = 256 << 10


@dataclass(frozen=True, slots=True)
class Command:
    """How to start one server at one port."""

    argv: list[str]
    env: dict[str, str]
    url: str
    ports: tuple[int, ...]
    fingerprint: str  # the same for every start with the same flags, whatever the ports
    resource: Path | None = None  # a lock on what it needs for itself alone


@dataclass(slots=True)
class ServerProcess:
    """A server under its guardian. `record` is what the guardian wrote (servers/guardian.py)."""

    name: str
    record: dict[str, Any]
    lock: Path
    log_begin: int  # where this start's log begins, in bytes
    begun: float | None = None  # on the monotonic clock; None for one that was taken over
    _guardian: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return str(self.record["url"])

    @property
    def started(self) -> float:
        """Seconds since the epoch."""
        return float(self.record["started"])

    @property
    def pid(self) -> int:
        return int(self.record["pid"])

    @property
    def log(self) -> Path:
        return Path(self.record["log"])

    def alive(self) -> bool:
        if self._guardian is not None:
            self._guardian.poll()  # so that it leaves no zombie
        return runlock.holder(self.lock) is not None

    def exit_code(self) -> int | None:
        """The server's own, negative for a signal; None while it lives, or when its guardian was killed."""
        try:
            code = read_json(self.lock.with_suffix(".json"))["exit"]
        except (OSError, ValueError, KeyError):
            return None
        return None if code is None else int(code)

    def log_tail(self) -> str:
        """The end of what this start has written, 256 KiB at most."""
        try:
            with self.log.open("rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(self.log_begin, size - _LOG_TAIL))
                return stream.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def resident_bytes(self) -> int:
        """Of the server and all that it has started."""
        total = 0
        for process in self.tree():
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    def listens_at(self, port: int) -> bool | None:
        """Whether it is this server that listens there; None where the system doesn't say."""
        try:
            for process in self.tree():
                for connection in process.net_connections(kind="tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                        return True
        except psutil.NoSuchProcess:
            return None
        except psutil.AccessDenied:
            return None
        return False

    def tree(self) -> list[psutil.Process]:
        try:
            server = psutil.Process(self.pid)
            return [server, *server.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, grace, SIGKILL of the whole tree; returns when nothing of it is left."""
        if not self.alive():
            self._kill_orphans()
            return
        guardian = int(self.record["guardian"])
        _signal(guardian, signal.SIGTERM)
        until = time.monotonic() + grace_s + 10
        while self.alive():
            if time.monotonic() > until:  # the guardian itself does not work any more
                tree = self.tree()
                _signal(guardian, signal.SIGKILL)
                for process in tree:
                    _signal(process.pid, signal.SIGKILL)
            await asyncio.sleep(_PAUSE_S)

    def _kill_orphans(self) -> None:
        """When a guardian was killed the kernel kills the server; what the server had started may be left."""
        if self.exit_code() is not None:
            return
        for process in psutil.process_iter(["pid"]):
            try:
                if os.getsid(process.pid) == self.pid and process.create_time() >= self.started - 1:
                    process.kill()
            except (ProcessLookupError, PermissionError, psutil.Error):
                continue


async def start(home: Home, name: str, command: Command, grace_s: float, orphan_s: float) -> ServerProcess:
    """Starts a server under a guardian; returns as soon as its process is there, long before it is ready.

    Raises ShardmillError when the command can't be run.
    """
    record, lock = _files(home, name)
    log = home.logs / f"{name}.log"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    begin = log.stat().st_size if log.exists() else 0
    charge = Charge(
        name=name,
        argv=command.argv,
        env=command.env,
        log=str(log),
        record=str(record),
        lock=str(lock),
        resource=None if command.resource is None else str(command.resource),
        fleet_lock=str(home.lock),
        stay=str(home.stay),
        grace_s=grace_s,
        orphan_s=orphan_s,
        about={"url": command.url, "ports": list(command.ports), "fingerprint": command.fingerprint, "begin": begin},
    )
    charge_file = record.with_suffix(".charge.json")
    write_json(charge_file, asdict(charge))
    errors = record.with_suffix(".guardian.log")
    with errors.open("wb") as stream:
        guardian = subprocess.Popen(
            [sys.executable, "-m", "shardmill.servers.guardian", str(charge_file)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    began = time.monotonic()
    until = began + _GUARDIAN_START_S
    try:
        while not record.exists():
            if guardian.poll() is not None or time.monotonic() > until:
                lines = errors.read_text(errors="replace").strip().splitlines()
                reason = lines[-1] if lines else "no reason given"
                raise ShardmillError(f"Server {name} could not be started with {command.argv[0]}: {reason}.")
            await asyncio.sleep(_PAUSE_S)
    except BaseException:
        guardian.terminate()  # it takes with it what it may have started
        raise
    return ServerProcess(name, read_json(record), lock, begin, began, guardian)


def left_over(home: Home) -> list[ServerProcess]:
    """Servers that a fleet before this one has started and that still run."""
    found = []
    for lock in sorted(home.servers.glob("*.lock")):
        if runlock.holder(lock) is None:
            continue
        try:
            record = read_json(lock.with_suffix(".json"))
        except (OSError, ValueError):
            continue  # its guardian has just begun, or just ends
        found.append(ServerProcess(str(record["name"]), record, lock, int(record["begin"])))
    return found


def _files(home: Home, name: str) -> tuple[Path, Path]:
    return home.servers / f"{name}.json", home.servers / f"{name}.lock"


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
