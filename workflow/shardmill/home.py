"""Where a fleet lives: one folder per host and set of servers, found by every job without being told."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardmill import runlock
from shardmill.errors import ShardmillError
from shardmill.files import sha256_json
from shardmill.settings import Settings

_BASE_LIMIT = 60  # a socket's path has 107 bytes on Linux


@dataclass(frozen=True)
class Home:
    """The files of one fleet, under `<results>/.fleet/<key>/`. `root` is absolute."""

    root: Path

    @classmethod
    def of(cls, settings: Settings) -> Home:
        return cls(fleets(settings.results) / fleet_key(settings))

    @property
    def settings(self) -> Path:
        """The settings that the fleet is started with, as JSON."""
        return self.root / "settings.json"

    @property
    def state(self) -> Path:
        """What `status` shows, written every few seconds."""
        return self.root / "state.json"

    @property
    def history(self) -> Path:
        """What the servers' figures were, a line a minute (fleet/history.py)."""
        return self.root / "history.jsonl"

    @property
    def lock(self) -> Path:
        """Held by the fleet process for its life."""
        return self.root / "lock"

    @property
    def start_lock(self) -> Path:
        """Held by the one job that starts the fleet process."""
        return self.root / "start.lock"

    @property
    def address(self) -> Path:
        """The fleet's Unix socket: a path that fits the 107 bytes of one, which this folder's may not."""
        return self.root / "address.json"

    @property
    def stay(self) -> Path:
        """There while the servers live until `servers down`."""
        return self.root / "stay"

    @property
    def log(self) -> Path:
        return self.root / "fleet.log"

    @property
    def logs(self) -> Path:
        """One log a server."""
        return self.root / "logs"

    @property
    def servers(self) -> Path:
        """One record and one lock for each server process that this fleet, or one before it, has started."""
        return self.root / "servers"

    def alive(self) -> bool:
        return runlock.holder(self.lock) is not None


def recorded_name(settings: Settings, server: str) -> str:
    """A server's name in rows. Where other machines may work on the build, each with a gpu0, it has its machine's."""
    return f"{socket.gethostname()}/{server}" if settings.s3.used else server


def fleets(results: str) -> Path:
    return Path(results).absolute() / ".fleet"


def user_folder() -> Path:
    """A folder of this user on this machine that nobody else can enter, at a path short enough for a socket in it.

    Raises ShardmillError when somebody else has made it.
    """
    base = tempfile.gettempdir()
    folder = Path(base if len(base) <= _BASE_LIMIT else "/tmp") / f"shardmill-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ShardmillError(f"{folder} is open to other users: take it away, or set TMPDIR to another folder.")
    return folder


def fleet_key(settings: Settings) -> str:
    """First 12 hex digits over what decides which servers these are: host, engine, model, and how they are started."""
    return sha256_json(_what_decides(settings))[:12]


def _what_decides(settings: Settings) -> dict[str, Any]:
    servers = asdict(settings.servers)
    return {
        "host": socket.gethostname(),
        "servers": servers,
        "model": [settings.model.name, settings.model.revision, settings.model.context],
        # Prefix caching pays only where later turns repeat earlier ones (servers/sglang.py).
        "shared_prefixes": settings.prompts.turns == "regenerate",
    }
