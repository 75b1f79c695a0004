"""What generator tests share: a shard of prompts, a fleet inside the process, and what right answers are."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from shardmill.engines.base import Fault
from shardmill.errors import NoServers
from shardmill.files import write_json
from shardmill.fleet.lease import Aftermath, Lease, Outcome
from shardmill.generate.job import generate_shard
from shardmill.generate.pace import Pace
from shardmill.identity import prompt_id, sampling_identity
from shardmill.paths import BuildPaths, shard_name
from shardmill.schemas import PROMPTS, read_rows, write_table
from shardmill.settings import Settings, resolve
from simserver import SimConfig, answer

SHARD = shard_name(0, 1)
STOP_IDS = (2,)
VOCABULARY = 49152
FAST = Pace(
    sync_s=0.05, progress_s=0.1, log_s=5.0, space_s=0.02, backoff_s=0.02, backoff_most_s=0.2, journal_wait_s=10.0
)


def make_settings(urls: Sequence[str], **sections: Mapping[str, Any]) -> Settings:
    config: dict[str, Any] = {
        "prompts": {"shards": 1},
        "model": {"context": 8192},
        "sampling": {"max_new_tokens": 96, "temperature": 0.0},
        "servers": {"engine": "sglang", "endpoints": list(urls)},
        "generate": {"concurrency": 8, "request_timeout_s": 20, "patience_s": 5},
    }
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    return resolve(config)


def random_prompt(number: int) -> list[int]:
    source = random.Random(number)
    return [source.randrange(10, VOCABULARY) for _ in range(source.randrange(5, 60))]


def conversation_id(number: int) -> str:
    return hashlib.sha256(f"conversation {number}".encode()).hexdigest()


def make_shard(
    root: Path,
    settings: Settings,
    prompts: Sequence[list[int]],
    *,
    later_turns: int = 0,
    max_new_tokens: int | None = None,
    shard: str = SHARD,
) -> BuildPaths:
    """A build's folder with one shard of `prompts`, each with so many later turns whose prompt isn't known yet."""
    build = BuildPaths(root)
    write_json(build.build_json, {"model": {"vocab_size": VOCABULARY, "stop_ids": list(STOP_IDS)}})
    write_json(build.settings, settings.as_dict())
    sampling = sampling_identity(settings, STOP_IDS)
    budget = max_new_tokens or settings.sampling.max_new_tokens
    rows: list[dict[str, Any]] = []
    for number, ids in enumerate(prompts):
        for turn in range(later_turns + 1):
            first = turn == 0
            question = [{"role": "user", "content": f"Question {turn} of conversation {number}?"}]
            rows.append(
                {
                    "prompt_id": prompt_id(ids, sampling) if first else None,
                    "conversation_id": conversation_id(number),
                    "source_id": f"source-{number}",
                    "turn": turn,
                    "prompt_ids": ids if first else None,
                    "prompt_tokens": len(ids) if first else None,
                    "max_new_tokens": budget if first else None,
                    "messages": orjson.dumps(question).decode(),
                    "tools": None,
                }
            )
    rows.sort(key=lambda row: (row["conversation_id"], row["turn"]))
    write_table(build.prompts(shard), PROMPTS, rows)
    return build


class StandIn:
    """One pool inside the process: least outstanding first, a dead server known by what a release says of it."""

    def __init__(self, urls: Sequence[str], concurrency: int = 8, patience_s: float = 5.0) -> None:
        self.stop_requested = asyncio.Event()
        self.outcomes: list[tuple[str, Outcome]] = []
        self.alone_leases = 0
        self.died: dict[str, bool] = {}  # by URL: what the next releases after a broken connection learn
        self._urls = list(urls)
        self._concurrency = concurrency
        self._patience_s = patience_s
        self._out: Counter[str] = Counter()
        self._held: dict[int, asyncio.Event] = {}
        self._number = 0
        self._change = asyncio.Condition()

    async def __aenter__(self) -> StandIn:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None

    async def join(self, settings: Settings, build: BuildPaths, job: str, order: int) -> StandIn:
        return self

    def want(self, n: int) -> None:
        return None

    def lost(self, lease: Lease) -> asyncio.Event:
        return self._held[lease.id]

    async def lease(self, avoid: frozenset[str] = frozenset(), alone: bool = False) -> Lease:
        async with self._change:
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._change.wait_for(lambda: self._free(avoid, alone))
            except TimeoutError:
                raise NoServers("No server was left.") from None
            url = self._free(avoid, alone)[0]
            self._out[url] += 1
            self._number += 1
            self.alone_leases += alone
            lease = Lease(self._number, url, url)
            self._held[lease.id] = asyncio.Event()
            return lease

    async def release(self, lease: Lease, outcome: Outcome) -> Aftermath:
        async with self._change:
            self.outcomes.append((lease.server, outcome))
            self._out[lease.url] -= 1
            del self._held[lease.id]
            self._change.notify_all()
        broken = outcome.fault in (Fault.RESET, Fault.HALF_SENT)
        return Aftermath(server_died=broken and self.died.get(lease.url, False))

    def _free(self, avoid: frozenset[str], alone: bool) -> list[str]:
        room = 1 if alone else self._concurrency
        wanted = [url for url in self._urls if url not in avoid] or self._urls
        return sorted((url for url in wanted if self._out[url] < room), key=lambda url: self._out[url])


def generate(
    settings: Settings, build: BuildPaths, fleet: StandIn | None = None, shard: str = SHARD, pace: Pace = FAST
) -> StandIn:
    """Runs the job in this process on a stand-in fleet."""
    fleet = fleet or StandIn(settings.servers.endpoints, settings.generate.concurrency, settings.generate.patience_s)
    generate_shard(settings, build, shard, join=fleet.join, pace=pace)
    return fleet


def completions(build: BuildPaths, shard: str = SHARD) -> list[dict[str, Any]]:
    return list(read_rows(build.completions(shard)))


def expected(config: Mapping[str, Any], prompts: Sequence[list[int]], settings: Settings) -> dict[str, list[int]]:
    """conversation_id -> what a server without faults answers to its first turn."""
    sampling = settings.sampling
    sent = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_token_ids": list(STOP_IDS),
    }
    sim = SimConfig.of(config)
    return {
        conversation_id(number): answer(sim, ids, sent, sampling.max_new_tokens).ids
        for number, ids in enumerate(prompts)
    }
