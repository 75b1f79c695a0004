"""Finds the fleet of some settings, or starts it: once, whoever comes first."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

from shardmill import runlock
from shardmill.engines.choose import api_key
from shardmill.errors import ShardmillError
from shardmill.files import read_json, write_json
from shardmill.fleet import wire
from shardmill.home import Home
from shardmill.settings import Settings

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_PAUSE_S = 0.1
# A fleet that leaves stops its servers first, and only then frees its lock.
_PATIENCE_S = 180.0
_LOG_LINES = 8


async def connect(home: Home) -> Connection | None:
    """A connection to the fleet at `home`; None when none listens."""
    try:
        path = str(read_json(home.address)["socket"])
        return await asyncio.open_unix_connection(path, limit=wire.LINE_LIMIT)
    except (OSError, ValueError, KeyError):
        return None


async def connect_or_start(home: Home, settings: Settings) -> Connection:
    """A connection to the fleet at `home`, started if there is none.

    Raises ShardmillError with the end of its log when it can't be started.
    """
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        connection = await connect(home)
        if connection is not None:
            return connection
        try:
            lock = runlock.acquire(home.start_lock)
        except runlock.Held:
            await asyncio.sleep(_PAUSE_S)
            continue
        with lock:
            connection = await connect(home)
            if connection is None and not home.alive():
                connection = await _start(home, settings, until)
            if connection is not None:
                return connection
        await asyncio.sleep(_PAUSE_S)  # one is just leaving
    raise ShardmillError(f"The fleet of servers in {home.root} does not answer; look into {home.log}.")


async def _start(home: Home, settings: Settings, until: float) -> Connection:
    api_key(settings.servers)  # without it no server answers, and its absence is better said here than in a log
    home.root.mkdir(parents=True, exist_ok=True)
    write_json(home.settings, settings.as_dict())
    with home.log.open("ab") as log:
        begin = log.tell()
        # A session of its own: neither Ctrl-C nor the end of the job that starts it reaches the other jobs' servers.
        process = subprocess.Popen(
            [sys.executable, "-m", "shardmill.fleet", str(home.root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    while time.monotonic() < until:
        connection = await connect(home)
        if connection is not None:
            return connection
        if process.poll() is not None:
            raise ShardmillError(f"The fleet of servers could not start: {_end_of_log(home, begin)} (log: {home.log})")
        await asyncio.sleep(_PAUSE_S / 2)
    raise ShardmillError(f"The fleet of servers did not start within {_PATIENCE_S:.0f} s; look into {home.log}.")


def _end_of_log(home: Home, begin: int) -> str:
    text = home.log.read_bytes()[begin:].decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_LOG_LINES:]) or "it said nothing"
