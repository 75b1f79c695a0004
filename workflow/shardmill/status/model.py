"""What `status` and `monitor` tell, as one tree of plain values that becomes JSON as it is.

Times are Unix seconds, durations seconds, shares 0 to 1, sizes bytes, prices US dollars. None: not known.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RunNow:
    """The run at work, or the last one."""

    at_work: bool
    command: str | None
    pid: int | None
    host: str | None
    user: str | None
    started: float | None
    last_sign: float | None  # when a job of it last wrote something down


@dataclass(frozen=True, slots=True)
class Shards:
    """Every shard is in exactly one of the five states; `restored` are those of `published` that came from S3."""

    all: int
    published: int  # finished: here, with a manifest that fits
    answered: int  # completions are here; tokens or the manifest are not yet
    generating: int  # a job is at them now
    begun: int  # a job was, and left answers in the journal
    waiting: int
    restored: int  # of this run's plan, so many of `to_restore` are here
    to_restore: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """Counts of rows. `left` = all - ok - failed - not_reached."""

    all: int | None
    ok: int
    failed: int
    not_reached: int
    reused: int
    in_flight: int
    left: int | None
    cut_share: float | None  # of the ok ones in finished shards, ended by the length limit
    tokens: int  # in ok answers
    mean_tokens: float | None
    mean_prompt_tokens: float | None


@dataclass(frozen=True, slots=True)
class Example:
    shard: str
    conversation_id: str
    turn: int
    attempts: int
    server: str | None
    prompt: str | None  # the beginning of its last message


@dataclass(frozen=True, slots=True)
class Failure:
    """A reason why prompts have no answer."""

    reason: str
    meaning: str
    rows: int
    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class Server:
    """`*_now`: the fleet's, of the last minute or so. The rest is over rows of finished shards, `answers` over all."""

    name: str
    url: str | None
    state: str | None
    why: str | None
    for_s: float | None
    restarts: int
    faults: dict[str, int]
    running: int | None
    queued: int | None
    in_flight: int | None
    effective_cap: int | None
    requested_cap: int | None
    cap_reason: str | None
    kv_use: float | None
    mamba_use: float | None
    tokens_per_s_now: float | None
    accept_length_now: float | None
    resident_bytes: int | None
    gpu: int | None
    gpu_use: float | None
    gpu_power_w: float | None
    gpu_bytes: float | None
    answers: int
    tokens: int
    busy_s: float
    tokens_per_s: float | None
    accept_length: float | None


@dataclass(frozen=True, slots=True)
class Fleet:
    """The servers as one pool. `mtp`: 'on', 'off', 'useless' (on, and nearly every draft is refused), or None."""

    alive: bool
    engine: str
    seen: float | None  # when it last wrote its state
    waiting: int | None
    ready: int
    mtp: str | None
    accept_length: float | None
    warnings: tuple[str, ...]
    servers: tuple[Server, ...]


@dataclass(frozen=True, slots=True)
class GpuNow:
    """As nvidia-smi has it."""

    index: int
    use: float | None
    power_w: float | None
    bytes: float | None  # of its memory, in use


@dataclass(frozen=True, slots=True)
class Pace:
    """`now`: over the last minute of the jobs at work. `mean`: over all time in which servers answered."""

    tokens_per_s_now: float | None
    requests_per_s_now: float | None
    tokens_per_s: float | None
    requests_per_s: float | None
    tokens_per_s_per_server: float | None
    server_hours: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The same figures of the whole build, as expected after the pilot and as they come out."""

    mean_tokens: float | None
    tokens: float | None
    tokens_per_s_per_server: float | None
    server_hours: float | None
    hours: float | None
    usd: float | None


@dataclass(frozen=True, slots=True)
class Outlook:
    """`estimated` stands on the pilot's rows alone, `actual` on all rows until now. Hours are on all servers."""

    estimated: Figures | None
    actual: Figures | None
    servers: int | None
    usd_per_gpu_hour: float | None
    usd_so_far: float | None
    usd_to_come: float | None
    left_s: float | None
    finished_at: float | None  # at the present rate; None when no run is at work


@dataclass(frozen=True, slots=True)
class Store:
    """What lies in S3, as the local manifests say. Behind: answered here and not published.

    `upload_*` and `lag_s` are over this machine's last uploads, medians where not said otherwise.
    """

    where: str | None
    offline: bool
    published_shards: int
    published_bytes: int
    behind_shards: int
    behind_bytes: int
    behind_s: float | None  # since the oldest of them was answered
    upload_s: float | None  # a shard's objects up and checked
    upload_bytes_per_s: float | None  # their bytes over their time
    lag_s: float | None  # from a shard's answers to its objects in the store
    last_published: float | None
    usd_per_month: float | None


@dataclass(frozen=True, slots=True)
class Machine:
    """Another machine on the same build, by what it last sent to the store."""

    name: str
    at_work: bool
    seen: float  # when it sent that
    published: int  # shards that are finished and in its folder
    generating: int
    in_flight: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class DatasetUse:
    """How much of the dataset becomes rows, and which setting keeps the rest out."""

    records: int | None
    joined: int | None  # parts that became one with another (prompts.rejoin)
    duplicates: int | None  # prompts.dedupe
    beyond_limit: int | None  # prompts.limit
    rejected: int | None
    rejected_by_reason: dict[str, int]
    conversations: int | None
    prompts: int | None
    turns: str  # the policy that makes prompts of a conversation
    answered_share: float | None  # of the prompts


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the checks said last: 'passed', 'failed' or 'none' (too few rows for a verdict); None: not made."""

    pilot: str | None
    build: str | None
    failed_checks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Point:
    at: float
    value: float


@dataclass(frozen=True, slots=True)
class Trend:
    """A figure of a server over the hours. `change`: the end against the beginning, as a share of the beginning."""

    what: str  # 'accept length' | 'tokens/s' | 'memory'
    server: str
    points: tuple[Point, ...]
    first: float
    last: float
    change: float
    warning: str | None


@dataclass(frozen=True, slots=True)
class Status:
    build: str
    root: str
    model: str
    taken: float
    run: RunNow
    shards: Shards
    prompts: Prompts
    pace: Pace
    outlook: Outlook
    fleet: Fleet
    other_gpus: tuple[GpuNow, ...]  # of this machine, that no server of the fleet names as its own
    store: Store
    elsewhere: tuple[Machine, ...]
    dataset: DatasetUse
    verdict: Verdict
    failures: tuple[Failure, ...]
    faults: dict[str, int]  # of servers, all tried again
    degenerate: dict[str, int]  # answers of no use, by kind, asked again
    cut_at_stop: int  # answers that went on after their stop token, cut there
    trends: tuple[Trend, ...]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
