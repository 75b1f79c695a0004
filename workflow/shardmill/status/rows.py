"""What the finished shards' completions say, read once a shard and from narrow columns alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from shardmill.catalog import connect
from shardmill.effort import Effort, read_efforts
from shardmill.errors import DataError
from shardmill.paths import BuildPaths
from shardmill.status.shards import Stamp

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import duckdb

BIN_S = 300  # of the curves over time


@dataclass(frozen=True, slots=True)
class Span:
    """What a server finished of one shard in BIN_S seconds, from its first request to its last answer."""

    server: str
    start: float
    end: float
    rows: int
    tokens: int
    accept_sum: float  # of accept length times tokens
    accept_tokens: int

    @property
    def at(self) -> float:
        """Where the bin begins."""
        return self.end // BIN_S * BIN_S


@dataclass(slots=True)
class ShardRows:
    """Totals of one shard's completions. Spans leave reused rows out: nobody waited for them."""

    rows: int = 0
    ok: int = 0
    reused: int = 0
    cut: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    effort: Effort | None = None  # None: a file of an earlier version, which doesn't tell


class RowsCache:
    """Shards already read, by the size and time of their file: the next look reads only what is new."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Stamp, ShardRows]] = {}

    def read(self, build: BuildPaths, stamps: Mapping[str, Stamp]) -> dict[str, ShardRows]:
        """`stamps`: the shards whose completions are here. Raises DataError for a file that can't be read."""
        known = {shard: entry for shard, entry in self._known.items() if stamps.get(shard) == entry[0]}
        new = [shard for shard in stamps if shard not in known]
        if new:
            for shard, rows in _read(build, new).items():
                known[shard] = (stamps[shard], rows)
        self._known = known
        return {shard: rows for shard, (_, rows) in known.items()}


def _read(build: BuildPaths, shards: list[str]) -> dict[str, ShardRows]:
    import duckdb

    found = {shard: ShardRows() for shard in shards}
    try:
        with connect(build, shards) as connection:
            _narrow(connection)
            _totals(connection, found)
            _times(connection, found)
        for shard, effort in read_efforts(build.completions(shard) for shard in shards).items():
            found[shard].effort = effort
    except (duckdb.Error, OSError, pa.ArrowInvalid) as error:
        line = " ".join(str(error).split())[:300]
        raise DataError(
            f"Completions in {build.root} cannot be read ({line}): "
            f"if it is not gone by a second look, `shardmill verify` says what is wrong."
        ) from None
    return found


def _narrow(connection: duckdb.DuckDBPyConnection) -> None:
    connection.execute("SET preserve_insertion_order = false")
    connection.execute(
        """
        CREATE TEMP TABLE narrow AS
        SELECT shard, status = 'ok' AS ok, reason, finish_reason = 'length' AS cut, prompt_tokens,
            completion_tokens AS tokens, accept_length, server, epoch(finished_at) AS finished,
            coalesce(latency_s, 0) AS latency, reused_from IS NOT NULL AS reused
        FROM completions
        """
    )


def _totals(connection: duckdb.DuckDBPyConnection, found: dict[str, ShardRows]) -> None:
    totals = connection.execute(
        """
        SELECT shard, count(*), count(*) FILTER (ok), count(*) FILTER (reused), count(*) FILTER (ok AND cut),
            coalesce(sum(tokens) FILTER (ok), 0), coalesce(sum(prompt_tokens) FILTER (ok), 0)
        FROM narrow GROUP BY shard
        """
    ).fetchall()
    for shard, *values in totals:
        into = found[shard]
        into.rows, into.ok, into.reused, into.cut, into.tokens, into.prompt_tokens = (int(value) for value in values)
    failed = "SELECT shard, reason, count(*) FROM narrow WHERE NOT ok GROUP BY shard, reason ORDER BY shard, reason"
    for shard, reason, count in connection.execute(failed).fetchall():
        found[shard].failed[str(reason)] = count


def _times(connection: duckdb.DuckDBPyConnection, found: dict[str, ShardRows]) -> None:
    spans = connection.execute(
        f"""
        SELECT shard, server, min(finished - latency), max(finished), count(*), sum(tokens),
            coalesce(sum(accept_length * tokens), 0), coalesce(sum(tokens) FILTER (accept_length IS NOT NULL), 0)
        FROM narrow WHERE server IS NOT NULL AND NOT reused AND finished IS NOT NULL
        GROUP BY shard, server, floor(finished / {BIN_S})
        """
    ).fetchall()
    for shard, *values in spans:
        found[shard].spans.append(Span(*values))


@dataclass(frozen=True, slots=True)
class Work:
    """What a server, or all of them, did: rows and tokens in `busy_s` seconds of answering, pauses left out."""

    rows: int
    tokens: int
    busy_s: float
    accept_length: float | None

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.busy_s if self.busy_s > 0 else None

    @property
    def rows_per_s(self) -> float | None:
        return self.rows / self.busy_s if self.busy_s > 0 else None


def work(spans: Iterable[Span]) -> Work:
    """`busy_s` is the length of the spans' union: a server is at several shards at once."""
    listed = list(spans)
    accept_tokens = sum(span.accept_tokens for span in listed)
    return Work(
        rows=sum(span.rows for span in listed),
        tokens=sum(span.tokens for span in listed),
        busy_s=union_length((span.start, span.end) for span in listed),
        accept_length=sum(span.accept_sum for span in listed) / accept_tokens if accept_tokens else None,
    )


def by_server(spans: Iterable[Span]) -> dict[str, list[Span]]:
    grouped: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        grouped[span.server].append(span)
    return dict(grouped)


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of what the intervals cover together."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            covered += end - max(start, reached)
            reached = end
    return covered


def curves(spans: Iterable[Span]) -> dict[str, dict[float, Work]]:
    """Server -> where a bin begins -> what the server finished in it, of all shards together."""
    bins: dict[str, dict[float, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        bins[span.server][span.at].append(span)
    return {server: {at: work(listed) for at, listed in found.items()} for server, found in bins.items()}
