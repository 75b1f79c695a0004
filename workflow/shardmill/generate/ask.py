"""Asking for one prompt until there is an answer to keep, or a reason that is the prompt's own ("Whose fault").

Server faults are tried again without end, on another server where there is one. What ends a prompt is degenerate
output on every attempt, and each time, before that is held against the prompt, the server that gave it must prove
itself on a control: a prompt of this shard that had a good answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import aiohttp

from shardmill.engines import (
    Answer,
    Engine,
    Fault,
    PromptRefused,
    Refusal,
    Request,
    ServerFault,
)
from shardmill.errors import SetupFault, ShardmillError
from shardmill.fleet.lease import Aftermath, Lease, Outcome
from shardmill.generate.asked import History, Model, Prompt, request_id, request_seed
from shardmill.generate.audit import Degenerate, Faulty, Kept, Useless, Verdict, audit
from shardmill.generate.pace import Pace
from shardmill.generate.progress import Tally
from shardmill.generate.reasons import FailReason
from shardmill.generate.rows import Completion
from shardmill.generate.trust import CONTROL_TOKENS, Trust

_log = logging.getLogger(__name__)

DEATHS = 3  # in flight at the death of so many servers: tried once alone (CONTRACTS.md, Servers)
_IN_FLIGHT = frozenset({Fault.RESET, Fault.HALF_SENT, Fault.TIMEOUT})
_NOT_COUNTED = frozenset({Fault.REFUSED, Fault.QUEUE_FULL})  # a fleet that is away or busy says nothing of the prompt
_RESERVES = (16, 64, 256)  # new tokens given up, in turn, when the server keeps room for speculation
_REASON = {Degenerate.EMPTY: FailReason.EMPTY, Degenerate.REPETITION: FailReason.REPETITION}


class Pool(Protocol):
    """What asking needs of the fleet (fleet.client.Fleet)."""

    async def lease(self, avoid: frozenset[str] = frozenset(), alone: bool = False) -> Lease: ...

    async def release(self, lease: Lease, outcome: Outcome) -> Aftermath: ...

    def lost(self, lease: Lease) -> asyncio.Event: ...


class Asker:
    """Asks for the prompts of one job. One for all of them: what one prompt teaches serves the others."""

    def __init__(
        self,
        engine: Engine,
        session: aiohttp.ClientSession,
        fleet: Pool,
        model: Model,
        tally: Tally,
        *,
        attempts: int,
        timeout_s: float,
        pace: Pace,
    ) -> None:
        self._engine = engine
        self._session = session
        self._fleet = fleet
        self._model = model
        self._tally = tally
        self._trust = Trust(attempts, answered=tally.ok > 0)
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._pace = pace

    async def ask(
        self, prompt: Prompt, history: History, remember: Callable[[], None], leased: Callable[[], None]
    ) -> Completion:
        """The row's content. `remember` is called when what the journal should keep of `history` has changed, `leased`
        with each lease.

        Raises NoServers, SetupFault, and ShardmillError for a prompt that meets nothing but servers' faults.
        """
        if not prompt.ids or min(prompt.ids) < 0 or max(prompt.ids) >= self._model.vocab_size:
            return _failed(FailReason.BAD_PROMPT_IDS, history)
        while True:
            alone = history.deaths >= DEATHS
            lease = await self._fleet.lease(history.avoid, alone)
            leased()
            with self._tally.flying():
                ended = await self._once(prompt, history, remember, lease, alone)
            if ended is not None:
                return ended
            await asyncio.sleep(self._backoff(history))

    async def _once(
        self, prompt: Prompt, history: History, remember: Callable[[], None], lease: Lease, alone: bool
    ) -> Completion | None:
        """One request. None: to be tried again."""
        request = self._request(prompt, history)
        try:
            answer = await self._send(lease, request)
        except ServerFault as fault:
            return await self._faulted(history, remember, lease, alone, fault.fault, fault.detail)
        except PromptRefused as refused:
            await self._fleet.release(lease, _outcome(ok=True, detail=refused.detail))
            return self._refused(history, refused)
        except SetupFault as error:
            await self._fleet.release(lease, _outcome(ok=False, detail=str(error)))
            raise
        return await self._judge(prompt, request, history, remember, lease, answer)

    async def _judge(
        self,
        prompt: Prompt,
        request: Request,
        history: History,
        remember: Callable[[], None],
        lease: Lease,
        answer: Answer,
    ) -> Completion | None:
        verdict = self._audit(prompt, request, answer)
        if isinstance(verdict, Faulty):
            if verdict.foreign_stop is not None:
                self._note_foreign_stop(history, lease, verdict.foreign_stop)
            return await self._faulted(history, remember, lease, False, verdict.fault, verdict.detail)
        self._trust.seen()
        if isinstance(verdict, Useless):
            return await self._useless(history, remember, lease, answer, verdict)
        history.attempts += 1
        await self._fleet.release(lease, _outcome(ok=True, answer=answer))
        self._trust.learn(prompt, history, verdict)
        self._tally.answered(lease.server, verdict, answer)
        return Completion(
            reason=None,
            output_ids=verdict.output_ids,
            finish=verdict.finish,
            accept_length=answer.accept_length,
            attempts=history.attempts,
            server=lease.server,
            latency_s=answer.latency_s,
            cut=verdict.cut,
        )

    async def _useless(
        self, history: History, remember: Callable[[], None], lease: Lease, answer: Answer, verdict: Useless
    ) -> Completion | None:
        """A degenerate answer: an attempt of this prompt, or, where the control fails as well, the server's fault."""
        control = self._trust.control
        proven = control is None or await self._proves_itself(lease, control)
        await self._fleet.release(lease, _outcome(ok=True, answer=answer, degenerate=True))
        history.avoid |= {lease.server}
        self._tally.degenerate(lease.server, verdict.kind, proven)
        if not proven:
            self._count_fault(history, lease, f"{verdict.kind}, as for another prompt that had a good answer")
            return None
        self._trust.counts()
        history.faults = 0
        history.attempts += 1
        history.useless[verdict.kind] += 1
        if history.useless[verdict.kind] >= self._trust.needed():
            return _failed(_REASON[verdict.kind], history)
        remember()
        return None

    async def _proves_itself(self, lease: Lease, control: Prompt) -> bool:
        """Whether the server gives a good answer to a prompt that has had one: its first few tokens are enough."""
        budget = min(CONTROL_TOKENS, control.max_new_tokens)
        request = Request(request_id(control), control.ids, budget, self._model.sampling)
        try:
            answer = await self._send(lease, request)
        except (ServerFault, PromptRefused):
            return False
        return isinstance(self._audit(control, request, answer), Kept)

    def _audit(self, prompt: Prompt, request: Request, answer: Answer) -> Verdict:
        return audit(answer, len(prompt.ids), self._model.stop_ids, self._model.vocab_size, request.max_new_tokens)

    async def _faulted(
        self,
        history: History,
        remember: Callable[[], None],
        lease: Lease,
        alone: bool,
        fault: Fault,
        detail: str,
    ) -> Completion | None:
        after = await self._fleet.release(lease, _outcome(ok=False, fault=fault, detail=detail))
        self._tally.fault(lease.server, fault)
        _log.debug("%s: %s: %s", lease.server, fault, detail)
        history.avoid = history.avoid | {lease.server} if fault is not Fault.QUEUE_FULL else history.avoid
        if fault not in _NOT_COUNTED:
            self._count_fault(history, lease, f"{fault}: {detail}")
        if fault in _IN_FLIGHT and after.server_died:
            history.deaths += 1
            remember()
            if alone:
                return _failed(FailReason.KILLS_SERVER, history)
        return None

    def _count_fault(self, history: History, lease: Lease, what: str) -> None:
        history.faults += 1
        self._trust.faulted()
        if history.faults >= self._trust.too_many_faults():
            raise ShardmillError(
                f"A prompt met {history.faults} server faults in a row, the last at {lease.server} ({what}): "
                f"look at the servers' logs. Everything else that is finished is kept."
            )

    def _refused(self, history: History, refused: PromptRefused) -> Completion | None:
        if refused.refusal is Refusal.TOO_LONG:
            return _failed(FailReason.TOO_LONG, history)
        if refused.refusal is Refusal.NO_ROOM:
            history.reserve += 1
            return _failed(FailReason.TOO_LONG, history) if history.reserve > len(_RESERVES) else None
        history.refusals += 1
        if history.refusals < self._attempts:
            return None
        if not self._trust.answered:
            raise SetupFault(
                f"The servers refuse every prompt so far ({refused.detail}): look at servers.engine and at their logs."
            )
        return _failed(FailReason.REFUSED, history)

    def _note_foreign_stop(self, history: History, lease: Lease, token: int) -> None:
        history.foreign_stops += 1
        if history.foreign_stops >= self._attempts:
            raise SetupFault(
                f"{lease.server} ends answers at token {token}, which is not among the model's stop ids: "
                f"add it to sampling.stop_token_ids, or serve the model that model.tokenizer belongs to."
            )

    async def _send(self, lease: Lease, request: Request) -> Answer:
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

    def _request(self, prompt: Prompt, history: History) -> Request:
        budget = prompt.max_new_tokens
        if history.reserve:
            budget = max(1, budget - _RESERVES[history.reserve - 1])
        sampling = self._model.sampling
        if sampling.seed is not None:
            seed = request_seed(sampling.seed, prompt.prompt_id, history.attempts)
            sampling = replace(sampling, seed=seed)
        return Request(request_id(prompt), prompt.ids, budget, sampling)

    def _backoff(self, history: History) -> float:
        """Seconds until the next try: none after a first fault, since another server may be well; then ever longer."""
        troubles = history.faults + history.refusals
        if troubles == 0:
            return 0.0 if history.useless or history.reserve else self._pace.backoff_s
        if troubles == 1:
            return 0.0
        longest: float = min(self._pace.backoff_most_s, self._pace.backoff_s * 2.0 ** min(troubles - 2, 16))
        return longest * random.uniform(0.5, 1.0)


def _failed(reason: FailReason, history: History) -> Completion:
    return Completion(reason, [], None, None, history.attempts, None, None)


def _outcome(
    *,
    ok: bool,
    fault: Fault | None = None,
    detail: str = "",
    answer: Answer | None = None,
    degenerate: bool = False,
) -> Outcome:
    return Outcome(
        ok=ok,
        fault=fault,
        detail=detail,
        tokens=0 if answer is None else len(answer.output_ids),
        seconds=0.0 if answer is None else answer.latency_s,
        accept_length=None if answer is None else answer.accept_length,
        degenerate=degenerate,
    )
