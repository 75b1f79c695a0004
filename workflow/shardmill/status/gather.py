"""Everything that `status` tells, gathered: from files alone, so that it is right while a run is at work and after."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from shardmill import runlock
from shardmill.disk import room_of
from shardmill.effort import Effort
from shardmill.errors import DamagedFile
from shardmill.facts import build_facts
from shardmill.files import read_json
from shardmill.fleet import history
from shardmill.fleet.gpus import Gpu
from shardmill.home import Home, recorded_name
from shardmill.paths import BuildPaths
from shardmill.settings import Settings
from shardmill.status import outlook, servers, trends
from shardmill.status.elsewhere import machines_elsewhere
from shardmill.status.failures import ExampleCache, failed_of, failures
from shardmill.status.model import DatasetUse, Fleet, Prompts, RunNow, Shards, Status, Trend, Verdict
from shardmill.status.rows import RowsCache, ShardRows, Span, by_server, curves, work
from shardmill.status.s3 import store_now
from shardmill.status.shards import Here, ManifestCache, ShardNow, Stage, last_uploads, look, read_plan

_GOING = Stage.GENERATING
_TREND_S = 24 * 3600.0  # of a fleet's history
_SILENT_S = 120.0  # a fleet that has not written its state for so long hangs


class Gatherer:
    """Gathers again and again, and reads each finished shard once."""

    def __init__(self, settings: Settings, build: BuildPaths) -> None:
        self._settings = settings
        self._build = build
        self._rows = RowsCache()
        self._manifests = ManifestCache()
        self._examples = ExampleCache()

    def gather(self) -> Status:
        """Raises DataError for completions that can't be read."""
        settings, build, now = self._settings, self._build, time.time()
        facts = build_facts(build)
        run = _run(build)
        here = Here.of(build)
        shards = look(settings, build, here, self._manifests, run.at_work, now)
        names = {shard.name for shard in shards}
        done = self._rows.read(build, {name: stamp for name, stamp in here.completions.items() if name in names})
        run = replace(run, last_sign=_last_sign(shards, done))
        spans = [span for rows in done.values() for span in rows.spans]
        home = servers.find_home(settings, build)
        each = {name: work(listed) for name, listed in by_server(spans).items()}
        total = work(spans)
        fleet = servers.describe(settings, home, servers.read_state(home), each, total, _going(shards, done))
        prompts = _prompts(shards, done, facts.get("counts") or {})
        pace = outlook.pace(shards, spans, each)
        seen: dict[int, Gpu] = {} if any(s.gpu is not None for s in fleet.servers) else servers.local_gpus()
        stages = _shards(build, shards)
        moving = _trends(settings, home, run, now, spans)
        return Status(
            build=build.name,
            root=str(build.root),
            model=settings.model.name,
            taken=now,
            run=run,
            shards=stages,
            prompts=prompts,
            pace=pace,
            outlook=outlook.outlook(settings, shards, done, prompts, pace, fleet, run.at_work, now),
            fleet=fleet,
            other_gpus=servers.other_gpus(fleet, seen),
            store=store_now(settings, build, shards, last_uploads(build, here), now),
            elsewhere=machines_elsewhere(build),
            dataset=_dataset(settings, facts.get("counts") or {}, prompts),
            verdict=_verdict(build),
            failures=failures(build, shards, done, self._examples),
            **_effort(shards, done).as_dict(),
            trends=moving,
            warnings=(
                *_warnings(run, fleet, stages, settings.generate.concurrency, now),
                *_disk(build, run),
                *(trend.warning for trend in moving if trend.warning),
            ),
        )


def gather(settings: Settings, build: BuildPaths) -> Status:
    """One look. See Gatherer for many."""
    return Gatherer(settings, build).gather()


