"""The fleet process: one per host and set of servers, between the jobs that share it and the servers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from shardmill.engines.choose import api_key, engine, new_session
from shardmill.files import read_json, write_json
from shardmill.fleet import state, wire
from shardmill.fleet.background import Background
from shardmill.fleet.desk import Desk
from shardmill.fleet.history import History
from shardmill.fleet.jobs import Job, Runs
from shardmill.fleet.member import Member
from shardmill.fleet.patience import given_up
from shardmill.fleet.pool import Pool
from shardmill.fleet.roster import Roster
from shardmill.fleet.site import Expectation, Site
from shardmill.fleet.timing import Timing
from shardmill.home import Home, user_folder
from shardmill.settings import Settings


class FleetProcess:
    """Holds the pool. Everything runs on one event loop; `run` returns when nobody needs the fleet any more."""

    def __init__(self, home: Home, settings: Settings, timing: Timing) -> None:
        self.home = home
        self.settings = settings
        self.timing = timing
        self.pool = Pool()
        self.members: dict[str, Member] = {}
        self.runs = Runs()
        self.roster: Roster  # made in `run`, where there is a loop
        self.started = datetime.now(UTC)
        self.expected = Expectation(settings.model.name, settings.model.context)
        self._background = Background(_log)
        self.desk = Desk(self.pool, self.members, timing, self._background)
        self._leave = asyncio.Event()
        self._needed_at = time.monotonic()
        self._over_at: float | None = None
        self._history = History(home.history)

    def _slowest(self) -> float:
        """Before the first answer: as if each might take until its request is given up."""
        slowest = max((member.record.slowest for member in self.members.values()), default=0.0)
        return slowest or self.settings.generate.request_timeout_s / 3

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leave.set)
        key = api_key(self.settings.servers)
        async with new_session() as session:
            site = Site(
                home=self.home,
                engine=engine(self.settings.servers.engine, key),
                session=session,
                pool=self.pool,
                timing=self.timing,
                expected=self.expected,
                changed=self.desk.give_out,
                lost=self.desk.tell_lost,
                log=_log,
                slowest=self._slowest,
            )
            path = _socket_path(self.home)
            self.roster = Roster(self.settings, site, self.members)
            self.desk.expect(_jobs_of_before(self.home))
            await self.roster.take_over()
            self.roster.read_endpoints()
            server = await asyncio.start_unix_server(self._serve, path, limit=wire.LINE_LIMIT)
            write_json(self.home.address, {"socket": str(path)})
            _log(f"fleet {self.home.root.name} at work for {self.settings.model.name} ({self.settings.servers.engine})")
            try:
                await self._until_not_needed()
            finally:
                server.close()
                path.unlink(missing_ok=True)
                await self._shut_down()
        _log("fleet left")

    async def _shut_down(self) -> None:
        await self.roster.shut_down()
        for job in list(self.desk.jobs.values()):
            job.writer.close()
        self.desk.jobs.clear()
        self._background.cancel()
        self._write_state()

    # Jobs

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await wire.read(reader)
            if hello is None:
                return
            if hello.get("who") == "cli":
                await self._serve_command_line(reader, writer)
                return
            job = self._welcome(hello, writer)
            try:
                while (message := await wire.read(reader)) is not None:
                    self.desk.hear(job, message)
            finally:
                self._needed_at = time.monotonic()
                self.desk.farewell(job)
        finally:
            writer.close()

    def _welcome(self, hello: wire.Message, writer: asyncio.StreamWriter) -> Job:
        job = self.desk.welcome(hello, writer)
        self.runs.note(job.lock)
        if hello["vocab"] is not None and hello["vocab"] != self.expected.vocabulary:
            self.expected.vocabulary = hello["vocab"]
            self.roster.judge_all()
        return job

    # The command line

    async def _serve_command_line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (message := await wire.read(reader)) is not None:
            match message["op"]:
                case "stay":
                    self.home.stay.touch()
                case "down":
                    self.home.stay.unlink(missing_ok=True)
                    self._leave.set()
                case "state":
                    pass
            wire.write(writer, self._state())

    # Life

    async def _until_not_needed(self) -> None:
        written = looked = -1e9
        while not self._leave.is_set():
            now = time.monotonic()
            if now - looked >= self.timing.endpoints_s:
                looked = now
                self.roster.read_endpoints()
            self.desk.refuse_where_hopeless()
            self._tell_stop()
            if now - written >= self.timing.state_s:
                written = now
                self._background.run(self._look_at_loads())
            if self._not_needed(now):
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leave.wait(), self.timing.tick_s)

    def _tell_stop(self) -> None:
        for job in self.desk.jobs.values():
            if self.runs.over(job) and not job.told_to_stop:
                job.told_to_stop = True
                _log(f"the run of {job.name} is over: it is told to leave")
                job.tell({"op": "stop", "n": 0})

    def _not_needed(self, now: float) -> bool:
        if self.home.stay.exists() or self.runs.any_alive():
            self._needed_at, self._over_at = now, None
            return False
        if any(not job.told_to_stop for job in self.desk.jobs.values()):
            self._needed_at, self._over_at = now, None
            return False
        if self.desk.jobs:  # told to leave, and not gone yet
            self._over_at = self._over_at if self._over_at is not None else now
            return now - self._over_at > self.timing.leave_s
        return given_up(self.members.values()) or now - self._needed_at > self.timing.linger_s

    async def _look_at_loads(self) -> None:
        await self.roster.look()
        self._write_state()

    def _write_state(self) -> None:
        try:
            now = self._state()
            write_json(self.home.state, now)
            self._history.note(now)
        except OSError as error:  # a full disk: the next one may fit
            _log(f"{self.home.state} can't be written: {error.strerror}")

    def _state(self) -> wire.Message:
        return state.describe(self)


def _jobs_of_before(home: Home) -> int:
    """How many jobs a fleet that was killed had, as it wrote last; a fleet that leaves in order has none."""
    try:
        return len(read_json(home.state)["jobs"])
    except (OSError, ValueError, KeyError):
        return 0


def _socket_path(home: Home) -> Path:
    """Where no other fleet's socket is, and none of a fleet that was killed: this one holds the folder's lock."""
    path = user_folder() / hashlib.sha256(str(home.root).encode()).hexdigest()[:16]
    path.unlink(missing_ok=True)
    return path


def _log(line: str) -> None:
    with contextlib.suppress(OSError):  # servers and jobs go on when the disk that holds the log is full
        sys.stderr.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {line}\n")
        sys.stderr.flush()
