"""The conversations of a shard, asked turn by turn, while there are servers."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from shardmill.errors import ShardmillError
from shardmill.generate.ask import Asker
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

    async def run(self) -> None:
        """Raises the first error of any of its tasks, after the others have ended."""
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

    async def _converse(self, group: asyncio.TaskGroup) -> None:
        """One conversation, its turns in order. As soon as its first request is with a server, the next one starts."""
        if not self._todo:
            return
        keys = self._todo.popleft()
        follow = _Once(lambda: group.create_task(self._converse(group)) if self._todo else None)
        try:
            await self._ask_all(keys, follow)
        except BaseException:
            self._todo.clear()  # the group is ending, and takes no new tasks
            raise
        follow()

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
