"""Asking for one prompt until there is an answer to keep, or a reason that is the prompt's own ("Whose fault").

Server faults are tried again, on another server where there is one, and never held against the prompt: one that meets
nothing else is left for the next run (Stuck). What ends a prompt is degenerate output on every attempt, and each time,
before that is held against the prompt, the server that gave it must prove itself on a control: a prompt of this shard
that had a good answer.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from shardmill.engines import Answer, Fault, PromptRefused, Refusal, Request, ServerFault
from shardmill.errors import SetupFault
from shardmill.fleet.lease import Lease, Outcome
from shardmill.generate.asked import RESERVES, History, Model, Prompt
from shardmill.generate.audit import Degenerate, Faulty, Useless
from shardmill.generate.pace import Pace
from shardmill.generate.progress import Tally
from shardmill.generate.reasons import FailReason
from shardmill.generate.rows import Completion
from shardmill.generate.send import Pool, Sender
from shardmill.generate.trust import Trust

_log = logging.getLogger(__name__)

DEATHS = 3  # in flight at the death of so many servers: tried once alone (CONTRACTS.md, Servers)
_IN_FLIGHT = frozenset({Fault.RESET, Fault.HALF_SENT, Fault.TIMEOUT})
_NOT_COUNTED = frozenset({Fault.REFUSED, Fault.QUEUE_FULL})  # a fleet that is away or busy says nothing of the prompt
_REASON = {Degenerate.EMPTY: FailReason.EMPTY, Degenerate.REPETITION: FailReason.REPETITION}


class Stuck(Exception):
    """A prompt that met nothing but servers' faults, too often for chance. It is asked again by the next run.

    `barren`: no prompt of the job has had an answer for long, so that it may be all servers and not the prompt.
    """

    def __init__(self, faults: int, last: str, barren: bool) -> None:
        super().__init__(last)
        self.faults = faults
        self.last = last
        self.barren = barren


class Asker:
    """Asks for the prompts of one job. One for all of them: what one prompt teaches serves the others."""

    def __init__(
        self,
        fleet: Pool,
        sender: Sender,
        model: Model,
        tally: Tally,
        recorded: Callable[[str], str],
        *,
        attempts: int,
        patience_s: float,
        pace: Pace,
    ) -> None:
        """`recorded`: what a server of the fleet is called in rows and counts."""
        self._fleet = fleet
        self._sender = sender
        self._model = model
        self._tally = tally
        self._recorded = recorded
        self._trust = Trust(attempts, patience_s, answered=tally.ok > 0)
        self._attempts = attempts
        self._pace = pace

    async def ask(
        self, prompt: Prompt, history: History, remember: Callable[[], None], leased: Callable[[], None]
    ) -> Completion:
        """The row's content. `remember` is called when what the journal should keep of `history` has changed, `leased`
        with each lease.

        Raises NoServers, SetupFault, and Stuck for a prompt that meets nothing but servers' faults.
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
        request = self._sender.request(prompt, history)
        try:
            answer = await self._sender.send(lease, request)
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
        verdict = self._sender.audit(prompt, request, answer)
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
        self._tally.answered(self._recorded(lease.server), verdict, answer)
        return Completion(
            reason=None,
            output_ids=verdict.output_ids,
            finish=verdict.finish,
            accept_length=answer.accept_length,
            attempts=history.attempts,
            server=self._recorded(lease.server),
            latency_s=answer.latency_s,
            cut=verdict.cut,
        )

    async def _useless(
        self, history: History, remember: Callable[[], None], lease: Lease, answer: Answer, verdict: Useless
    ) -> Completion | None:
        """A degenerate answer: an attempt of this prompt, or, where the control fails as well, the server's fault."""
        control = self._trust.control
        proven = control is None or await self._sender.proves_itself(lease, control)
        # A server that has just answered the control well is not held to be going bad: it is the prompt.
        at_fault = control is None or not proven
        await self._fleet.release(lease, _outcome(ok=True, answer=answer, degenerate=at_fault))
        history.avoid |= {lease.server}
        self._tally.degenerate(self._recorded(lease.server), verdict.kind, proven)
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
        self._tally.fault(self._recorded(lease.server), fault)
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
        if self._trust.beyond_chance(history.faults):
            raise Stuck(history.faults, f"{what}, at {lease.server}", barren=False)
        if self._trust.barren():
            raise Stuck(history.faults, f"{what}, at {lease.server}", barren=True)

    def _refused(self, history: History, refused: PromptRefused) -> Completion | None:
        if refused.refusal is Refusal.TOO_LONG:
            return _failed(FailReason.TOO_LONG, history)
        if refused.refusal is Refusal.NO_ROOM:
            history.reserve += 1
            return _failed(FailReason.TOO_LONG, history) if history.reserve > len(RESERVES) else None
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
