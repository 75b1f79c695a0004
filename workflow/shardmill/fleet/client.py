"""A job's side of the fleet: leases asked for, waited for and given back, also over a fleet that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from shardmill import runlock
from shardmill.errors import NoServers, SetupFault, ShardError, ShardmillError
from shardmill.facts import build_facts
from shardmill.fleet import starter, wire
from shardmill.fleet.lease import UNUSED, Aftermath, Lease, Outcome, release_message
from shardmill.fleet.timing import timing
from shardmill.home import Home
from shardmill.paths import BuildPaths
from shardmill.settings import Settings

_log = logging.getLogger(__name__)

_MUTE_CONNECTIONS = 10
_PAUSE_S = 0.1
_REFUSALS: dict[str, type[ShardmillError]] = {"no_servers": NoServers, "setup": SetupFault}


@dataclass(slots=True)
class _Wish:
    avoid: frozenset[str]
    alone: bool
    granted: asyncio.Future[Lease]


@dataclass(slots=True)
class _Held:
    lease: Lease
    since: float
    lost: asyncio.Event
    outcome: Outcome | None = None  # set once it is being released
    after: asyncio.Future[Aftermath] | None = None


class Fleet:
    """One job's membership in the fleet; an async context manager. Made by `join`."""

    def __init__(self, settings: Settings, build: BuildPaths, job: str, order: int, run: dict[str, Any] | None) -> None:
        self.stop_requested = asyncio.Event()
        self.warnings: tuple[str, ...] = ()
        self._settings = settings
        self._build = build
        self._job = job
        self._order = order
        self._run_at_start = run
        self._home = Home.of(settings)
        self._silent_s = timing().silent_s
        self._wishes: dict[int, _Wish] = {}
        self._held: dict[int, _Held] = {}
        self._number = 0
        self._wanted = 0
        self._writer: asyncio.StreamWriter | None = None
        self._refused: ShardmillError | None = None
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def join(
        cls, settings: Settings, build: BuildPaths, job: str, order: int, run: dict[str, Any] | None = None
    ) -> Fleet:
        """Connects to the fleet of these settings on this host, and starts it when there is none.

        `job` names the job for status; the lowest `order` is served first. `run`: who held the build's lock when the
        job began, where that is some time ago. Raises ShardError when that run has ended meanwhile, ShardmillError when
        no fleet starts.
        """
        holder = runlock.holder(build.lock)
        if run is not None and holder != run:
            raise ShardError(f"{job} stops: its run has ended before it asked for anything.")
        fleet = cls(settings, build, job, order, holder)
        connection = await starter.connect_or_start(fleet._home, settings)
        fleet._hello(connection[1])
        fleet._reader = asyncio.create_task(fleet._run(connection[0]))
        fleet._reader.add_done_callback(fleet._reader_ended)
        return fleet

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()

    def want(self, n: int) -> None:
        """Says how many leases the job could use at once, for `status`."""
        if n != self._wanted:
            self._wanted = n
            self._send({"op": "want", "n": n})

    async def lease(self, avoid: frozenset[str] = frozenset(), alone: bool = False) -> Lease:
        """Waits for a server with room, and takes a place there.

        avoid: names of servers not to be given while there is another. alone: a server with nothing else in flight,
        and nothing else until the release. Raises NoServers when there was none for `generate.patience_s`, SetupFault
        when servers can't be used as they are set up. Cancelling gives nothing away.
        """
        if self._refused is not None:
            raise self._refused
        self._number += 1
        number = self._number
        wish = _Wish(avoid, alone, asyncio.get_running_loop().create_future())
        self._wishes[number] = wish
        self._send(self._ask(number, wish))
        try:
            return await wish.granted
        except asyncio.CancelledError:
            self._take_back(number)
            raise

    async def release(self, lease: Lease, outcome: Outcome) -> Aftermath:
        """Gives a lease back with what became of its request. After a broken connection this takes some seconds,
        until it is known whether the server died."""
        held = self._held[lease.id]
        held.outcome = outcome
        held.after = asyncio.get_running_loop().create_future()
        self._send(release_message(lease.id, outcome))
        if outcome.ok or outcome.fault is None:
            # Nothing to wait for. The fleet's own account is what counts, so a lost message is sent again on reconnect.
            return Aftermath(server_died=False)
        return await held.after

    def lost(self, lease: Lease) -> asyncio.Event:
        """Set when the lease's server is known to be dead or hung: no answer will come, cancel the request."""
        return self._held[lease.id].lost

    # The connection

    async def _run(self, reader: asyncio.StreamReader) -> None:
        """Reads until the fleet is gone, then finds or starts the next, for as long as the job lives."""
        mute = 0  # connections in a row that brought nothing
        while True:
            mute += 1
            while (message := await self._next(reader)) is not None:
                mute = 0
                self._take(message)
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            if self.stop_requested.is_set():
                return
            if mute > _MUTE_CONNECTIONS:
                raise ShardmillError(f"The fleet of servers breaks every connection; look into {self._home.log}.")
            await asyncio.sleep(_PAUSE_S * mute)
            reader, writer = await starter.connect_or_start(self._home, self._settings)
            self._hello(writer)

    async def _next(self, reader: asyncio.StreamReader) -> wire.Message | None:
        """The next message; None at the end of the connection.

        A fleet that says nothing is asked for a word, and one that doesn't give it is killed, which frees its lock for
        the next one. Two waits, since after a stop of this job itself the first one is over at once.
        """
        for _ in range(2):
            try:
                async with asyncio.timeout(self._silent_s):
                    return await wire.read(reader)
            except TimeoutError:
                self._send({"op": "ping", "n": 0})
        self._kill_silent_fleet()
        return None

    def _kill_silent_fleet(self) -> None:
        pid = wire.peer(self._writer) if self._writer is not None else 0
        if not pid:
            raise ShardmillError(f"The fleet of servers in {self._home.root} does not answer: stop its process.")
        _log.warning("The fleet of servers (process %d) does not answer; it is killed, and another takes over", pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        """Nobody may wait for a fleet that can't be had."""
        if reader.cancelled():
            self._refuse(ShardmillError("The job has left its fleet of servers."))
            return
        error = reader.exception()
        if error is None:
            self._refuse(ShardmillError("The fleet of servers has left, since the run is over."))
        elif isinstance(error, ShardmillError):
            self._refuse(error)
        else:
            self._refuse(ShardmillError(f"The fleet of servers can't be had any more ({error}): look into its log."))

    def _hello(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        now = time.monotonic()
        self._send(
            {
                "op": "hello",
                "who": "job",
                "job": self._job,
                "order": self._order,
                "build": str(self._build.root.absolute()),
                "lock": str(self._build.lock.absolute()),
                "run": self._run_at_start,
                "limit": self._settings.generate.concurrency,
                "patience_s": self._settings.generate.patience_s,
                "vocab": _vocabulary(self._build),
                "want": self._wanted,
                "held": [
                    {"n": n, "server": held.lease.server, "age_s": now - held.since} for n, held in self._held.items()
                ],
            }
        )
        for number, wish in self._wishes.items():
            self._send(self._ask(number, wish))
        for number, held in self._held.items():
            if held.outcome is not None:
                self._send(release_message(number, held.outcome))

    def _send(self, message: wire.Message) -> None:
        if self._writer is not None:  # else it is told with the next hello
            wire.write(self._writer, message)

    def _take(self, message: wire.Message) -> None:
        match message["op"]:
            case "grant":
                self._granted(message["n"], message["server"], message["url"])
            case "after":
                self._released(message["n"], bool(message["server_died"]))
            case "lost":
                held = self._held.get(message["n"])
                if held is not None:
                    held.lost.set()
            case "refuse":
                self._refuse(_REFUSALS[message["kind"]](message["message"]))
            case "stop":
                self.stop_requested.set()
            case "welcome":
                self.warnings = tuple(message["warnings"])
            case "pong":
                pass
            case other:
                raise ShardmillError(f"The fleet says {other!r}, which this job does not know: use one version.")

    def _ask(self, number: int, wish: _Wish) -> wire.Message:
        return {"op": "lease", "n": number, "avoid": sorted(wish.avoid), "alone": wish.alone}

    def _granted(self, number: int, server: str, url: str) -> None:
        lease = Lease(number, server, url)
        wish = self._wishes.pop(number, None)
        if wish is None or wish.granted.done():
            # Cancelled while the grant was under way.
            self._held[number] = _Held(lease, time.monotonic(), asyncio.Event(), UNUSED)
            self._send(release_message(number, UNUSED))
            return
        self._held[number] = _Held(lease, time.monotonic(), asyncio.Event())
        wish.granted.set_result(lease)

    def _take_back(self, number: int) -> None:
        """A wish was cancelled: before its grant, or after it and before its task ran."""
        if self._wishes.pop(number, None) is not None:
            self._send({"op": "cancel", "n": number})
        elif (held := self._held.get(number)) is not None and held.outcome is None:
            held.outcome = UNUSED
            self._send(release_message(number, UNUSED))

    def _released(self, number: int, server_died: bool) -> None:
        held = self._held.pop(number, None)
        if held is not None and held.after is not None and not held.after.done():
            held.after.set_result(Aftermath(server_died))

    def _refuse(self, error: ShardmillError) -> None:
        self._refused = error
        for wish in self._wishes.values():
            if not wish.granted.done():
                wish.granted.set_exception(error)
        self._wishes.clear()
        for held in self._held.values():
            if held.after is not None and not held.after.done():
                held.after.set_result(Aftermath(server_died=False))


def _vocabulary(build: BuildPaths) -> int | None:
    """The model's vocabulary size as the prompts step wrote it down; None before it has."""
    try:
        model: dict[str, Any] | None = build_facts(build).get("model")
    except (OSError, ValueError):
        return None
    size = (model or {}).get("vocab_size")
    return size if isinstance(size, int) else None
