"""How often and how long: the generator's own times. Tests make them shorter, also through the environment."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shardmill.times import shortened

VARIABLE = "SHARDMILL_PACE"  # a JSON object of the names below


@dataclass(frozen=True, slots=True)
class Pace:
    """All in seconds."""

    sync_s: float = 1.0  # the journal to the disk; a power cut loses this much and one fsync
    progress_s: float = 5.0
    log_s: float = 30.0
    space_s: float = 2.0  # between looks at a disk that is tight
    backoff_s: float = 0.5
    backoff_most_s: float = 15.0
    journal_wait_s: float = 60.0  # for another job's lock on the journal


def pace() -> Pace:
    """The defaults, with what the environment says laid over them."""
    return Pace(**shortened(VARIABLE, {field.name for field in fields(Pace)}))
