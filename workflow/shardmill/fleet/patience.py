"""When jobs wait for a server, and when they are told that there will be none."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shardmill.fleet.jobs import Job
from shardmill.fleet.member import Member
from shardmill.fleet.site import State

_SHOWN = 4


@dataclass
class Patience:
    """`server_at`: when there last was a server, or one that may well become one. Times are on the fleet's clock."""

    server_at: float

    def refusals(self, now: float, members: Collection[Member], jobs: Collection[Job]) -> list[tuple[Job, str, str]]:
        """Jobs that need not wait any more: each with the kind ('setup' | 'no_servers') and a sentence why.

        A job waits while there may be a server again, not longer than its `patience_s`, and not for nothing.
        """
        if any(member.state is State.READY or _promising(member) for member in members):
            self.server_at = now
            return []
        if given_up(members):
            refused = [member for member in members if member.state is State.REFUSED]
            message = _because(refused or members, "No server can be used")
            return [(job, "setup" if refused else "no_servers", message) for job in jobs]
        return [
            (
                job,
                "no_servers",
                _because(members, f"No server was left for {job.patience_s:.0f} s (generate.patience_s)"),
            )
            for job in jobs
            if now - max(self.server_at, job.joined) >= job.patience_s
        ]


def given_up(members: Collection[Member]) -> bool:
    """Whether there are servers and none of them can ever be used as things are."""
    return bool(members) and all(member.state in (State.REFUSED, State.FAILED) for member in members)


def _promising(member: Member) -> bool:
    """A start takes as long as it takes, its own deadline ends it: patience is for servers that are lost, or that fail
    to start again and again."""
    return member.launcher is not None and member.state is State.STARTING and member.failures <= 1


def _because(members: Collection[Member], what: str) -> str:
    if not members:
        return f"{what}: no endpoint is given."
    reasons = [f"{member.name} {member.why or member.state.value}" for member in members]
    more = [f"and {len(reasons) - _SHOWN} more"] if len(reasons) > _SHOWN else []
    return f"{what}: {'; '.join(reason.rstrip('.') for reason in reasons[:_SHOWN] + more)}."
