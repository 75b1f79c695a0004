"""How long the fleet waits for what, in seconds. Tests shrink it through the environment; nobody else needs to."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shardmill.times import shortened

VARIABLE = "SHARDMILL_FLEET_TIMING"  # a JSON object of the names below


@dataclass(frozen=True, slots=True)
class Timing:
    tick_s: float = 1.0  # between looks at run locks and server processes
    state_s: float = 5.0  # between two state.json
    endpoints_s: float = 5.0  # between two looks at endpoints_file
    health_every_s: float = 10.0
    health_timeout_s: float = 25.0  # SGLang answers 503 itself after 20
    probe_timeout_s: float = 60.0
    failed_checks: int = 3  # in a row, before a server counts as hung
    quiet_s: float = 90.0  # without any answer, before a server that has work is probed
    start_deadline_s: float = 1800.0  # 55 GB of weights from a slow disk, compilation, CUDA graphs
    starts: int = 8  # in a row without getting ready, before a server is given up
    backoff_s: float = 1.0  # doubles
    backoff_most_s: float = 60.0
    drain_s: float = 180.0  # for the answers under way at a server that is to be restarted
    grace_s: float = 20.0  # from SIGTERM to SIGKILL
    linger_s: float = 15.0  # after the last job and run, for the next one
    leave_s: float = 30.0  # for jobs to go after their run is over
    orphan_s: float = 40.0  # that servers wait for another fleet when theirs was killed
    full_s: float = 1.0  # that a server is left alone after it said that its queue is full
    rejoin_s: float = 3.0  # that a fleet waits for the jobs of one that was killed, before it gives anything out
    silent_s: float = 15.0  # that a job waits for a word of its fleet, twice, before it takes it for hung
    verdict_s: float = 8.0  # at most, to find out whether a server died under a request


def timing() -> Timing:
    """The defaults, with what the environment says laid over them."""
    return Timing(**shortened(VARIABLE, {field.name for field in fields(Timing)}))
