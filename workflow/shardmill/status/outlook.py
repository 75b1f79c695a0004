"""How fast it goes, what that comes to, and what was to be expected. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from shardmill.estimate import Known, estimate
from shardmill.settings import Settings
from shardmill.status.model import Figures, Fleet, Outlook, Pace, Prompts
from shardmill.status.rows import ShardRows, Span, Work, by_server, union_length, work
from shardmill.status.shards import ShardNow, Stage


def pace(shards: Sequence[ShardNow], spans: Sequence[Span], each: Mapping[str, Work]) -> Pace:
    """`spans` of all finished shards, and `each`: their work by server."""
    jobs = [shard.progress for shard in shards if shard.stage is Stage.GENERATING and shard.progress is not None]
    total = work(spans)
    busy = sum(item.busy_s for item in each.values())
    return Pace(
        tokens_per_s_now=sum(job["tokens_per_s"] for job in jobs) if jobs else None,
        requests_per_s_now=sum(job["rows_per_s"] for job in jobs) if jobs else None,
        tokens_per_s=total.tokens_per_s,
        requests_per_s=total.rows_per_s,
        tokens_per_s_per_server=total.tokens / busy if busy > 0 else None,
        server_hours=_server_hours(shards, spans),
    )


def outlook(
    settings: Settings,
    shards: Sequence[ShardNow],
    done: Mapping[str, ShardRows],
    prompts: Prompts,
    pace: Pace,
    fleet: Fleet,
    at_work: bool,
    now: float,
) -> Outlook:
    price = settings.cost.usd_per_gpu_hour
    servers = fleet.ready if fleet.alive and fleet.ready else server_count(settings)
    to_come = _seconds_left(prompts, pace, servers)
    hours_to_come = None if to_come is None or servers is None else to_come / 3600 * servers
    return Outlook(
        estimated=_estimated(settings, shards, done, prompts, servers),
        actual=_actual(prompts, pace, servers, hours_to_come, price),
        servers=servers,
        usd_per_gpu_hour=price,
        usd_so_far=_times(pace.server_hours, price),
        usd_to_come=_times(hours_to_come, price),
        left_s=to_come,
        finished_at=now + to_come if at_work and to_come is not None else None,
    )


def server_count(settings: Settings) -> int | None:
    """As the settings have it; None where a file names the endpoints."""
    servers = settings.servers
    if not servers.launch:
        return len(servers.endpoints) or None
    return len(servers.gpus) if servers.engine == "sglang" else servers.count


def _seconds_left(prompts: Prompts, pace: Pace, servers: int | None) -> float | None:
    """Answers left times their mean length, at the rate of the last minute, or of the mean where nothing is running."""
    if prompts.left == 0:
        return 0.0
    rate = pace.tokens_per_s_now or _times(pace.tokens_per_s_per_server, servers)
    if prompts.left is None or prompts.mean_tokens is None or not rate:
        return None
    return prompts.left * prompts.mean_tokens / rate


def _estimated(
    settings: Settings,
    shards: Sequence[ShardNow],
    done: Mapping[str, ShardRows],
    prompts: Prompts,
    servers: int | None,
) -> Figures | None:
    """What the pilot's rows let expect for all prompts."""
    pilot = [done[shard.name] for shard in shards[: settings.generate.pilot_shards] if shard.name in done]
    ok = sum(rows.ok for rows in pilot)
    if not ok:
        return None
    each = [work(spans) for spans in by_server(span for rows in pilot for span in rows.spans).values()]
    busy = sum(item.busy_s for item in each)
    mean = sum(rows.tokens for rows in pilot) / ok
    rate = sum(item.tokens for item in each) / busy if busy > 0 else None
    known = Known(prompts.all, mean, rate, servers, settings.cost.usd_per_gpu_hour, None, None, None)
    expected = estimate(known)
    return Figures(mean, expected.tokens, rate, expected.server_hours, expected.hours, expected.usd)


def _actual(
    prompts: Prompts, pace: Pace, servers: int | None, hours_to_come: float | None, price: float | None
) -> Figures | None:
    """All rows until now, and the rest as it is to be expected from them."""
    if not prompts.ok:
        return None
    hours = None if hours_to_come is None else pace.server_hours + hours_to_come
    tokens = None
    if prompts.left is not None and prompts.mean_tokens is not None:
        tokens = prompts.tokens + prompts.left * prompts.mean_tokens
    return Figures(
        mean_tokens=prompts.mean_tokens,
        tokens=tokens,
        tokens_per_s_per_server=pace.tokens_per_s_per_server,
        server_hours=hours,
        hours=hours / servers if hours is not None and servers else None,
        usd=_times(hours, price),
    )


def _server_hours(shards: Iterable[ShardNow], spans: Iterable[Span]) -> float:
    """Time in which servers answered this build, those of unfinished shards included since their job's start."""
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        times[span.server].append((span.start, span.end))
    for shard in shards:
        if shard.stage in (Stage.GENERATING, Stage.BEGUN) and shard.progress is not None:
            for server in shard.progress["servers"]:
                times[server].append((shard.progress["started_at"], shard.progress["updated_at"]))
    return sum(union_length(intervals) for intervals in times.values()) / 3600


def _times(a: float | None, b: float | None) -> float | None:
    return a * b if a is not None and b is not None else None
