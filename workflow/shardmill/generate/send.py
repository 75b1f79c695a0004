"""One request of a prompt to the server of a lease, and what its answer is worth."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Protocol

import aiohttp

from shardmill.engines import Answer, Engine, Fault, PromptRefused, Request, ServerFault
from shardmill.errors import SetupFault
from shardmill.fleet.lease import Aftermath, Lease, Outcome
from shardmill.generate.asked import RESERVES, History, Model, Prompt, request_id, request_seed
from shardmill.generate.audit import Kept, Verdict, audit
from shardmill.generate.trust import CONTROL_TOKENS


class Pool(Protocol):
    """What asking needs of the fleet (fleet.client.Fleet)."""

    async def lease(self, avoid: frozenset[str] = frozenset(), alone: bool = False) -> Lease: ...

    async def release(self, lease: Lease, outcome: Outcome) -> Aftermath: ...

    def lost(self, lease: Lease) -> asyncio.Event: ...


class Sender:
    def __init__(
        self, engine: Engine, session: aiohttp.ClientSession, fleet: Pool, model: Model, timeout_s: float
    ) -> None:
        self._engine = engine
        self._session = session
        self._fleet = fleet
        self._model = model
        self._timeout_s = timeout_s

    def request(self, prompt: Prompt, history: History) -> Request:
        budget = prompt.max_new_tokens
        if history.reserve:
            budget = max(1, budget - RESERVES[history.reserve - 1])
        sampling = self._model.sampling
        if sampling.seed is not None:
            seed = request_seed(sampling.seed, prompt.prompt_id, history.attempts)
            sampling = replace(sampling, seed=seed)
        return Request(request_id(prompt), prompt.ids, budget, sampling)

    async def send(self, lease: Lease, request: Request) -> Answer:
        """The answer, or a fault as soon as the server is known to be gone."""
        lost = self._fleet.lost(lease)
        sending = asyncio.create_task(
            self._engine.generate(self._session, lease.url, request, self._timeout_s), name=request.request_id
        )
        losing = asyncio.create_task(lost.wait())
        try:
            await asyncio.wait({sending, losing}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise ServerFault(Fault.RESET, "the server is gone")
            return await sending
        except ServerFault as fault:
            if fault.fault is Fault.TIMEOUT:
                await self._engine.abort(self._session, lease.url, request.request_id)
            raise
        finally:
            for task in (sending, losing):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ServerFault, PromptRefused, SetupFault):
                await sending

    def audit(self, prompt: Prompt, request: Request, answer: Answer) -> Verdict:
        model = self._model
        return audit(answer, len(prompt.ids), model.stop_ids, model.vocab_size, request.max_new_tokens)

    async def proves_itself(self, lease: Lease, control: Prompt) -> bool:
        """Whether the server gives a good answer to a prompt that has had one: its first few tokens are enough."""
        budget = min(CONTROL_TOKENS, control.max_new_tokens)
        request = Request(request_id(control), control.ids, budget, self._model.sampling)
        try:
            answer = await self.send(lease, request)
        except (ServerFault, PromptRefused):
            return False
        return isinstance(self.audit(control, request, answer), Kept)
