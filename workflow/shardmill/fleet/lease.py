"""Leave to send one request to one server, and what a job says of the request when it gives the lease back."""

from __future__ import annotations

from dataclasses import dataclass

from shardmill.engines.base import Fault
from shardmill.fleet import wire


@dataclass(frozen=True, slots=True)
class Lease:
    """Leave to send one request to one server."""

    id: int
    server: str  # a short name, unique in the fleet
    url: str  # without a trailing slash


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the request of a lease.

    `ok`: the server answered well-formed, which a refused prompt and a degenerate answer are too. With neither `ok` nor
    a `fault` (the request was cancelled) it counts for and against nobody.
    """

    ok: bool
    fault: Fault | None
    detail: str
    tokens: int
    seconds: float
    accept_length: float | None
    degenerate: bool


UNUSED = Outcome(ok=False, fault=None, detail="cancelled", tokens=0, seconds=0.0, accept_length=None, degenerate=False)


@dataclass(frozen=True, slots=True)
class Aftermath:
    """`server_died`: the server is known to have died since the lease was granted."""

    server_died: bool


def release_message(number: int, outcome: Outcome) -> wire.Message:
    return {
        "op": "release",
        "n": number,
        "ok": outcome.ok,
        "fault": None if outcome.fault is None else outcome.fault.value,
        "detail": outcome.detail,
        "tokens": outcome.tokens,
        "seconds": outcome.seconds,
        "accept_length": outcome.accept_length,
        "degenerate": outcome.degenerate,
    }
