"""The fleet process: one per host and set of servers, between the jobs that share it and the servers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
import time
from collections.abc import Coroutine
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from shardmill.engines.base import Fault
from shardmill.engines.choose import engine, new_session
from shardmill.files import write_json
from shardmill.fleet import state, wire
from shardmill.fleet.history import History
from shardmill.fleet.home import Home, user_folder
from shardmill.fleet.jobs import Job, Runs
from shardmill.fleet.member import Member
from shardmill.fleet.patience import Patience, given_up
from shardmill.fleet.pool import Ask, Pool
from shardmill.fleet.roster import Roster
from shardmill.fleet.site import Expectation, Site
from shardmill.fleet.timing import Timing
from shardmill.settings import Settings

# After these a server may be dead: it is looked at before the job hears what became of its request.
_BROKEN = frozenset({Fault.REFUSED, Fault.RESET, Fault.HALF_SENT, Fault.TIMEOUT})


class FleetProcess:
    """Holds the pool. Everything runs on one event loop; `run` returns when nobody needs the fleet any more."""

    def __init__(self, home: Home, settings: Settings, timing: Timing) -> None:
        self.home = home
        self.settings = settings
        self.timing = timing
        self.pool = Pool()
        self.jobs: dict[str, Job] = {}
        self.runs = Runs()
        self.roster: Roster  # made in `run`, where there is a loop
        self.started = datetime.now(UTC)
        self.expected = Expectation(settings.model.name, settings.model.context)
        self._background: set[asyncio.Task[None]] = set()
        self._ids = count(1)
        self._leave = asyncio.Event()
        self._needed_at = time.monotonic()
        self._patience = Patience(time.monotonic())
        self._over_at: float | None = None
        self._history = History(home.history)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leave.set)
        key_variable = self.settings.servers.api_key_env
        key = os.environ.get(key_variable) if key_variable else None
        async with new_session() as session:
            site = Site(
                home=self.home,
                engine=engine(self.settings.servers.engine, key),
                session=session,
                pool=self.pool,
                timing=self.timing,
                expected=self.expected,
                changed=self._give_out,
                lost=self._tell_lost,
                log=_log,
            )
            path = _socket_path(self.home)
            self.roster = Roster(self.settings, site)
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
        for job in self.jobs.values():
            job.writer.close()
        for task in list(self._background):
            task.cancel()
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
                    self._hear(job, message)
            finally:
                self._farewell(job)
        finally:
            writer.close()

    def _welcome(self, hello: wire.Message, writer: asyncio.StreamWriter) -> Job:
        now = time.monotonic()
        job = Job(
            id=str(next(self._ids)),
            writer=writer,
            name=hello["job"],
            order=hello["order"],
            limit=hello["limit"],
            patience_s=hello["patience_s"],
            build=hello["build"],
            lock=Path(hello["lock"]),
            run=hello["run"],
            joined=now,
            wanted=hello["want"],
        )
        self.jobs[job.id] = job
        self.runs.note(job.lock)
        for held in hello["held"]:
            self.pool.adopt((job.id, held["n"]), held["server"])
            job.granted_at[held["n"]] = now - held["age_s"]
        if hello["vocab"] is not None and hello["vocab"] != self.expected.vocabulary:
            self.expected.vocabulary = hello["vocab"]
            self.roster.judge_all()
        warnings = [member.warning for member in self.roster.members.values() if member.warning]
        job.tell({"op": "welcome", "warnings": warnings})
        return job

    def _farewell(self, job: Job) -> None:
        """Ended or killed: what it held is free again."""
        del self.jobs[job.id]
        self.pool.drop(job.id)
        self._needed_at = time.monotonic()
        self._give_out()

    def _hear(self, job: Job, message: wire.Message) -> None:
        number = message["n"]
        match message["op"]:
            case "lease":
                self.pool.ask(Ask(job.id, number, job.order, job.limit, frozenset(message["avoid"]), message["alone"]))
                self._give_out()
                self._refuse_where_hopeless()
            case "cancel":
                self.pool.cancel((job.id, number))
                self._give_out()
            case "release":
                self._released(job, message)
            case "want":
                job.wanted = number

    def _released(self, job: Job, message: wire.Message) -> None:
        number = message["n"]
        granted_at = job.granted_at.pop(number, time.monotonic())
        name = self.pool.release((job.id, number))
        member = self.roster.members.get(name) if name is not None else None
        fault = None if message["fault"] is None else Fault(message["fault"])
        if member is not None:
            self._note(member, message, fault)
        self._give_out()
        if member is not None and fault in _BROKEN:
            self._in_background(self._find_out(job, number, member, granted_at))
        else:
            job.tell({"op": "after", "n": number, "server_died": False})

    async def _find_out(self, job: Job, number: int, member: Member, granted_at: float) -> None:
        died = await member.died_since(granted_at)
        job.tell({"op": "after", "n": number, "server_died": died})

    def _note(self, member: Member, message: wire.Message, fault: Fault | None) -> None:
        if message["ok"]:
            self.pool.well(member.name)
            member.record.answered(
                time.monotonic(),
                message["seconds"],
                message["tokens"],
                message["accept_length"],
                message["degenerate"],
            )
            if member.record.bad is not None:
                member.poke()
        elif fault is not None:
            member.record.failed(fault, message["detail"])
            if fault is Fault.QUEUE_FULL:
                self.pool.full(member.name)
                asyncio.get_running_loop().call_later(self.timing.full_s, self._after_full, member.name)
            if member.record.suspect:
                member.withdraw()

    def _after_full(self, name: str) -> None:
        self.pool.resume(name)
        self._give_out()

    def _give_out(self) -> None:
        for grant in self.pool.grants():
            job, member = self.jobs[grant.ask.client], self.roster.members[grant.server]
            job.granted_at[grant.ask.number] = time.monotonic()
            member.granted()
            job.tell({"op": "grant", "n": grant.ask.number, "server": member.name, "url": member.url})

    def _tell_lost(self, name: str) -> None:
        for client, number in self.pool.slots[name].outstanding:
            self.jobs[client].tell({"op": "lost", "n": number})

    def _refuse_where_hopeless(self) -> None:
        for job, kind, message in self._patience.refusals(
            time.monotonic(), self.roster.members.values(), self.jobs.values()
        ):
            if self.pool.cancel_all(job.id):
                job.tell({"op": "refuse", "n": 0, "kind": kind, "message": message})

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
            self._refuse_where_hopeless()
            self._tell_stop()
            if now - written >= self.timing.state_s:
                written = now
                self._in_background(self._look_at_loads())
            if self._not_needed(now):
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leave.wait(), self.timing.tick_s)

    def _tell_stop(self) -> None:
        for job in self.jobs.values():
            if self.runs.over(job) and not job.told_to_stop:
                job.told_to_stop = True
                _log(f"the run of {job.name} is over: it is told to leave")
                job.tell({"op": "stop", "n": 0})

    def _not_needed(self, now: float) -> bool:
        if self.home.stay.exists() or self.runs.any_alive():
            self._needed_at, self._over_at = now, None
            return False
        if any(not job.told_to_stop for job in self.jobs.values()):
            self._needed_at, self._over_at = now, None
            return False
        if self.jobs:  # told to leave, and not gone yet
            self._over_at = self._over_at if self._over_at is not None else now
            return now - self._over_at > self.timing.leave_s
        return given_up(self.roster.members.values()) or now - self._needed_at > self.timing.linger_s

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

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._work_ended)

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log(f"{type(error).__name__} in the fleet: {error}")


def _socket_path(home: Home) -> Path:
    """Where no other fleet's socket is, and none of a fleet that was killed: this one holds the folder's lock."""
    path = user_folder() / hashlib.sha256(str(home.root).encode()).hexdigest()[:16]
    path.unlink(missing_ok=True)
    return path


def _log(line: str) -> None:
    with contextlib.suppress(OSError):  # servers and jobs go on when the disk that holds the log is full
        sys.stderr.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {line}\n")
        sys.stderr.flush()
