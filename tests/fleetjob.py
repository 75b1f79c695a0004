"""A job of a fleet, as small as one can be: leases, requests, releases. Run as a process by tests/test_fleet.py.

`python fleetjob.py SETTINGS.json BUILD ORDER COUNT` prints {"answers", "servers"}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from shardmill.engines import Request, SamplingParams, ServerFault, engine
from shardmill.engines.choose import new_session
from shardmill.fleet.client import Fleet
from shardmill.fleet.lease import Aftermath, Outcome
from shardmill.paths import BuildPaths
from shardmill.settings import Settings, resolve

GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, stop_token_ids=(2,))


def answered(tokens: int = 8, **changes: Any) -> Outcome:
    values: dict[str, Any] = {"ok": True, "fault": None, "detail": "", "tokens": tokens, "seconds": 0.1}
    return Outcome(**{**values, "accept_length": None, "degenerate": False, **changes})


async def send(
    fleet: Fleet, session: aiohttp.ClientSession, settings: Settings, prompt: list[int], timeout_s: float = 60.0
) -> tuple[str, Aftermath, list[int] | None]:
    """One lease, one request, one release. The ids are None after a server's fault."""
    lease = await fleet.lease()
    begun = time.monotonic()
    request = Request(f"{lease.id}-{begun}", prompt, 8, GREEDY)
    try:
        answer = await engine(settings.servers.engine).generate(session, lease.url, request, timeout_s)
    except ServerFault as fault:
        outcome = answered(0, ok=False, fault=fault.fault, detail=fault.detail, seconds=time.monotonic() - begun)
        return lease.server, await fleet.release(lease, outcome), None
    outcome = answered(len(answer.output_ids), seconds=answer.latency_s, accept_length=answer.accept_length)
    return lease.server, await fleet.release(lease, outcome), answer.output_ids


async def work(settings: Settings, build: BuildPaths, order: int, count: int) -> dict[str, Any]:
    servers: Counter[str] = Counter()

    async def one(number: int) -> None:
        while True:
            server, _, ids = await send(fleet, session, settings, [5, order + 3, number + 3])
            if ids is not None:
                servers[server] += 1
                return

    async with await Fleet.join(settings, build, f"job-{order}", order) as fleet, new_session() as session:
        await asyncio.gather(*(one(number) for number in range(count)))
    return {"answers": sum(servers.values()), "servers": servers}


def main() -> None:
    settings = resolve(json.loads(Path(sys.argv[1]).read_text()))
    print(json.dumps(asyncio.run(work(settings, BuildPaths(Path(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4])))))


if __name__ == "__main__":
    main()
