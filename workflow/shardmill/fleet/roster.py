"""The servers that a fleet has: started, taken over from a fleet before it, or listed by others."""

from __future__ import annotations

import asyncio

from shardmill.errors import SettingsError, SetupFault
from shardmill.fleet.endpoints import endpoints
from shardmill.fleet.gpus import gpus
from shardmill.fleet.life import Life
from shardmill.fleet.member import Member
from shardmill.fleet.site import Site
from shardmill.servers.choose import launchers
from shardmill.servers.process import ServerProcess, left_over
from shardmill.settings import Settings

_LOAD_TIMEOUT_S = 5.0


class Roster:
    """Members by name, and the task that is the life of each."""

    def __init__(self, settings: Settings, site: Site, members: dict[str, Member]) -> None:
        self.members = members
        self._settings = settings
        self._site = site
        self._lives: dict[str, asyncio.Task[None]] = {}

    async def take_over(self) -> None:
        """Begins with the servers that the settings ask for.

        Those of a fleet that was killed go on serving, when they are what this one would start.
        """
        if not self._settings.servers.launch:
            return
        site = self._site
        wanted = {launcher.name: launcher for launcher in launchers(self._settings, site.home)}
        running = left_over(site.home)
        if not running:
            site.home.stay.unlink(missing_ok=True)  # servers that were to stay are gone: the machine was restarted
        ours: dict[str, ServerProcess] = {}
        others: list[ServerProcess] = []
        for process in running:
            launcher = wanted.get(process.name)
            if launcher is not None and process.record["fingerprint"] == launcher.fingerprint():
                site.log(f"{process.name}: taken over, process {process.pid} at {process.url}")
                ours[process.name] = process
            else:
                site.log(f"{process.name}: process {process.pid} was started with other settings, and is stopped")
                others.append(process)
        await asyncio.gather(*(process.stop(site.timing.grace_s) for process in others))
        for name, launcher in wanted.items():
            taken = ours.get(name)
            self._add(Member(name, site, launcher, url=taken.url if taken else "", process=taken))

    def read_endpoints(self) -> None:
        """Takes in endpoints that are new, and takes out those that are no longer listed."""
        if self._settings.servers.launch:
            return
        try:
            given = {endpoint.name: endpoint for endpoint in endpoints(self._settings)}
        except SettingsError as error:
            self._site.log(f"{error} The servers stay as they are.")
            return
        for name, endpoint in given.items():
            if name not in self.members:
                self._add(Member(name, self._site, None, url=endpoint.url))
        for name in [name for name in self.members if name not in given]:
            self._site.log(f"{name}: taken out of the endpoints")
            self._remove(name)
        pool = self._site.pool
        for name in [name for name in pool.slots if name not in self.members]:
            if not pool.slots[name].outstanding:
                pool.forget(name)

    def judge_all(self) -> None:
        """What servers must agree with has changed."""
        for member in self.members.values():
            try:
                member.judge()
            except SetupFault as fault:
                member.refuse(fault)

    async def look(self) -> None:
        """Refreshes what `status` shows of each."""
        servers = self._settings.servers
        seen = await gpus() if servers.launch and servers.gpus else {}
        await asyncio.gather(*(member.look(_LOAD_TIMEOUT_S, seen) for member in self.members.values()))

    async def shut_down(self) -> None:
        """Stops every server that was started here."""
        for life in self._lives.values():
            life.cancel()
        await asyncio.gather(*self._lives.values(), return_exceptions=True)
        await asyncio.gather(*(member.shut_down() for member in self.members.values()))
        # One whose start was cancelled half-way.
        await asyncio.gather(*(process.stop(self._site.timing.grace_s) for process in left_over(self._site.home)))

    def _add(self, member: Member) -> None:
        self.members[member.name] = member
        life = asyncio.create_task(Life(member).run())
        self._lives[member.name] = life
        life.add_done_callback(lambda life: self._ended(member, life))

    def _ended(self, member: Member, life: asyncio.Task[None]) -> None:
        """One server's trouble must not end the others' work, and must not pass in silence either."""
        error = None if life.cancelled() else life.exception()
        if error is not None:
            member.give_up(f"{type(error).__name__} in the fleet: {error}")

    def _remove(self, name: str) -> None:
        """Out of the pool; the answers under way still come."""
        self._lives.pop(name).cancel()
        self._site.pool.close(name)
        del self.members[name]
