"""One server of the fleet: what is known of it, its place in the pool, and whether it died. `life.py` runs it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field

from shardmill.engines.base import ServerFault, ServerInfo, ServerLoad
from shardmill.errors import SetupFault
from shardmill.fleet.checks import check, listening
from shardmill.fleet.gpus import Gpu
from shardmill.fleet.record import Record
from shardmill.fleet.site import Site, State
from shardmill.servers.launcher import Launcher
from shardmill.servers.process import ServerProcess

_IN_SERVICE = frozenset({State.READY, State.SUSPECT, State.DRAINING})


@dataclass
class Member:
    """`launcher` is None for a server that jobs only use (an endpoint)."""

    name: str
    site: Site
    launcher: Launcher | None
    url: str
    state: State = State.STARTING
    why: str = "not reached yet"
    since: float = 0.0
    info: ServerInfo | None = None
    cap_reason: str | None = None  # why it runs fewer requests at once than asked for
    resident_bytes: int | None = None
    gpu: Gpu | None = None
    load: ServerLoad | None = None
    record: Record = field(init=False)
    process: ServerProcess | None = None
    starts: int = 0
    restarts: int = 0
    died_at: float | None = None
    failures: int = 0  # starts in a row that led to nothing
    answers_before: int = 0  # of records before this one
    faults_before: Counter[str] = field(default_factory=Counter)
    busy_since: float = 0.0  # when it last had nothing to do, or came into the pool
    warning: str | None = None
    _poke: asyncio.Event = field(default_factory=asyncio.Event)
    _verdict: asyncio.Task[bool] | None = None

    def __post_init__(self) -> None:
        self.record = Record(self.site.clock())
        self.since = self.site.clock()
        self.site.pool.add(self.name)

    @property
    def outstanding(self) -> int:
        """Requests that it has now."""
        return len(self.site.pool.slots[self.name].outstanding)

    def set(self, state: State, why: str) -> None:
        if state is not self.state or why != self.why:
            self.site.log(f"{self.name}: {state.value}{': ' + why if why else ''}")
        if state is not self.state:
            self.since = self.site.clock()
        self.state, self.why = state, why

    def begin_record(self) -> None:
        """For a new start of the server."""
        self.answers_before += self.record.answers
        self.faults_before += self.record.faults
        self.record = Record(self.site.clock())

    # What it says of itself

    async def check(self, deep: bool) -> str | None:
        """None when it is well, else what is wrong. `deep`: with a real generation."""
        # Behind a full server's queue, a probe waits for an answer to end.
        patience = max(self.site.timing.probe_timeout_s, self.record.slowest if self.outstanding else 0.0)
        return await check(self.site, self.url, patience if deep else None, known=self.info is not None)

    async def learn(self) -> None:
        """Raises SetupFault for a server that can't be used for this build."""
        self.info = await self.site.engine.info(self.site.session, self.url)
        logged = self.launcher.capped(self.process.log_tail()) if self.launcher and self.process else None
        self.cap_reason = logged or self.info.cap_reason
        self.judge()

    def judge(self) -> None:
        """The same by what is known already."""
        if self.info is None:
            return
        refusal = self.site.expected.refusal(self.url, self.info)
        if refusal is not None:
            raise SetupFault(refusal)
        warning = self.site.expected.warning(self.url, self.info)
        if warning is not None and warning != self.warning:
            self.site.log(warning)
        self.warning = warning

    async def inspect(self, timeout_s: float) -> None:
        """Looks once, for a person, at a server that no fleet watches."""
        try:
            async with asyncio.timeout(timeout_s):
                problem = await self.check(deep=False)
                if problem is None:
                    await self.learn()
            self.set(State.STARTING if problem else State.READY, problem or "")
            await self.look(timeout_s, {})
        except SetupFault as fault:
            self.set(State.REFUSED, str(fault))
        except (ServerFault, TimeoutError) as fault:
            self.set(State.STARTING, str(fault) or f"no answer within {timeout_s:.0f} s")

    async def look(self, timeout_s: float, gpus: dict[int, Gpu]) -> None:
        """Refreshes what `status` shows."""
        if self.launcher is not None and self.launcher.gpu is not None:
            self.gpu = gpus.get(self.launcher.gpu)
        self.resident_bytes = self.process.resident_bytes() if self.process is not None else None
        if self.state not in (State.READY, State.DRAINING):
            self.load = None
            return
        try:
            self.load = await self.site.engine.load(self.site.session, self.url, timeout_s)
        except (ServerFault, SetupFault):
            self.load = None  # without metrics it serves as well

    # Its place in the pool

    def enter_pool(self) -> None:
        self.set(State.READY, "")
        self.busy_since = self.site.clock()
        self.site.pool.open(self.name, self.info.running_cap if self.info is not None else None)
        self.site.changed()

    def leave_pool(self, state: State, why: str) -> None:
        self.site.pool.close(self.name)
        self.set(state, why)
        self.site.changed()

    def busy_from_now(self) -> None:
        """For one that had nothing to do, after leases were given out."""
        if self.outstanding:
            self.busy_since = self.site.clock()

    def withdraw(self) -> None:
        """Several faults in a row: out of the pool at once, then it is probed."""
        if self.state is State.READY:
            self.leave_pool(State.SUSPECT, self.record.last_fault)
        self.poke()

    def refuse(self, fault: SetupFault) -> None:
        """A job has learnt what the server does not fit."""
        self.leave_pool(State.REFUSED, str(fault))

    def give_up(self, why: str) -> None:
        self.leave_pool(State.FAILED, why)

    def poke(self) -> None:
        """Something happened: who watches it looks now."""
        self._poke.set()

    async def sleep(self, seconds: float) -> None:
        """Until it is poked, at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._poke.wait(), seconds)
        self._poke.clear()

    async def shut_down(self) -> None:
        """For good: out of the pool, and its process, if it has one, stopped."""
        self.leave_pool(State.STOPPING, "the fleet leaves")
        if self.process is not None:
            await self.process.stop(self.site.timing.grace_s)
            self.process = None

    # Whether it died under a request

    async def died_since(self, moment: float) -> bool:
        """Whether the server is known to have died after `moment`; waits for certainty, `verdict_s` at most."""
        if self.died_at is not None and self.died_at >= moment:
            return True
        if self.process is not None and self._began_after(self.process, moment):
            return True  # died while no fleet was there to see it
        if self._verdict is None or self._verdict.done():
            self._verdict = asyncio.create_task(self._dies())
        return await asyncio.shield(self._verdict) or (self.died_at is not None and self.died_at >= moment)

    def _began_after(self, process: ServerProcess, moment: float) -> bool:
        """By the wall clock, which may have been set, only where there is no other."""
        if process.begun is not None:
            return process.begun > moment
        return process.started > time.time() - (self.site.clock() - moment)

    async def _dies(self) -> bool:
        until = self.site.clock() + self.site.timing.verdict_s
        begun = self.site.clock()
        while self.site.clock() < until:
            if self.died_at is not None and self.died_at >= begun:
                return True
            if self.launcher is not None and self.state not in _IN_SERVICE:
                return True  # it was stopped, or is being started again
            if (self.process is not None and not self.process.alive()) or not await listening(self.url):
                self._dead()
                return True
            if await self.site.engine.health(self.site.session, self.url, self.site.timing.verdict_s / 2):
                return False
            await asyncio.sleep(self.site.timing.tick_s / 4)
        return False

    def _dead(self) -> None:
        self.died_at = self.site.clock()
        if self.state is State.READY:
            self.leave_pool(State.SUSPECT, "it died")
        self.poke()
