"""What the report page shows, read from a build's narrow columns. Pure reading: no figures, no HTML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb

Rows = list[dict[str, Any]]

# Intervals of a server with less than this many seconds between them count as one: a pause between two shards.
_PAUSE_S = 60
_BINS = 60
_EXAMPLES = 3
# Servers drawn by name in plots over time; the rest are in the table.
_DRAWN_SERVERS = 10


@dataclass(frozen=True, slots=True)
class Timeline:
    """Per server, over equal bins of time. `start` and `width` in seconds since the epoch."""

    start: float
    width: float
    tokens_per_s: dict[str, list[float]]
    failures: dict[str, list[int]]
    accept_length: dict[str, list[float | None]]


@dataclass(frozen=True, slots=True)
class ReportData:
    totals: dict[str, Any]
    servers: Rows
    timeline: Timeline | None
    accept_by_length: Rows
    rejects: Rows
    failures: Rows
    stored_bytes: int


def read_data(connection: duckdb.DuckDBPyConnection) -> ReportData:
    """Over the catalog's views. Rows of another build (`reused_from`) count in totals, not in times or servers."""
    _made_here(connection)
    return ReportData(
        totals=_totals(connection),
        servers=_servers(connection),
        timeline=_timeline(connection),
        accept_by_length=_accept_by_length(connection),
        rejects=_rejects(connection),
        failures=_failures(connection),
        stored_bytes=_stored_bytes(connection),
    )


def _made_here(connection: duckdb.DuckDBPyConnection) -> None:
    connection.execute("""
        CREATE TEMP TABLE made_here AS
        SELECT coalesce(server, 'no server') AS server, status, completion_tokens AS tokens, accept_length,
            epoch(finished_at) AS ended, epoch(finished_at) - coalesce(latency_s, 0) AS began
        FROM completions WHERE reused_from IS NULL AND finished_at IS NOT NULL
    """)


