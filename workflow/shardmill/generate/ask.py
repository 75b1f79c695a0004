"""Asking for one prompt until there is an answer to keep, or a reason that is the prompt's own ("Whose fault").

Server faults are tried again without end, on another server where there is one. What ends a prompt is degenerate
output on every attempt, and each time, before that is held against the prompt, the server that gave it must prove
itself on a control: a prompt of this shard that had a good answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import random
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import aiohttp

from shardmill.engines import (
    Answer,
    Engine,
    Fault,
    PromptRefused,
    Refusal,
    Request,
    SamplingParams,
    ServerFault,
)
from shardmill.errors import SetupFault, ShardmillError
from shardmill.fleet.client import Aftermath, Lease, Outcome
from shardmill.generate.audit import Degenerate, Faulty, Kept, Useless, audit, endless
from shardmill.generate.pace import Pace
from shardmill.generate.progress import Tally
from shardmill.generate.reasons import FailReason
from shardmill.generate.rows import Completion

_log = logging.getLogger(__name__)

DEATHS = 3  # in flight at the death of so many servers: tried once alone (CONTRACTS.md, Servers)
_IN_FLIGHT = frozenset({Fault.RESET, Fault.HALF_SENT, Fault.TIMEOUT})
# Faults of one prompt in a row, with every other server to try, after which a person should look.
_TOO_MANY_FAULTS = 100
_NOT_COUNTED = frozenset({Fault.REFUSED, Fault.QUEUE_FULL})  # a fleet that is away or busy says nothing of the prompt
_CONTROL_TOKENS = 64
_RESERVES = (16, 64, 256)  # new tokens given up, in turn, when the server keeps room for speculation
_REASON = {Degenerate.EMPTY: FailReason.EMPTY, Degenerate.REPETITION: FailReason.REPETITION}


class Pool(Protocol):
    """What asking needs of the fleet (fleet.client.Fleet)."""

    async def lease(self, avoid: frozenset[str] = frozenset(), alone: bool = False) -> Lease: ...

    async def release(self, lease: Lease, outcome: Outcome) -> Aftermath: ...

    def lost(self, lease: Lease) -> asyncio.Event: ...


@dataclass(frozen=True, slots=True)
class Model:
    """What answers are audited against, and how they are drawn."""

    stop_ids: frozenset[int]
    vocab_size: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    prompt_id: str
    ids: list[int]
    max_new_tokens: int


@dataclass(slots=True)
class History:
    """What has happened to one prompt. The first two are kept in the journal, so that a restart forgets nothing."""

    attempts: int = 0  # audited answers
    deaths: int = 0
    useless: Counter[Degenerate] = field(default_factory=Counter)
    faults: int = 0  # in a row
    foreign_stops: int = 0
    refusals: int = 0
    reserve: int = 0  # how many of _RESERVES are in use
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Control:
    prompt: Prompt
    tokens: int


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
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._pace = pace
        self._control: _Control | None = None
        self._answered = False
        self._audited = 0
        self._passing = 0  # degenerate answers to prompts that had a good one later

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
        verdict = audit(answer, len(prompt.ids), self._model.stop_ids, self._model.vocab_size, request.max_new_tokens)
        if isinstance(verdict, Faulty):
            if verdict.foreign_stop is not None:
                self._note_foreign_stop(history, lease, verdict.foreign_stop)
            return await self._faulted(history, remember, lease, False, verdict.fault, verdict.detail)
        self._audited += 1
        if isinstance(verdict, Useless):
            return await self._useless(history, remember, lease, answer, verdict)
        history.attempts += 1
        await self._fleet.release(lease, _outcome(ok=True, answer=answer))
        self._learn(prompt, history, verdict)
        self._tally.answered(lease.server, verdict, answer)
        return Completion(
            reason=None,
            output_ids=verdict.output_ids,
            finish=verdict.finish,
            accept_length=answer.accept_length,
            attempts=history.attempts,
            server=lease.server,
            latency_s=answer.latency_s,
        )

    async def _useless(
        self, history: History, remember: Callable[[], None], lease: Lease, answer: Answer, verdict: Useless
    ) -> Completion | None:
        """A degenerate answer: an attempt of this prompt, or, where the control fails as well, the server's fault."""
        proven = self._control is None or await self._proves_itself(lease, self._control)
        await self._fleet.release(lease, _outcome(ok=True, answer=answer, degenerate=True))
        history.avoid |= {lease.server}
        self._tally.degenerate(lease.server, verdict.kind, proven)
        if not proven:
            self._count_fault(history, lease, f"{verdict.kind}, as for another prompt that had a good answer")
            return None
        history.faults = 0
        history.attempts += 1
        history.useless[verdict.kind] += 1
        if history.useless[verdict.kind] >= self._needed():
            return _failed(_REASON[verdict.kind], history)
        remember()
        return None

    def _needed(self) -> int:
        """How many degenerate answers of one kind make a prompt's own fault.

        `generate.attempts`, unless degenerate answers keep passing away: when a share q of all answers is degenerate by
        chance, so many that chance alone (q^n) gives less than one in 100,000. And twice as many while no prompt of the
        shard has had a good answer, since nothing tells the prompt's fault from the server's then.
        """
        needed = self._attempts
        passing = self._passing / max(self._audited, 1)
        if self._passing >= 3 and 0.01 < passing < 1:
            needed = min(4 * needed, max(needed, math.ceil(math.log(1e-5) / math.log(passing))))
        return needed if self._control is not None else 2 * needed

    async def _proves_itself(self, lease: Lease, control: _Control) -> bool:
        """Whether the server gives a good answer to a prompt that has had one: its first few tokens are enough."""
        budget = min(_CONTROL_TOKENS, control.prompt.max_new_tokens)
        request = Request(_request_id(control.prompt), control.prompt.ids, budget, self._model.sampling)
        try:
            answer = await self._send(lease, request)
        except (ServerFault, PromptRefused):
            return False
        verdict = audit(
            answer, len(control.prompt.ids), self._model.stop_ids, self._model.vocab_size, request.max_new_tokens
        )
        return isinstance(verdict, Kept)

    def _learn(self, prompt: Prompt, history: History, kept: Kept) -> None:
        self._answered = True
        self._passing += history.useless.total()
        known = self._control
        if known is not None and known.tokens <= len(kept.output_ids):
            return
        if not endless(kept.output_ids[:_CONTROL_TOKENS], "length"):
            self._control = _Control(prompt, len(kept.output_ids))

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
        if history.faults >= _TOO_MANY_FAULTS:
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
        if not self._answered:
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
        return Request(_request_id(prompt), prompt.ids, budget, sampling)

    def _backoff(self, history: History) -> float:
        """Seconds until the next try: none after a first fault, since another server may be well; then ever longer."""
        troubles = history.faults + history.refusals
        if troubles == 0:
            return 0.0 if history.useless or history.reserve else self._pace.backoff_s
        if troubles == 1:
            return 0.0
        longest: float = min(self._pace.backoff_most_s, self._pace.backoff_s * 2.0 ** min(troubles - 2, 16))
        return longest * random.uniform(0.5, 1.0)


def request_seed(seed: int, prompt_id: str, attempt: int) -> int:
    """0 <= seed < 2^31, from sha256 over the run's seed, the prompt and how many answers it has had."""
    digest = hashlib.sha256(f"{seed}\0{prompt_id}\0{attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def _request_id(prompt: Prompt) -> str:
    return f"{prompt.prompt_id[:16]}-{uuid.uuid4().hex[:16]}"


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
