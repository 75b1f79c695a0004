"""One server of the fleet through its life: started, made sure of, watched, withdrawn, restarted, let back in.

A server that jobs only use (an endpoint) goes the same way without the starting and stopping.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from shardmill.engines.base import ServerFault, ServerInfo, ServerLoad
from shardmill.errors import SetupFault, ShardmillError
from shardmill.fleet.checks import check, listening
from shardmill.fleet.gpus import Gpu
from shardmill.fleet.record import Record
from shardmill.fleet.site import Site, State
from shardmill.servers import process as processes
from shardmill.servers.launcher import Launcher, StartProblem
from shardmill.servers.process import ServerProcess

_STEADY_ANSWERS = 20  # in a row, before a server that failed often counts as steady again
_IN_SERVICE = frozenset({State.READY, State.SUSPECT, State.DRAINING})
_BAD_PAUSE = 5  # doublings of the backoff: an endpoint that has gone bad can't be restarted from here, only left alone


class _StartFailed(Exception):
    def __init__(self, problem: StartProblem) -> None:
        self.problem = problem


@dataclass
class Member:
    """One server. `run` is its life; everything else looks at it or tells it something."""

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
    busy_since: float = 0.0  # when it last had nothing to do
    warning: str | None = None
    _poke: asyncio.Event = field(default_factory=asyncio.Event)
    _verdict: asyncio.Task[bool] | None = None
    _withdrawals: int = 0

    def __post_init__(self) -> None:
        self.record = Record(self.site.clock())
        self.since = self.site.clock()
        self.site.pool.add(self.name)

    # Its life

    async def run(self) -> None:
        """Never ends by itself, but for a server that is given up or can't be used."""
        if self.launcher is None:
            await self._life_of_an_endpoint()
        else:
            await self._life_of_a_server(self.launcher)

    async def shut_down(self) -> None:
        """For good: out of the pool, and its process, if it has one, stopped."""
        self._leave_pool(State.STOPPING, "the fleet leaves")
        if self.process is not None:
            await self.process.stop(self.site.timing.grace_s)
            self.process = None

    async def _life_of_an_endpoint(self) -> None:
        while True:
            await self._until_well(None)
            self._enter_pool()
            why = await self._watch()
            bad = self.record.bad is not None
            self._leave_pool(State.SUSPECT, why)
            if not bad:
                self.site.lost(self.name)
            self._begin_record()
            self._withdrawals += 1
            await asyncio.sleep(self._pause(self._withdrawals + (_BAD_PAUSE if bad else 0)))

    async def _life_of_a_server(self, launcher: Launcher) -> None:
        while True:
            try:
                await self._start(launcher)
            except _StartFailed as failed:
                if not await self._after_failed_start(failed.problem):
                    return
                continue
            self._enter_pool()
            why = await self._watch()
            await self._stop(why)
            self.restarts += 1
            # A server that got something done is started again at once, however often.
            if self.record.answers:
                self.failures = 0
            elif not await self._after_failed_start(StartProblem(why)):
                return

    async def _start(self, launcher: Launcher) -> None:
        timing = self.site.timing
        if self.process is None:
            self._set(State.STARTING, "being prepared")
            try:
                command = await launcher.command()
                self.process = await processes.start(
                    self.site.home, self.name, command, timing.grace_s, timing.orphan_s
                )
            except ShardmillError as error:
                raise _StartFailed(StartProblem(str(error), setup=isinstance(error, SetupFault))) from None
            self.starts += 1
        self.url = self.process.url
        self._begin_record()
        self._set(State.STARTING, "loading")
        deadline = timing.start_deadline_s - (time.time() - self.process.started)
        try:
            await asyncio.wait_for(self._until_well(self.process), max(deadline, timing.probe_timeout_s))
        except TimeoutError:
            raise _StartFailed(StartProblem(f"not ready {timing.start_deadline_s:.0f} s after its start")) from None

    async def _after_failed_start(self, problem: StartProblem) -> bool:
        """Cleans up, and waits for the next start. False when there will be none."""
        if self.process is not None:
            self._set(State.STOPPING, problem.reason)
            await self.process.stop(self.site.timing.grace_s)
            self.process = None
        if problem.setup:
            self._set(State.REFUSED, problem.reason)
            return False
        self.failures += 1
        if self.failures >= self.site.timing.starts:
            self._set(State.FAILED, problem.reason)
            return False
        self._set(State.BACKOFF, problem.reason)
        await asyncio.sleep(0 if problem.ports else self._pause(self.failures))
        return True

    async def _until_well(self, process: ServerProcess | None) -> None:
        """Returns once the server is healthy, fits, and has really generated something.

        An endpoint that refuses by its set-up is asked again, in case somebody repairs it; a server of our own is not.
        """
        rounds = 0
        while True:
            if process is not None and not process.alive():
                raise self._ended(process)
            try:
                problem = await self._check(deep=True)
                if problem is None:
                    await self._learn()
                    self._make_sure_of(process)
                    return
                if self.state is not State.REFUSED:
                    self.why = problem
            except SetupFault as fault:
                if process is not None:
                    raise _StartFailed(StartProblem(str(fault), setup=True)) from None
                self._set(State.REFUSED, str(fault))
            except ServerFault as fault:
                self.why = str(fault)
            rounds += 1
            await self._sleep(min(self.site.timing.backoff_s * (0.5 if rounds < 20 else 4), 10.0))

    def _ended(self, process: ServerProcess) -> _StartFailed:
        assert self.launcher is not None
        return _StartFailed(self.launcher.explain(process.log_tail(), process.exit_code()))

    def _make_sure_of(self, process: ServerProcess | None) -> None:
        """It could be a stranger that took the port first, and our own server that is about to fail."""
        if process is None:
            return
        port = urlsplit(process.url).port
        if port is not None and process.listens_at(port) is False:
            raise _StartFailed(StartProblem(f"another program listens at its port {port}", ports=True))

    async def _learn(self) -> None:
        self.info = await self.site.engine.info(self.site.session, self.url)
        logged = self.launcher.capped(self.process.log_tail()) if self.launcher and self.process else None
        self.cap_reason = logged or self.info.cap_reason
        self.judge()

    def judge(self) -> None:
        """Raises SetupFault for a server that can't be used for this build."""
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
                problem = await self._check(deep=False)
                if problem is None:
                    await self._learn()
            self._set(State.STARTING if problem else State.READY, problem or "")
            await self.look(timeout_s, {})
        except SetupFault as fault:
            self._set(State.REFUSED, str(fault))
        except (ServerFault, TimeoutError) as fault:
            self._set(State.STARTING, str(fault) or f"no answer within {timeout_s:.0f} s")

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

    def refuse(self, fault: SetupFault) -> None:
        """A job has learnt what the server does not fit."""
        self._leave_pool(State.REFUSED, str(fault))

    def _begin_record(self) -> None:
        self.answers_before += self.record.answers
        self.faults_before += self.record.faults
        self.record = Record(self.site.clock())

    # Watching

    async def _watch(self) -> str:
        """Returns why the server must leave, for a server that is in the pool."""
        timing = self.site.timing
        failed = 0
        checked_at = self.site.clock()
        while True:
            if self.process is not None and not self.process.alive():
                code = self.process.exit_code()
                return f"it died (exit code {code})" if code is not None else "it died"
            if self.record.bad is not None:
                return self.record.bad
            if self.state is State.REFUSED:
                return self.why
            suspect, quiet = self.record.suspect or self.state is State.SUSPECT, self._quiet()
            due = self.site.clock() - checked_at >= timing.health_every_s
            if suspect or due:
                answers = self.record.answers
                try:
                    problem = await self._check(deep=suspect or quiet)
                except SetupFault as fault:
                    return str(fault)
                checked_at = self.site.clock()
                if problem is None or (self.record.answers > answers and not suspect):
                    failed = 0
                    if self.state is State.SUSPECT:
                        await self._return()
                else:
                    failed += 1
                    if failed >= timing.failed_checks or not await listening(self.url):
                        return f"{problem}, {failed} times in a row" if failed > 1 else problem
            if self.record.answers > _STEADY_ANSWERS and not self.record.in_a_row:
                self._withdrawals = 0
            await self._sleep(timing.tick_s)

    async def _return(self) -> None:
        """Well again by its probe. The more often that happens, the longer it waits, since probes don't show all."""
        self._withdrawals += 1
        if self._withdrawals > 1:
            await asyncio.sleep(self._pause(self._withdrawals - 1))
        self.record.in_a_row = 0
        self._enter_pool()

    def _quiet(self) -> bool:
        """It has had work for long, and not one answer came."""
        patience = max(self.site.timing.quiet_s, 3 * self.record.slowest)
        last = max(self.record.last_answer, self.busy_since)
        return bool(self._outstanding()) and self.site.clock() - last > patience

    def _outstanding(self) -> int:
        return len(self.site.pool.slots[self.name].outstanding)

    async def _check(self, deep: bool) -> str | None:
        # Behind a full server's queue, a probe waits for an answer to end.
        patience = max(self.site.timing.probe_timeout_s, self.record.slowest if self._outstanding() else 0.0)
        return await check(self.site, self.url, patience if deep else None, known=self.info is not None)

    # Whether it died under a request

    async def died_since(self, moment: float) -> bool:
        """Whether the server is known to have died after `moment`; waits for certainty, `verdict_s` at most."""
        if self.died_at is not None and self.died_at >= moment:
            return True
        if self.process is not None and self.process.started > time.time() - (self.site.clock() - moment):
            return True  # died while no fleet was there to see it
        if self._verdict is None or self._verdict.done():
            self._verdict = asyncio.create_task(self._dies())
        return await asyncio.shield(self._verdict) or (self.died_at is not None and self.died_at >= moment)

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
            self._leave_pool(State.SUSPECT, "it died")
        self._poke.set()

    # Leaving and entering

    def withdraw(self) -> None:
        """Several faults in a row: out of the pool at once, then it is probed."""
        if self.state is State.READY:
            self._leave_pool(State.SUSPECT, self.record.last_fault)
        self._poke.set()

    def give_up(self, why: str) -> None:
        self._leave_pool(State.FAILED, why)

    def poke(self) -> None:
        """Something happened: look now."""
        self._poke.set()

    def granted(self) -> None:
        """A lease was given out."""
        if self._outstanding() == 1:
            self.busy_since = self.site.clock()

    def _enter_pool(self) -> None:
        self._set(State.READY, "")
        self.site.pool.open(self.name, self.info.running_cap if self.info is not None else None)
        self.site.changed()

    def _leave_pool(self, state: State, why: str) -> None:
        self.site.pool.close(self.name)
        self._set(state, why)
        self.site.changed()

    async def _stop(self, why: str) -> None:
        assert self.process is not None
        if self.record.bad is not None and self.process.alive():
            self._leave_pool(State.DRAINING, why)
            await self._drain()
        else:
            self.died_at = self.site.clock()  # dead, or about to be killed under its requests
        self._leave_pool(State.STOPPING, why)
        await self.process.stop(self.site.timing.grace_s)
        self.process = None
        self.site.lost(self.name)

    async def _drain(self) -> None:
        until = self.site.clock() + self.site.timing.drain_s
        while self._outstanding() and self.site.clock() < until:
            await asyncio.sleep(self.site.timing.tick_s / 4)

    def _pause(self, times: int) -> float:
        timing = self.site.timing
        return min(timing.backoff_s * 2.0 ** max(0, times - 1), timing.backoff_most_s)

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._poke.wait(), seconds)
        self._poke.clear()

    def _set(self, state: State, why: str) -> None:
        if state is not self.state or why != self.why:
            self.site.log(f"{self.name}: {state.value}{': ' + why if why else ''}")
        if state is not self.state:
            self.since = self.site.clock()
        self.state, self.why = state, why
