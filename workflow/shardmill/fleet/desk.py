"""The fleet's side of its jobs: what they ask for, what they are given, and what their outcomes say of the servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from shardmill.engines.base import Fault
from shardmill.fleet import wire
from shardmill.fleet.background import Background
from shardmill.fleet.jobs import Job
from shardmill.fleet.member import Member
from shardmill.fleet.patience import Patience
from shardmill.fleet.pool import Ask, Pool
from shardmill.fleet.timing import Timing

# After these a server may be dead: it is looked at before the job hears what became of its request.
_BROKEN = frozenset({Fault.REFUSED, Fault.RESET, Fault.HALF_SENT, Fault.TIMEOUT})


class Desk:
    """All on the fleet's event loop; nothing here blocks."""

    def __init__(self, pool: Pool, members: Mapping[str, Member], timing: Timing, background: Background) -> None:
        self.jobs: dict[str, Job] = {}
        self._pool = pool
        self._members = members
        self._timing = timing
        self._background = background
        self._patience = Patience(time.monotonic())
        self._ids = count(1)
        self._awaited = 0
        self._awaited_until = 0.0

    def expect(self, jobs: int) -> None:
        """Gives nothing out until so many jobs have come back from a fleet that was killed, with the leases that they
        hold: else the first one takes what the others have. For `rejoin_s` at most, since jobs may be gone as well."""
        self._awaited = jobs
        self._awaited_until = time.monotonic() + self._timing.rejoin_s
        asyncio.get_running_loop().call_later(self._timing.rejoin_s, self.give_out)

    def welcome(self, hello: wire.Message, writer: asyncio.StreamWriter) -> Job:
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
        for held in hello["held"]:
            self._pool.adopt((job.id, held["n"]), held["server"])
            job.granted_at[held["n"]] = now - held["age_s"]
        warnings = [member.warning for member in self._members.values() if member.warning]
        job.tell({"op": "welcome", "warnings": warnings})
        self._awaited -= 1
        return job

    def farewell(self, job: Job) -> None:
        """Ended or killed: what it held is free again."""
        self.jobs.pop(job.id, None)  # none are left once the fleet itself leaves
        self._pool.drop(job.id)
        self.give_out()

    def hear(self, job: Job, message: wire.Message) -> None:
        number = message["n"]
        match message["op"]:
            case "lease":
                self._pool.ask(Ask(job.id, number, job.order, job.limit, frozenset(message["avoid"]), message["alone"]))
                self.give_out()
                self.refuse_where_hopeless()
            case "cancel":
                self._pool.cancel((job.id, number))
                self.give_out()
            case "release":
                self._released(job, message)
            case "want":
                job.wanted = number
            case "ping":
                job.tell({"op": "pong", "n": number})

    def give_out(self) -> None:
        if self._awaited > 0 and time.monotonic() < self._awaited_until:
            return
        idle = [member for member in self._members.values() if not member.outstanding]
        grants = self._pool.grants()
        for member in idle:
            member.busy_from_now()
        for grant in grants:
            job, member = self.jobs[grant.ask.client], self._members[grant.server]
            job.granted_at[grant.ask.number] = time.monotonic()
            job.tell({"op": "grant", "n": grant.ask.number, "server": member.name, "url": member.url})

    def tell_lost(self, name: str) -> None:
        for client, number in self._pool.slots[name].outstanding:
            self.jobs[client].tell({"op": "lost", "n": number})

    def refuse_where_hopeless(self) -> None:
        for job, kind, message in self._patience.refusals(time.monotonic(), self._members.values(), self.jobs.values()):
            if self._pool.cancel_all(job.id):
                job.tell({"op": "refuse", "n": 0, "kind": kind, "message": message})

    def _released(self, job: Job, message: wire.Message) -> None:
        number = message["n"]
        granted_at = job.granted_at.pop(number, time.monotonic())
        name = self._pool.release((job.id, number))
        member = self._members.get(name) if name is not None else None
        fault = None if message["fault"] is None else Fault(message["fault"])
        if member is not None:
            self._note(member, message, fault)
        self.give_out()
        if member is not None and fault in _BROKEN:
            self._background.run(self._find_out(job, number, member, granted_at))
        else:
            job.tell({"op": "after", "n": number, "server_died": False})

    async def _find_out(self, job: Job, number: int, member: Member, granted_at: float) -> None:
        died = await member.died_since(granted_at)
        job.tell({"op": "after", "n": number, "server_died": died})

    def _note(self, member: Member, message: wire.Message, fault: Fault | None) -> None:
        if message["ok"]:
            self._pool.well(member.name)
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
                self._pool.full(member.name)
                asyncio.get_running_loop().call_later(self._timing.full_s, self._after_full, member.name)
            if member.record.suspect:
                member.withdraw()

    def _after_full(self, name: str) -> None:
        self._pool.resume(name)
        self.give_out()