def _run(build: BuildPaths) -> RunNow:
    """Who holds the build's lock. Of a run that is over there is the time at which it wrote down its plan."""
    holder = runlock.holder(build.lock)
    who = holder or {}
    began: float | None = None
    if holder is None and build.plan.exists():
        began = build.plan.stat().st_mtime
    elif "started" in who:
        began = datetime.fromisoformat(who["started"]).timestamp()
    return RunNow(
        at_work=holder is not None,
        command=who.get("command"),
        pid=who.get("pid"),
        host=who.get("host"),
        user=who.get("user"),
        started=began,
        last_sign=None,
    )


def _last_sign(shards: Sequence[ShardNow], done: Mapping[str, ShardRows]) -> float | None:
    written = [shard.progress["updated_at"] for shard in shards if shard.progress is not None]
    answered = [span.end for rows in done.values() for span in rows.spans]
    return max([*written, *answered], default=None)


def _shards(build: BuildPaths, shards: Sequence[ShardNow]) -> Shards:
    stages = Counter(shard.stage for shard in shards)
    plan = read_plan(build)
    to_restore = set(plan.restore) if plan is not None else set()
    return Shards(
        all=len(shards),
        published=stages[Stage.PUBLISHED],
        answered=stages[Stage.ANSWERED],
        generating=stages[Stage.GENERATING],
        begun=stages[Stage.BEGUN],
        waiting=stages[Stage.WAITING],
        restored=sum(1 for shard in shards if shard.stage is Stage.PUBLISHED and shard.name in to_restore),
        to_restore=len(to_restore),
    )


def _prompts(shards: Sequence[ShardNow], done: Mapping[str, ShardRows], counts: Mapping[str, Any]) -> Prompts:
    rows = list(done.values())
    jobs = [shard.progress for shard in shards if shard.name not in done and shard.stage in (_GOING, Stage.BEGUN)]
    going = [job for job in jobs if job is not None]
    ok = sum(item.ok for item in rows)
    tokens = sum(item.tokens for item in rows)
    cut = sum(item.cut for item in rows)
    prompt_tokens = sum(item.prompt_tokens for item in rows)
    failed = sum(sum(failed_of(shard, done).values()) for shard in shards)
    not_reached = sum(job["not_reached"] for job in going) + _not_reached(done, counts.get("prompts_by_shard") or {})
    all_ok = ok + sum(job["ok"] for job in going)
    all_tokens = tokens + sum(job["tokens"] for job in going)
    total = counts.get("prompts")
    if total is None and len(done) == len(shards):
        total = all_ok + failed  # restored whole: what it has is all there is
    return Prompts(
        all=total,
        ok=all_ok,
        failed=failed,
        not_reached=not_reached,
        reused=sum(item.reused for item in rows) + sum(job["reused"] for job in going),
        in_flight=sum(shard.progress["in_flight"] for shard in shards if shard.progress and shard.stage is _GOING),
        left=None if total is None else max(0, total - all_ok - failed - not_reached),
        cut_share=cut / ok if ok else None,
        tokens=all_tokens,
        mean_tokens=all_tokens / all_ok if all_ok else None,
        mean_prompt_tokens=prompt_tokens / ok if ok else None,
    )


def _going(shards: Sequence[ShardNow], done: Mapping[str, ShardRows]) -> dict[str, int]:
    """What each server has answered of shards that are not finished, as their jobs count it."""
    answers: Counter[str] = Counter()
    for shard in shards:
        if shard.name not in done and shard.stage in (_GOING, Stage.BEGUN) and shard.progress is not None:
            answers.update({name: counts.get("ok", 0) for name, counts in shard.progress["servers"].items()})
    return dict(answers)


def _not_reached(done: Mapping[str, ShardRows], by_shard: Mapping[str, int]) -> int:
    """Turns after a failed one have no row: what a finished shard's rows fall short of its prompts."""
    return sum(max(0, by_shard[name] - rows.rows) for name, rows in done.items() if name in by_shard)


