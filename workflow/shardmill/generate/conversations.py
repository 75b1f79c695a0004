"""The conversations of a shard, asked turn by turn, while there are servers.

A prompt that met nothing but servers' faults is set aside, and ends its job only when all others are done.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from shardmill.errors import ShardError, ShardmillError
from shardmill.generate.ask import Asker, Stuck
from shardmill.generate.asked import History
from shardmill.generate.dialogue import Dialogue
from shardmill.generate.pace import Pace
from shardmill.generate.progress import line
from shardmill.generate.prompts import Key
from shardmill.generate.rows import Completion, spoken
from shardmill.generate.text import Text
from shardmill.generate.work import Work

_log = logging.getLogger(__name__)

# Conversations that wait for a lease at once. More would only hold more prompts in memory.
_QUEUE = 64
_FEW = 16  # prompts may be what no server can do; when more have met nothing but faults, it is the servers
_NAMED = 5  # prompts set aside, in the sentence about them


class Conversations:
    """Runs through `todo`. `want` tells the fleet how many prompts wait; `room` waits while the disk is tight."""

    def __init__(
        self,
        todo: deque[list[Key]],
        work: Work,
        asker: Asker,
        dialogue: Dialogue,
        text: Text,
        stop_ids: frozenset[int],
        want: Callable[[int], None],
        room: Callable[[], Awaitable[None]],
        pace: Pace,
    ) -> None:
        self._todo = todo
        self._work = work
        self._asker = asker
        self._dialogue = dialogue
        self._text = text
        self._stop_ids = stop_ids
        self._want = want
        self._room = room
        self._pace = pace
        self._stuck: dict[Key, Stuck] = {}

    async def run(self) -> None:
        """Raises the first error of any of its tasks, after the others have ended, and ShardError where all is done but
        what was set aside."""
        try:
            async with asyncio.TaskGroup() as group:
                keepers = [group.create_task(work) for work in (self._sync(), self._report(), self._text.load())]
                async with asyncio.TaskGroup() as conversations:
                    for _ in range(min(_QUEUE, len(self._todo))):
                        conversations.create_task(self._converse(conversations))
                for keeper in keepers:
                    keeper.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors
        if self._stuck:
            raise ShardError(self._about_stuck())

    async def _converse(self, group: asyncio.TaskGroup) -> None:
        """One conversation, its turns in order. As soon as its first request is with a server, the next one starts."""
        if not self._todo:
            return
        keys = self._todo.popleft()
        follow = _Once(lambda: group.create_task(self._converse(group)) if self._todo else None)
        try:
            await self._ask_all(keys, follow)
        except Stuck as stuck:
            self._set_aside(keys, stuck)
        except BaseException:
            self._todo.clear()  # the group is ending, and takes no new tasks
            raise
        follow()

    def _set_aside(self, keys: list[Key], stuck: Stuck) -> None:
        tally = self._work.tally
        left = len(self._work.prompts) - tally.done - tally.not_reached - tally.stuck
        if stuck.barren and left > _FEW:
            self._todo.clear()
            raise ShardmillError(
                f"The servers answered nothing but faults for generate.patience_s, the last {stuck.last}: "
                f"look at their logs. Everything that is finished is kept."
            )
        key = next(key for key in keys if key not in self._work.done)
        self._stuck[key] = stuck
        tally.stuck += 1
        _log.warning(
            "%s: source id %s met %d server faults in a row, the last %s; it is set aside until the next run",
            self._work.tally.shard,
            self._work.prompts.turn(key).source_id,
            stuck.faults,
            stuck.last,
        )

    def _about_stuck(self) -> str:
        names = [self._work.prompts.turn(key).source_id for key in self._stuck]
        shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        last = next(reversed(self._stuck.values()))
        return (
            f"{self._work.tally.shard}: {len(names)} of {len(self._work.prompts)} prompts met nothing but server "
            f"faults, the last {last.last}. All others are done and kept. The next run asks these again: give it other "
            f"servers or servers.args, or take the records out of the dataset (source id {shown})."
        )

    async def _ask_all(self, keys: list[Key], leased: Callable[[], None]) -> None:
        answers: list[str] = []
        for index, key in enumerate(keys):
            if key not in self._work.done:
                await self._turn(keys, answers, leased)
            if key in self._work.failed:
                self._work.tally.not_reached += len(keys) - index - 1
                return
            if index + 1 < len(keys):
                answers.append(self._answer_text(key))

    async def _turn(self, keys: list[Key], answers: list[str], leased: Callable[[], None]) -> None:
        key = keys[len(answers)]
        known = self._work.prompts.turn(key).prompt
        prompt, refusal = self._dialogue.prompt(keys, answers) if known is None else (known, None)
        if refusal is not None:
            completion = Completion(refusal, [], None, None, 0, None, None)
        elif known is None and self._work.reuse(key, prompt, rendered_here=True):
            return
        else:
            await self._room()
            history = self._work.histories.setdefault(key, History())
            completion = await self._asker.ask(prompt, history, lambda: self._work.note(key, history), leased)
        self._work.keep(key, prompt, completion, rendered_here=known is None)

    def _answer_text(self, key: Key) -> str:
        output_ids = self._work.journal.read(self._work.done[key])["output_ids"]
        return self._text.decode(spoken(output_ids, self._stop_ids))

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(self._pace.sync_s)
            await asyncio.to_thread(self._work.journal.sync)

    async def _report(self) -> None:
        """The progress file, and now and then a line."""
        tally = self._work.tally
        said, told = asyncio.get_running_loop().time(), 0
        while True:
            progress = tally.progress("running")
            self._want(progress["waiting"])
            await asyncio.to_thread(tally.write, progress)
            now = asyncio.get_running_loop().time()
            if now - said >= self._pace.log_s:
                said = now
                # A shard that waits for its turn, with older ones in front, has nothing new to say.
                if progress["in_flight"] or progress["done"] > told:
                    told = progress["done"]
                    _log.info("%s", line(progress))
            await asyncio.sleep(self._pace.progress_s)


class _Once:
    """Calls `act` the first time that it is called itself."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act

    def __call__(self) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that a person should see: the first one that isn't a cancellation."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((error for error in leaves if isinstance(error, ShardmillError)), leaves[0])
