"""What servers of every engine are asked alike: whether they are well, a probe, and JSON objects about themselves."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import aiohttp

from shardmill.engines import http
from shardmill.engines.base import Answer, Request, SamplingParams, ServerFault
from shardmill.errors import SetupFault

_GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, stop_token_ids=())


class HttpEngine(ABC):
    def __init__(self, api_key: str | None = None) -> None:
        self._key = api_key

    @abstractmethod
    async def generate(
        self, session: aiohttp.ClientSession, url: str, request: Request, timeout_s: float
    ) -> Answer: ...

    async def health(self, session: aiohttp.ClientSession, url: str, timeout_s: float = 25.0) -> bool:
        try:
            reply = await http.call(session, "GET", f"{url}/health", timeout_s=timeout_s, api_key=self._key)
        except ServerFault:
            return False
        return reply.status == 200

    async def probe(
        self,
        session: aiohttp.ClientSession,
        url: str,
        prompt_ids: Sequence[int] = (0, 1, 2),
        timeout_s: float = 60.0,
    ) -> Answer:
        request = Request(f"probe-{uuid.uuid4().hex}", prompt_ids, 2, _GREEDY)
        return await self.generate(session, url, request, timeout_s)

    async def _get(self, session: aiohttp.ClientSession, url: str, path: str, timeout_s: float) -> dict[str, Any]:
        return await http.get_object(session, url, path, timeout_s, self._key)

    async def _get_if_there(
        self, session: aiohttp.ClientSession, url: str, path: str, timeout_s: float
    ) -> dict[str, Any]:
        """For what only adds detail."""
        try:
            return await self._get(session, url, path, timeout_s)
        except (ServerFault, SetupFault):
            return {}


def first(value: Any) -> dict[str, Any]:
    """The first object of a list; an empty one where there is none."""
    return value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else {}
