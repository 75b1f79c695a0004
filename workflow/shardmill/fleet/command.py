"""What a person does with a fleet by hand: have it up, take it down, look at it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from shardmill import runlock
from shardmill.engines.choose import api_key, engine, new_session
from shardmill.errors import ShardmillError
from shardmill.fleet import starter, wire
from shardmill.fleet.endpoints import endpoints
from shardmill.fleet.member import Member
from shardmill.fleet.pool import Pool
from shardmill.fleet.site import Expectation, Site
from shardmill.fleet.state import describe_servers
from shardmill.fleet.timing import timing
from shardmill.home import Home
from shardmill.servers.process import left_over
from shardmill.settings import Settings

State = dict[str, Any]

_PAUSE_S = 0.5
_DOWN_S = 120.0
_LOOK_S = 10.0
_SETTLED = frozenset({"ready", "refused", "failed"})


class NoAnswer(ShardmillError):
    """A fleet process that is there, and hangs."""


async def up(settings: Settings, progress: Callable[[State], None]) -> State:
    """Starts the servers, to live until `down`; returns when each is ready or given up. `progress` sees each state."""
    home = Home.of(settings)
    reader, writer = await starter.connect_or_start(home, settings)
    try:
        wire.write(writer, {"op": "hello", "who": "cli"})
        state = await _ask(reader, writer, "stay")
        while not all(server["state"] in _SETTLED for server in state["servers"]):
            progress(state)
            await asyncio.sleep(_PAUSE_S)
            state = await _ask(reader, writer, "state")
        return state
    finally:
        writer.close()


async def down(settings: Settings) -> int:
    """Stops the fleet and all its servers; how many servers that were. A run at work starts them again."""
    home = Home.of(settings)
    home.stay.unlink(missing_ok=True)
    count = len(left_over(home))
    connection = await starter.connect(home)
    until = time.monotonic() + _DOWN_S
    if connection is not None:
        reader, writer = connection
        wire.write(writer, {"op": "hello", "who": "cli"})
        try:
            await _ask(reader, writer, "down")
        except NoAnswer:
            until = time.monotonic()
        writer.close()
    while (who := runlock.holder(home.lock)) is not None:
        if time.monotonic() > until and who:
            os.kill(int(who["pid"]), signal.SIGKILL)
        await asyncio.sleep(_PAUSE_S / 5)
    # What a fleet that was killed has left.
    await asyncio.gather(*(process.stop(timing().grace_s) for process in left_over(home)))
    return count


async def look(settings: Settings, wait_s: float = _LOOK_S) -> State | None:
    """The fleet's state now. Without a fleet: what the endpoints themselves say, or None when servers are launched.

    wait_s: for an endpoint's answer.
    """
    home = Home.of(settings)
    connection = await starter.connect(home)
    if connection is not None:
        reader, writer = connection
        try:
            wire.write(writer, {"op": "hello", "who": "cli"})
            return await _ask(reader, writer, "state")
        finally:
            writer.close()
    if settings.servers.launch:
        return None
    return await _look_at_endpoints(settings, home, wait_s)


async def _look_at_endpoints(settings: Settings, home: Home, wait_s: float) -> State:
    key = api_key(settings.servers)
    async with new_session() as session:
        site = Site(
            home=home,
            engine=engine(settings.servers.engine, key),
            session=session,
            pool=Pool(),
            timing=timing(),
            expected=Expectation(settings.model.name, settings.model.context),
            changed=lambda: None,
            lost=lambda _: None,
            log=lambda _: None,
            slowest=lambda: settings.generate.request_timeout_s / 3,
        )
        members = [Member(endpoint.name, site, None, url=endpoint.url) for endpoint in endpoints(settings)]
        await asyncio.gather(*(member.inspect(wait_s) for member in members))
        return describe_servers(home, settings, members, site.clock())


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: str) -> State:
    wire.write(writer, {"op": what})
    try:
        answer = await asyncio.wait_for(wire.read(reader), _LOOK_S)
    except TimeoutError:
        raise NoAnswer(
            f"The fleet of servers (process {wire.peer(writer)}) does not answer; `shardmill servers down` ends it."
        ) from None
    if answer is None:
        raise ShardmillError("The fleet left while it was asked; try again.")
    return answer
