"""Whether a server is well: what it says itself, whether anything listens, and whether it really generates."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit

from shardmill.engines.base import PromptRefused, ServerFault
from shardmill.fleet.site import Site

_CONNECT_S = 3.0


async def check(site: Site, url: str, probe_timeout_s: float | None, known: bool) -> str | None:
    """None when the server is well, else what is wrong, in a few words.

    probe_timeout_s: with a real generation, which a hung server with a well /health doesn't pass; None leaves it out.
    known: it was well before. Raises SetupFault where the set-up is at fault; of a known server, only its answer to a
    generation says that, since a proxy may answer 404 while the server behind it starts again.
    """
    try:
        if not await site.engine.health(site.session, url, site.timing.health_timeout_s):
            if not await listening(url):
                return "nothing listens at its port"
            if not known:
                await site.engine.info(site.session, url)  # raises where it is a key that is missing
            return "its /health is not well"
    except ServerFault as fault:
        return str(fault)
    if probe_timeout_s is None:
        return None
    try:
        await site.engine.probe(site.session, url, timeout_s=probe_timeout_s)
    except (ServerFault, PromptRefused) as fault:
        return f"its probe failed ({fault})"
    return None


async def listening(url: str) -> bool:
    """False only when the host says that nothing listens there."""
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(address.hostname, port)
    except ConnectionRefusedError:
        return False
    except (OSError, TimeoutError):
        return True  # not known: a host that can't be reached for now may come back with its answers
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
