"""A server through its life: started, made sure of, watched, withdrawn, restarted, let back in.

A server that jobs only use (an endpoint) goes the same way without the starting and stopping.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

from shardmill.engines.base import ServerFault
from shardmill.errors import SetupFault, ShardmillError
from shardmill.fleet.checks import listening
from shardmill.fleet.member import Member
from shardmill.fleet.site import State
from shardmill.servers import process as processes
from shardmill.servers.launcher import Launcher, StartProblem
from shardmill.servers.process import ServerProcess

_STEADY_ANSWERS = 20  # in a row, before a server that failed often counts as steady again
_BAD_PAUSE = 5  # doublings of the backoff: an endpoint that has gone bad can't be restarted from here, only left alone


class _StartFailed(Exception):
    def __init__(self, problem: StartProblem) -> None:
        self.problem = problem


class Life:
    """`run` never ends by itself, but for a server that is given up or can't be used."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._site = member.site
        self._timing = member.site.timing
        self._withdrawals = 0

    async def run(self) -> None:
        launcher = self._member.launcher
        if launcher is None:
            await self._of_an_endpoint()
        else:
            await self._of_a_server(launcher)

    async def _of_an_endpoint(self) -> None:
        member = self._member
        while True:
            await self._until_well(None)
            member.enter_pool()
            why = await self._watch()
            bad = member.record.bad is not None
            member.leave_pool(State.SUSPECT, why)
            if not bad:
                self._site.lost(member.name)
            member.begin_record()
            self._withdrawals += 1
            await asyncio.sleep(self._pause(self._withdrawals + (_BAD_PAUSE if bad else 0)))

    async def _of_a_server(self, launcher: Launcher) -> None:
        member = self._member
        while True:
            try:
                await self._start(launcher)
            except _StartFailed as failed:
                if not await self._after_failed_start(failed.problem):
                    return
                continue
            member.enter_pool()
            why = await self._watch()
            await self._stop(why)
            member.restarts += 1
            # A server that got something done is started again at once, however often.
            if member.record.answers:
                member.failures = 0
            elif not await self._after_failed_start(StartProblem(why)):
                return

    # Starting

    async def _start(self, launcher: Launcher) -> None:
        member, timing = self._member, self._timing
        if member.process is None:
            member.set(State.STARTING, "being prepared")
            try:
                command = await launcher.command()
                member.process = await processes.start(
                    self._site.home, member.name, command, timing.grace_s, timing.orphan_s
                )
            except (ShardmillError, OSError) as error:
                raise _StartFailed(StartProblem(str(error), setup=isinstance(error, SetupFault))) from None
            member.starts += 1
        member.url = member.process.url
        member.begin_record()
        member.set(State.STARTING, "loading")
        deadline = timing.start_deadline_s - (time.time() - member.process.started)
        try:
            await asyncio.wait_for(self._until_well(member.process), max(deadline, timing.probe_timeout_s))
        except TimeoutError:
            raise _StartFailed(StartProblem(f"not ready {timing.start_deadline_s:.0f} s after its start")) from None

    async def _after_failed_start(self, problem: StartProblem) -> bool:
        """Cleans up, and waits for the next start. False when there will be none."""
        member = self._member
        if member.process is not None:
            member.set(State.STOPPING, problem.reason)
            await member.process.stop(self._timing.grace_s)
            member.process = None
        if problem.setup:
            member.set(State.REFUSED, problem.reason)
            return False
        member.failures += 1
        if member.failures >= self._timing.starts:
            member.set(State.FAILED, problem.reason)
            return False
        member.set(State.BACKOFF, problem.reason)
        await asyncio.sleep(0 if problem.ports else self._pause(member.failures))
        return True

    async def _until_well(self, process: ServerProcess | None) -> None:
        """Returns once the server is healthy, fits, and has really generated something.

        An endpoint that refuses by its set-up is asked again, in case somebody repairs it; a server of our own is not.
        """
        member, rounds = self._member, 0
        while True:
            if process is not None and not process.alive():
                raise self._ended(process)
            try:
                problem = await member.check(deep=True)
                if problem is None:
                    await member.learn()
                    _make_sure_of(process)
                    return
                if member.state is not State.REFUSED:
                    member.why = problem
            except SetupFault as fault:
                if process is not None:
                    raise _StartFailed(StartProblem(str(fault), setup=True)) from None
                member.set(State.REFUSED, str(fault))
            except ServerFault as fault:
                member.why = str(fault)
            rounds += 1
            await member.sleep(min(self._timing.backoff_s * (0.5 if rounds < 20 else 4), 10.0))

    def _ended(self, process: ServerProcess) -> _StartFailed:
        assert self._member.launcher is not None
        return _StartFailed(self._member.launcher.explain(process.log_tail(), process.exit_code()))

    # Watching

    async def _watch(self) -> str:
        """Returns why the server must leave, for a server that is in the pool."""
        member, timing = self._member, self._timing
        failed = 0
        checked_at = self._site.clock()
        while True:
            if member.process is not None and not member.process.alive():
                code = member.process.exit_code()
                return f"it died (exit code {code})" if code is not None else "it died"
            if member.record.bad is not None:
                return member.record.bad
            if member.state is State.REFUSED:
                return member.why
            suspect, quiet = member.record.suspect or member.state is State.SUSPECT, self._quiet()
            due = self._site.clock() - checked_at >= timing.health_every_s
            if suspect or due:
                answers = member.record.answers
                try:
                    problem = await member.check(deep=suspect or quiet)
                except SetupFault as fault:
                    return str(fault)
                checked_at = self._site.clock()
                if problem is None or (member.record.answers > answers and not suspect):
                    failed = 0
                    if member.state is State.SUSPECT:
                        await self._return()
                else:
                    failed += 1
                    if failed >= timing.failed_checks or not await listening(member.url):
                        return f"{problem}, {failed} times in a row" if failed > 1 else problem
            if member.record.answers > _STEADY_ANSWERS and not member.record.in_a_row:
                self._withdrawals = 0
            await member.sleep(timing.tick_s)

    async def _return(self) -> None:
        """Well again by its probe. The more often that happens, the longer it waits, since probes don't show all."""
        self._withdrawals += 1
        if self._withdrawals > 1:
            await asyncio.sleep(self._pause(self._withdrawals - 1))
        self._member.record.in_a_row = 0
        self._member.enter_pool()

    def _quiet(self) -> bool:
        """It has had work for long, and not one answer came.

        How long that is its own answers say, or else those of other servers: behind a full server's queue a probe says
        nothing, and one whose answers take minutes is well.
        """
        member = self._member
        patience = max(self._timing.quiet_s, 3 * (member.record.slowest or self._site.slowest()))
        last = max(member.record.last_answer, member.busy_since)
        return bool(member.outstanding) and self._site.clock() - last > patience

    # Stopping

    async def _stop(self, why: str) -> None:
        member = self._member
        assert member.process is not None
        if member.record.bad is not None and member.process.alive():
            member.leave_pool(State.DRAINING, why)
            await self._drain()
        else:
            member.died_at = self._site.clock()  # dead, or about to be killed under its requests
        member.leave_pool(State.STOPPING, why)
        await member.process.stop(self._timing.grace_s)
        member.process = None
        self._site.lost(member.name)

    async def _drain(self) -> None:
        until = self._site.clock() + self._timing.drain_s
        while self._member.outstanding and self._site.clock() < until:
            await asyncio.sleep(self._timing.tick_s / 4)

    def _pause(self, times: int) -> float:
        return min(self._timing.backoff_s * 2.0 ** max(0, times - 1), self._timing.backoff_most_s)


def _make_sure_of(process: ServerProcess | None) -> None:
    """It could be a stranger that took the port first, and our own server that is about to fail."""
    if process is None:
        return
    port = urlsplit(process.url).port
    if port is not None and process.listens_at(port) is False:
        raise _StartFailed(StartProblem(f"another program listens at its port {port}", ports=True))