def _totals(connection: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    (totals,) = _rows(
        connection,
        """
        SELECT count(*) FILTER (status = 'ok') AS ok, count(*) FILTER (status = 'failed') AS failed,
            coalesce(sum(completion_tokens), 0)::BIGINT AS tokens,
            coalesce(sum(prompt_tokens) FILTER (status = 'ok'), 0)::BIGINT AS prompt_tokens,
            avg(completion_tokens) FILTER (status = 'ok') AS mean_tokens,
            sum(accept_length * completion_tokens)
                / nullif(sum(completion_tokens) FILTER (accept_length IS NOT NULL), 0) AS accept_length,
            avg((finish_reason = 'length')::INTEGER) FILTER (status = 'ok') AS truncated,
            count(*) FILTER (reused_from IS NOT NULL) AS reused,
            count(DISTINCT shard) AS shards,
            strftime(min(finished_at), '%Y-%m-%d %H:%M') AS first, strftime(max(finished_at), '%Y-%m-%d %H:%M') AS last
        FROM completions
        """,
    )
    return totals


def _servers(connection: duckdb.DuckDBPyConnection) -> Rows:
    """A row a server. `active_s`: the union of its requests' times, short pauses included. Failed rows name none."""
    return _rows(
        connection,
        f"""
        WITH islands AS (
            SELECT *, sum((began > coalesce(reached, began) + {_PAUSE_S})::INTEGER)
                OVER (PARTITION BY server ORDER BY began, ended ROWS UNBOUNDED PRECEDING) AS island
            FROM (SELECT *, max(ended) OVER (PARTITION BY server ORDER BY began, ended
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reached FROM made_here WHERE status = 'ok')
        ), active AS (
            SELECT server, sum(seconds) AS active_s
            FROM (SELECT server, max(ended) - min(began) AS seconds FROM islands GROUP BY server, island)
            GROUP BY server
        )
        SELECT server, count(*) AS ok,
            sum(tokens)::BIGINT AS tokens, any_value(active_s) AS active_s,
            sum(tokens) / nullif(any_value(active_s), 0) AS tokens_per_s,
            sum(accept_length * tokens) / nullif(sum(tokens) FILTER (accept_length IS NOT NULL), 0) AS accept_length
        FROM made_here JOIN active USING (server) WHERE status = 'ok' GROUP BY server ORDER BY tokens DESC, server
        """,
    )


def _timeline(connection: duckdb.DuckDBPyConnection) -> Timeline | None:
    """An answer's tokens are spread evenly over the time of its request: when each came is not recorded."""
    start, end = connection.execute("SELECT min(began), max(ended) FROM made_here").fetchone() or (None, None)
    if start is None:
        return None
    width = max((end - start) / _BINS, 1.0)
    bins = min(int((end - start) // width) + 1, _BINS)
    bin_of = f"least(floor(({{}} - $1) / $2)::INTEGER, {bins - 1})"
    spread = connection.execute(
        f"""
        SELECT server, bin, sum(CASE WHEN ended > began THEN tokens / (ended - began)
            * greatest(least(ended, $1 + (bin + 1) * $2) - greatest(began, $1 + bin * $2), 0) ELSE tokens END) / $2
        FROM (SELECT *, unnest(range({bin_of.format("began")}, {bin_of.format("ended")} + 1)) AS bin FROM made_here)
        WHERE server IN ({_MOST_USED}) GROUP BY server, bin
        """,
        [start, width],
    ).fetchall()
    ended = connection.execute(
        f"""
        SELECT server, {bin_of.format("ended")} AS bin, count(*) FILTER (status = 'failed'), avg(accept_length)
        FROM made_here WHERE server IN ({_MOST_USED}) GROUP BY server, bin
        """,
        [start, width],
    ).fetchall()
    names = sorted({row[0] for row in spread})
    rates = {name: [0.0] * bins for name in names}
    failures = {name: [0] * bins for name in names}
    accept: dict[str, list[float | None]] = {name: [None] * bins for name in names}
    for name, index, rate in spread:
        rates[name][index] = rate
    for name, index, failed, length in ended:
        failures[name][index] = failed
        accept[name][index] = length
    return Timeline(start, width, rates, failures, accept)


_MOST_USED = f"SELECT server FROM made_here GROUP BY server ORDER BY count(*) DESC, server LIMIT {_DRAWN_SERVERS}"


def _accept_by_length(connection: duckdb.DuckDBPyConnection) -> Rows:
    """By powers of two of prompt and answer tokens together."""
    return _rows(
        connection,
        """
        SELECT (2 ** floor(log2(prompt_tokens + completion_tokens)))::BIGINT AS length, avg(accept_length) AS mean,
            quantile_cont(accept_length, 0.1) AS p10, quantile_cont(accept_length, 0.9) AS p90, count(*) AS rows
        FROM completions
        WHERE accept_length IS NOT NULL AND prompt_tokens + completion_tokens > 0 GROUP BY 1 ORDER BY 1
        """,
    )


def _rejects(connection: duckdb.DuckDBPyConnection) -> Rows:
    return _rows(
        connection,
        f"""
        WITH numbered AS (
            SELECT *, row_number() OVER (PARTITION BY reason ORDER BY source_file, record) AS number FROM rejects
        )
        SELECT reason, count(*) AS rows, list({{
                'place': source_file || ', record ' || record, 'detail': detail, 'excerpt': left(excerpt, 200)
            }} ORDER BY number) FILTER (number <= {_EXAMPLES}) AS examples
        FROM numbered GROUP BY reason ORDER BY rows DESC, reason
        """,
    )


def _failures(connection: duckdb.DuckDBPyConnection) -> Rows:
    return _rows(
        connection,
        f"""
        WITH failed AS (
            SELECT *, row_number() OVER (PARTITION BY reason ORDER BY conversation_id, turn) AS number
            FROM completions WHERE status = 'failed'
        )
        SELECT reason, count(*) AS rows, list({{
                'place': 'conversation ' || left(f.conversation_id, 12) || ', turn ' || f.turn,
                'detail': f.attempts || ' attempts',
                'excerpt': left(json_extract_string(p.messages, '$[#-1].content'), 200)
            }} ORDER BY number) FILTER (number <= {_EXAMPLES}) AS examples
        FROM failed f LEFT JOIN prompts p USING (conversation_id, turn) GROUP BY reason ORDER BY rows DESC, reason
        """,
    )


def _stored_bytes(connection: duckdb.DuckDBPyConnection) -> int:
    row = connection.execute("SELECT coalesce(sum(o.size), 0) FROM manifests, unnest(objects) AS t(o)").fetchone()
    assert row is not None
    return int(row[0])


def _rows(connection: duckdb.DuckDBPyConnection, sql: str) -> Rows:
    answer = connection.execute(sql)
    names = [column[0] for column in answer.description or []]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]
