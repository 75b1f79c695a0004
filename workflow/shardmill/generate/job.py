"""A generate job: one process, one shard. Its prompts go to the fleet, its rows into the journal, then into Parquet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Protocol

from shardmill.engines import SamplingParams, api_key, engine, new_session
from shardmill.errors import DataError, ShardError, ShardmillError
from shardmill.facts import build_facts
from shardmill.fleet.client import Fleet
from shardmill.generate.ask import Asker
from shardmill.generate.asked import Model
from shardmill.generate.conversations import Conversations
from shardmill.generate.dialogue import Dialogue
from shardmill.generate.pace import Pace
from shardmill.generate.pace import pace as default_pace
from shardmill.generate.progress import Tally, line
from shardmill.generate.prompts import Key, ShardPrompts
from shardmill.generate.rows import write_completions
from shardmill.generate.send import Pool, Sender
from shardmill.generate.space import Space
from shardmill.generate.text import Text
from shardmill.generate.work import Reusable, Work, nothing_reusable
from shardmill.home import recorded_name
from shardmill.journal import open_journal
from shardmill.order import places
from shardmill.paths import BuildPaths
from shardmill.settings import Settings

_log = logging.getLogger(__name__)


class JobFleet(Pool, Protocol):
    """What a job needs of the fleet (fleet.client.Fleet): its membership is an async context manager."""

    stop_requested: asyncio.Event

    async def __aenter__(self) -> JobFleet: ...

    async def __aexit__(self, *error: Any) -> None: ...

    def want(self, n: int) -> None: ...


Join = Callable[[Settings, BuildPaths, str, int], Awaitable[JobFleet]]


def generate_shard(
    settings: Settings,
    build: BuildPaths,
    shard: str,
    *,
    reusable: Reusable = nothing_reusable,
    join: Join = Fleet.join,
    pace: Pace | None = None,
) -> None:
    """Writes completions/<shard>.parquet: every prompt exactly once, ok or failed with its reason.

    Goes on from the journal of an earlier run. `reusable` finds rows of other builds (work.Reusable). Raises
    ShardmillError, with everything finished kept in the journal, when it is stopped, when no server is left for
    `generate.patience_s` (NoServers), when servers are set up wrongly (SetupFault), or when the disk stays tight.
    """
    pace = pace or default_pace()
    prompts = ShardPrompts(build.prompts(shard))
    model = _model(settings, build)
    with open_journal(build.journal(shard), pace.journal_wait_s) as journal:
        work = Work.open(prompts, journal, Tally(shard, len(prompts), build.progress(shard)), reusable)
        job = _Job(settings, build, shard, model, work, pace)
        asyncio.run(job.run(join))


def _model(settings: Settings, build: BuildPaths) -> Model:
    facts = build_facts(build).get("model")
    if facts is None:
        raise DataError(f"{build.build_json} lacks the model's stop ids: run snakemake again, which makes the prompts.")
    sampling = settings.sampling
    stop_ids = frozenset(facts["stop_ids"])
    return Model(
        stop_ids=stop_ids,
        vocab_size=int(facts["vocab_size"]),
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_token_ids=tuple(sorted(stop_ids)),
            seed=sampling.seed,
        ),
    )


class _Job:
    def __init__(self, settings: Settings, build: BuildPaths, shard: str, model: Model, work: Work, pace: Pace) -> None:
        self._settings = settings
        self._build = build
        self._shard = shard
        self._model = model
        self._work = work
        self._pace = pace
        self._text = Text(settings)
        self._stop = asyncio.Event()

    async def run(self, join: Join) -> None:
        tally, work = self._work.tally, self._work
        todo = work.todo()
        if tally.done:
            _log.info("%s: %d of %d prompts are done already", self._shard, tally.done, len(work.prompts))
        state = "stopped"
        try:
            if todo:
                with self._signals():
                    await self._generate(join, todo)
            work.journal.sync()
            self._compact()
            state = "done"
        finally:
            self._last_words(state)

    def _compact(self) -> None:
        work, path = self._work, self._build.completions(self._shard)
        missing = len(work.prompts) - len(work.done) - work.tally.not_reached
        if missing:
            raise DataError(f"{self._shard}: {missing} prompts have no row; its journal is kept. Run again.")
        write_completions(
            path,
            work.prompts,
            work.done,
            work.journal,
            self._text.decode,
            self._model.stop_ids,
            work.tally.effort(),
        )

    def _last_words(self, state: str) -> None:
        progress = self._work.tally.progress(state)
        _log.info("%s", line(progress))
        try:
            self._work.tally.write(progress)
        except ShardmillError as error:
            _log.warning("%s", error)  # the job's own end, good or bad, is what counts now

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the job in order. Handlers can be set in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def _generate(self, join: Join, todo: deque[list[Key]]) -> None:
        """All of `todo`, until it is done or there is a reason to stop, which is raised."""
        generating = asyncio.create_task(self._with_fleet(join, todo))
        told = asyncio.create_task(self._when(self._stop, "was told to stop"))
        await _first_of(generating, told)

    async def _with_fleet(self, join: Join, todo: deque[list[Key]]) -> None:
        settings = self._settings
        key = api_key(settings.servers)
        fleet = await join(settings, self._build, self._shard, places(settings, self._build)[self._shard])
        async with fleet, new_session() as session:
            given = settings.generate
            server = engine(settings.servers.engine, key)
            asker = Asker(
                fleet,
                Sender(server, session, fleet, self._model, given.request_timeout_s),
                self._model,
                self._work.tally,
                partial(recorded_name, settings),
                attempts=given.attempts,
                patience_s=given.patience_s,
                pace=self._pace,
            )
            conversations = Conversations(
                todo,
                self._work,
                asker,
                Dialogue(settings, self._work.prompts, self._text.folder, self._model.stop_ids),
                self._text,
                self._model.stop_ids,
                fleet.want,
                Space(self._build.root, settings.generate.patience_s, self._pace.space_s).room,
                self._pace,
            )
            asking = asyncio.create_task(conversations.run())
            await _first_of(asking, asyncio.create_task(self._when(fleet.stop_requested, "stops: its run has ended")))

    async def _when(self, event: asyncio.Event, why: str) -> None:
        await event.wait()
        raise ShardError(
            f"{self._shard} {why}. {self._work.tally.done} of {len(self._work.prompts)} prompts are done and kept, "
            f"and the next run goes on from there."
        )


async def _first_of(task: asyncio.Task[None], interruption: asyncio.Task[None]) -> None:
    """The end of `task`, or of `interruption` if that comes first; the other one is cancelled and has ended then."""
    try:
        await asyncio.wait({task, interruption}, return_when=asyncio.FIRST_COMPLETED)
        await (task if task.done() else interruption)
    finally:
        task.cancel()
        interruption.cancel()
        await asyncio.gather(task, interruption, return_exceptions=True)
