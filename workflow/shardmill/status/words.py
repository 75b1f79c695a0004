"""The facts of a Status in words: a name and a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

from shardmill.fleet.show import duration
from shardmill.status.model import Machine, Status
from shardmill.wording import counted


def lines(status: Status) -> Iterator[tuple[str, str]]:
    """In the order in which they are shown."""
    yield "build", status.root
    yield "run", _run(status)
    yield "shards", _shards(status)
    yield "prompts", _prompts(status)
    yield "speed", _speed(status)
    yield "left", _left(status)
    yield "answers", _answers(status)
    yield "servers", _fleet(status)
    yield "store", _store(status)
    for machine in status.elsewhere:
        yield "also", _machine(machine, status.taken)
    yield "dataset", _dataset(status)
    yield "checks", _checks(status)


def _run(status: Status) -> str:
    run = status.run
    if run.at_work:
        since = "" if run.started is None else f" since {_clock(run.started)} ({duration(status.taken - run.started)})"
        return f"at work{since}, pid {run.pid} on {run.host}: {run.command}"
    if run.started is None:
        return "none has been at work here"
    sign = "" if run.last_sign is None else f", last answers {_clock(run.last_sign)}"
    return f"none at work; the last one began {_clock(run.started)}{sign}"


def _shards(status: Status) -> str:
    shards = status.shards
    parts = [f"{shards.published:,} of {shards.all:,} finished"]
    if shards.restored or shards.to_restore:
        parts.append(f"{shards.restored:,} of them restored from S3 (of {shards.to_restore:,} to restore)")
    parts += _counted(
        (shards.answered, "answered, not published yet"),
        (shards.generating, "generating"),
        (shards.begun, "begun and stopped"),
        (shards.waiting, "waiting"),
    )
    return ", ".join(parts)


def _prompts(status: Status) -> str:
    prompts = status.prompts
    total = "an unknown number" if prompts.all is None else f"{prompts.all:,}"
    share = "" if status.dataset.answered_share is None else f" ({status.dataset.answered_share:.1%})"
    parts = _counted(
        (prompts.failed, "failed"),
        (prompts.not_reached, "not reached, after a failed turn"),
        (prompts.reused, "reused from other builds"),
        (prompts.in_flight, "in flight"),
        (prompts.left, "left"),
    )
    return ", ".join([f"{prompts.ok:,} of {total} answered{share}", *parts])


def _speed(status: Status) -> str:
    pace = status.pace
    parts = []
    if pace.tokens_per_s_now is not None:
        parts.append(f"now {pace.tokens_per_s_now:,.0f} tokens/s, {pace.requests_per_s_now:.2f} requests/s")
    if pace.tokens_per_s is not None and pace.requests_per_s is not None:
        each = "" if pace.tokens_per_s_per_server is None else f", {pace.tokens_per_s_per_server:,.0f} a server"
        parts.append(f"mean {pace.tokens_per_s:,.0f} tokens/s{each}, {pace.requests_per_s:.2f} requests/s")
    return "; ".join(parts) or "nothing answered yet"


def _left(status: Status) -> str:
    look = status.outlook
    if status.prompts.left == 0:
        return f"nothing: every prompt has its row{_spent(status)}"
    if look.left_s is None:
        return f"not known yet{_spent(status)}"
    when = "" if look.finished_at is None else f", until {_clock(look.finished_at)}"
    return f"about {duration(look.left_s)} of answering{when}{_spent(status)}"


def _spent(status: Status) -> str:
    look = status.outlook
    hours = f"; {status.pace.server_hours:,.2f} server hours so far"
    if look.usd_so_far is None:
        return f"{hours} (set cost.usd_per_gpu_hour for dollars)" if status.fleet.engine == "sglang" else hours
    come = "" if look.usd_to_come is None else f", ${look.usd_to_come:,.2f} to come"
    return f"{hours}, ${look.usd_so_far:,.2f} so far{come}"


def _answers(status: Status) -> str:
    prompts = status.prompts
    if prompts.mean_tokens is None:
        return "none yet"
    parts = [f"mean {prompts.mean_tokens:,.0f} tokens, {prompts.tokens:,} in all"]
    if prompts.cut_share is not None:
        parts.append(f"{prompts.cut_share:.1%} cut at the length limit")
    if status.cut_at_stop:
        parts.append(f"{status.cut_at_stop:,} went on after their stop token and were cut there")
    if status.degenerate:
        parts.append(f"of no use and asked again: {_kinds(status.degenerate)}")
    if status.faults:
        parts.append(f"server faults, all tried again: {_kinds(status.faults)}")
    return "; ".join(parts)


def _fleet(status: Status) -> str:
    fleet = status.fleet
    parts = []
    if fleet.alive:
        parts.append(f"{fleet.ready} of {len(fleet.servers)} ready, {fleet.waiting} requests waiting for a place")
    else:
        parts.append("no fleet at work")
    match fleet.mtp:
        case "on":
            parts.append(f"MTP is on, accept length {fleet.accept_length:.2f}")
        case "useless":
            parts.append(f"MTP is on and useless, accept length {fleet.accept_length:.2f}")
        case "off":
            parts.append("MTP is off: no server gives an accept length")
        case _:
            parts.append("MTP: the servers don't say")
    if fleet.alive and fleet.seen is not None:
        parts.append(f"seen {duration(max(0.0, status.taken - fleet.seen))} ago")
    return "; ".join(parts)


def _store(status: Status) -> str:
    store = status.store
    if store.where is None:
        return "none: shards stay on this machine (s3.bucket)"
    if store.offline:
        return f"{store.where}, not used (s3.offline)"
    parts = [f"{store.where}: {store.published_shards:,} shards, {_bytes(store.published_bytes)}"]
    if store.last_published is not None:
        parts.append(f"last {_clock(store.last_published)}")
    if store.behind_shards:
        since = "" if store.behind_s is None else f" for {duration(store.behind_s)}"
        parts.append(f"{counted(store.behind_shards, 'shard')} and {_bytes(store.behind_bytes)} waiting{since}")
    else:
        parts.append("nothing waiting")
    if store.upload_s is not None and store.upload_bytes_per_s is not None and store.lag_s is not None:
        parts.append(
            f"last uploads {store.upload_s:.1f} s a shard at {_bytes(store.upload_bytes_per_s)}/s, "
            f"{duration(store.lag_s)} after their answers"
        )
    if store.usd_per_month is not None:
        parts.append(f"${store.usd_per_month:,.2f} a month")
    return ", ".join(parts)


def _machine(machine: Machine, now: float) -> str:
    seen = f"seen {duration(max(0.0, now - machine.seen))} ago"
    has = f"{counted(machine.published, 'finished shard')} there"
    if not machine.at_work:
        return f"{machine.name}: its run is over, {has}, {seen}"
    return (
        f"{machine.name}: generating {counted(machine.generating, 'shard')}, {machine.in_flight:,} in flight, "
        f"{machine.tokens_per_s:,.0f} tokens/s, {has}, {seen}"
    )


def _dataset(status: Status) -> str:
    use = status.dataset
    if use.records is None:
        return "not read yet"
    parts = _counted(
        (use.joined, "joined with others (rejoin)"),
        (use.duplicates, "duplicates (dedupe)"),
        (use.beyond_limit, "beyond the limit (limit)"),
        (use.rejected, f"rejected ({_kinds(use.rejected_by_reason)})"),
    )
    prompts = "" if use.prompts is None else f" = {use.prompts:,} prompts (turns: {use.turns})"
    lost = "".join(f" - {part}" for part in parts)
    return f"{use.records:,} records{lost} = {use.conversations:,} conversations{prompts}"


def _checks(status: Status) -> str:
    verdict = status.verdict
    words = {"passed": "passed", "failed": "not passed", "none": "no verdict: too few rows", None: "not checked yet"}
    failed = f"; not met: {', '.join(verdict.failed_checks)}" if verdict.failed_checks else ""
    return f"pilot {words[verdict.pilot]}, build {words[verdict.build]}{failed}"


def _counted(*counts: tuple[int | None, str]) -> list[str]:
    """A phrase for each count that there is something of."""
    return [f"{count:,} {what}" for count, what in counts if count]


def _kinds(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in counts.items())


def _clock(moment: float) -> str:
    """Local time; with its day where that isn't today's."""
    local = datetime.fromtimestamp(moment).astimezone()
    today = datetime.now().astimezone().date()
    return local.strftime("%H:%M" if local.date() == today else "%Y-%m-%d %H:%M")


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value / 1e3:,.1f} kB"
