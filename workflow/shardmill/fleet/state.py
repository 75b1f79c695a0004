"""What a fleet tells about itself: state.json, and what `servers status` and `status` show. Plain JSON values.

Shares are 0 to 1, times seconds, sizes bytes. None: not known.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from shardmill.home import Home
from shardmill.settings import Settings

if TYPE_CHECKING:
    from shardmill.fleet.member import Member
    from shardmill.fleet.process import FleetProcess


def describe(fleet: FleetProcess) -> dict[str, Any]:
    """A fleet at work."""
    waiting = fleet.pool.waiting_by_client()
    return describe_servers(fleet.home, fleet.settings, fleet.members.values(), time.monotonic()) | {
        "pid": os.getpid(),
        "started": fleet.started.isoformat(timespec="seconds"),
        "updated": datetime.now(UTC).isoformat(timespec="seconds"),
        "log": str(fleet.home.log),
        "waiting": fleet.pool.waiting,
        "runs": fleet.runs.describe(),
        "jobs": [
            {
                "job": job.name,
                "order": job.order,
                "build": job.build,
                "wanted": job.wanted,
                "waiting": waiting[job.id],
                "in_flight": len(job.granted_at),
            }
            for job in sorted(fleet.desk.jobs.values(), key=lambda job: job.order)
        ],
    }


def describe_servers(home: Home, settings: Settings, members: Collection[Member], now: float) -> dict[str, Any]:
    """The servers, as when no run and no job uses them. `now` is on the fleet's clock."""
    return {
        "key": home.root.name,
        "host": socket.gethostname(),
        "engine": settings.servers.engine,
        "model": settings.model.name,
        "launch": settings.servers.launch,
        "stay": home.stay.exists(),
        "waiting": 0,
        "runs": [],
        "jobs": [],
        "servers": [describe_member(member, now) for member in members],
        "warnings": [member.warning for member in members if member.warning],
    }


def describe_member(member: Member, now: float) -> dict[str, Any]:
    """One server. `now` is on the fleet's clock."""
    slot = member.site.pool.slots[member.name]
    record, info, load, process = member.record, member.info, member.load, member.process
    faults = Counter(record.faults)
    faults.update(member.faults_before)
    accept_length = record.accept_length
    if accept_length is None and load is not None:
        accept_length = load.accept_length
    return {
        "name": member.name,
        "url": member.url,
        "state": member.state.value,
        "why": member.why,
        "for_s": round(now - member.since, 1),
        "starts": member.starts,
        "restarts": member.restarts,
        "in_flight": len(slot.outstanding),
        "answers": member.answers_before + record.answers,
        "faults": dict(faults),
        "last_fault": record.last_fault,
        "running": load.running if load else None,
        "queued": load.queued if load else None,
        "effective_cap": info.running_cap if info else None,
        "requested_cap": info.requested_cap if info else None,
        "cap_reason": member.cap_reason,
        "kv_use": load.kv_use if load else None,
        "mamba_use": load.mamba_use if load else None,
        "tokens_per_s": load.tokens_per_s if load else None,
        "accept_length": accept_length,
        "model": info.model_name if info else None,
        "context": info.context if info else None,
        "vocab_size": info.vocab_size if info else None,
        "version": info.version if info else None,
        "pid": process.pid if process else None,
        "resident_bytes": member.resident_bytes,
        "gpu": asdict(member.gpu) if member.gpu else None,
        "log": str(process.log) if process else None,
    }