def _dataset(settings: Settings, counts: Mapping[str, Any], prompts: Prompts) -> DatasetUse:
    return DatasetUse(
        records=counts.get("records"),
        joined=counts.get("joined"),
        duplicates=counts.get("duplicates"),
        beyond_limit=counts.get("beyond_limit"),
        rejected=counts.get("rejected"),
        rejected_by_reason=dict(counts.get("rejected_by_reason") or {}),
        conversations=counts.get("conversations"),
        prompts=prompts.all,
        turns=settings.prompts.turns,
        answered_share=prompts.ok / prompts.all if prompts.all else None,
    )


def _verdict(build: BuildPaths) -> Verdict:
    pilot, whole = _report(build.pilot_report), _report(build.quality_report)
    latest = whole or pilot or {"checks": []}
    return Verdict(
        pilot=_said(pilot),
        build=_said(whole),
        failed_checks=tuple(check["name"] for check in latest["checks"] if check["passed"] is False),
    )


def _said(report: Mapping[str, Any] | None) -> str | None:
    """A report of an earlier version has no verdict in a word."""
    if report is None:
        return None
    return str(report.get("verdict") or ("passed" if report["passed"] else "failed"))


def _report(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except (FileNotFoundError, DamagedFile):
        return None


def _effort(shards: Sequence[ShardNow], done: Mapping[str, ShardRows]) -> Effort:
    """By a finished shard's file, wherever it was made; by its job's own count while there is none."""
    whole = Effort()
    for shard in shards:
        rows = done.get(shard.name)
        if rows is not None and rows.effort is not None:
            whole.add(rows.effort.as_dict())
        elif shard.progress is not None:
            whole.add(shard.progress)
    return whole


def _trends(settings: Settings, home: Home, run: RunNow, now: float, spans: Sequence[Span]) -> tuple[Trend, ...]:
    """Of the run at work, or the last one; a day of it at most."""
    until = now if run.at_work or run.last_sign is None else run.last_sign + history.EVERY_S
    samples = history.read(home.history, max(until - _TREND_S, run.started or 0.0))
    found = trends.from_history([sample for sample in samples if sample["at"] <= until])
    named = [replace(trend, server=recorded_name(settings, trend.server)) for trend in found]
    return tuple(named or trends.from_rows(curves(spans)))


def _warnings(run: RunNow, fleet: Fleet, shards: Shards, concurrency: int, now: float) -> list[str]:
    warnings = list(fleet.warnings)
    if run.at_work and shards.generating and not fleet.alive:
        warnings.append("jobs are generating, and no fleet of servers is at work on this machine")
    if fleet.alive and fleet.seen is not None and now - fleet.seen > _SILENT_S:
        warnings.append(f"the fleet has not written its state for {now - fleet.seen:.0f} s: look into its log")
    if fleet.mtp == "useless":
        warnings.append(f"MTP is on and nearly every draft is refused: accept length {fleet.accept_length:.2f}")
    for server in fleet.servers:
        if server.state in ("refused", "failed"):
            warnings.append(f"{server.name} is {server.state}: {server.why}")
    return [*warnings, *_capped(fleet, concurrency)]


def _disk(build: BuildPaths, run: RunNow) -> list[str]:
    room = room_of(build.root)
    if not (run.at_work and room.tight):
        return []
    return [
        f"the disk has {room.free / 1e6:,.0f} MB left: nothing new is asked until it has {room.needed / 1e6:,.0f} MB"
    ]


def _capped(fleet: Fleet, wanted: int) -> list[str]:
    """Servers that run fewer requests at once than they were started for, where that is less than `wanted`: one
    sentence for all that do so for the same reason."""
    alike: dict[str, list[str]] = {}
    for server in fleet.servers:
        if server.cap_reason is not None and (server.effective_cap or 0) < wanted:
            why = f"{server.effective_cap} of {server.requested_cap} requests at once: {server.cap_reason}"
            alike.setdefault(why, []).append(server.name)
    return [f"{', '.join(names)} run{'s' if len(names) == 1 else ''} {why}" for why, names in alike.items()]
