"""What all servers of a fleet share, and what each of them must agree with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import aiohttp

from shardmill.engines.base import Engine, ServerInfo
from shardmill.fleet.pool import Pool
from shardmill.fleet.timing import Timing
from shardmill.home import Home


class State(StrEnum):
    STARTING = "starting"  # not ready yet, or not reached yet
    READY = "ready"  # in the pool
    SUSPECT = "suspect"  # out of the pool after faults in a row, being probed
    DRAINING = "draining"  # gone bad: no new requests, the last answers come
    STOPPING = "stopping"
    BACKOFF = "backoff"  # waits for its next start
    REFUSED = "refused"  # can't be used as it is set up
    FAILED = "failed"  # given up after too many starts


@dataclass
class Expectation:
    """What every server must agree with. `vocabulary` is learnt from the first job."""

    model: str
    context: int
    vocabulary: int | None = None

    def refusal(self, url: str, info: ServerInfo) -> str | None:
        """Why a server can't be used, in one sentence that names both numbers."""
        if info.context is not None and info.context < self.context:
            return (
                f"The server at {url} has a context of {info.context} tokens, but model.context is {self.context}: "
                "start it with a larger one, or lower model.context."
            )
        if self.vocabulary is not None and info.vocab_size is not None and info.vocab_size != self.vocabulary:
            return (
                f"The server at {url} has a vocabulary of {info.vocab_size}, but the prompts were made for one of "
                f"{self.vocabulary}: it serves another model than {self.model}."
            )
        return None

    def warning(self, url: str, info: ServerInfo) -> str | None:
        if info.model_name is None:
            return None
        ours, theirs = (name.rstrip("/").rpartition("/")[2].lower() for name in (self.model, info.model_name))
        if ours in theirs or theirs in ours:
            return None
        return f"The server at {url} calls its model {info.model_name}, and the config {self.model}."


@dataclass(frozen=True)
class Site:
    """What all members of a fleet share."""

    home: Home
    engine: Engine
    session: aiohttp.ClientSession
    pool: Pool
    timing: Timing
    expected: Expectation
    changed: Callable[[], None]  # the pool has room, or has lost it
    lost: Callable[[str], None]  # no request at this server will be answered
    log: Callable[[str], None]
    slowest: Callable[[], float]  # seconds of the slowest recent answer of all servers; a guess before there is one
    clock: Callable[[], float] = time.monotonic
