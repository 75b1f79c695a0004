"""Where every record and every prompt went, and whether it adds up (DESIGN.md, Files of a build)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardmill.quality.tables import COUNTS

if TYPE_CHECKING:
    import duckdb


def account(connection: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    """The accounting of the whole build, and tables accounting and shard_accounting for the check of that name.

    The first half is what the prompts step counted; the second is counted here, from completions. A turn is not reached
    when it has no row and an earlier turn of its conversation failed. Anything else without a row is unaccounted for.
    """
    _by_shard(connection)
    counts = dict(zip(COUNTS, _row(connection, f"SELECT {', '.join(COUNTS)} FROM counts"), strict=True))
    ok, failed, not_reached = _row(
        connection,
        "SELECT coalesce(sum(ok), 0), coalesce(sum(failed), 0), coalesce(sum(not_reached), 0) FROM shard_accounting",
    )
    unaccounted = _unaccounted(counts, int(ok), int(failed), int(not_reached)) + _misplaced(connection)
    connection.execute("CREATE TEMP TABLE accounting AS SELECT $1::BIGINT AS unaccounted", [unaccounted])
    return {
        **counts,
        "ok": int(ok),
        "failed": int(failed),
        "not_reached": int(not_reached),
        "balanced": unaccounted == 0,
    }


def _unaccounted(counts: dict[str, int | None], ok: int, failed: int, not_reached: int) -> int:
    """Records and prompts on one side only. A count that the prompts step has not written accounts for nothing."""
    known = {name: value or 0 for name, value in counts.items()}
    named = sum(known[name] for name in ("conversations", "joined", "rejected", "duplicates", "beyond_limit"))
    return abs(known["records"] - named) + abs(known["prompts"] - ok - failed - not_reached)


def _misplaced(connection: duckdb.DuckDBPyConnection) -> int:
    """Rows that a shard has too few of or too many, even where the sum over all shards is right. Counted once."""
    (excess,) = _row(
        connection,
        "SELECT coalesce(least(sum(greatest(answered + not_reached - prompts, 0)), "
        "sum(greatest(prompts - answered - not_reached, 0))), 0) FROM shard_accounting",
    )
    return int(excess)


def _by_shard(connection: duckdb.DuckDBPyConnection) -> None:
    """A shard whose prompts file is gone can't name its turns: then its turns without a row are taken as not reached
    when turns are regenerated and one of the shard's rows failed, and are unaccounted for otherwise."""
    connection.execute("""
        CREATE TEMP TABLE shard_accounting AS
        WITH answered AS (
            SELECT shard, count(*) FILTER (status = 'ok') AS ok, count(*) FILTER (status = 'failed') AS failed
            FROM completions GROUP BY shard
        ), failures AS (
            SELECT conversation_id, min(turn) AS turn FROM completions WHERE status = 'failed' GROUP BY conversation_id
        ), named AS (
            SELECT p.shard, count(*) AS not_reached
            FROM prompts p JOIN failures f ON p.conversation_id = f.conversation_id AND p.turn > f.turn
            WHERE NOT EXISTS (
                FROM completions c WHERE c.conversation_id = p.conversation_id AND c.turn = p.turn)
            GROUP BY p.shard
        ), there AS (SELECT DISTINCT shard FROM prompts)
        SELECT shard, coalesce(s.prompts, 0) AS prompts, coalesce(ok, 0) AS ok, coalesce(failed, 0) AS failed,
            coalesce(ok, 0) + coalesce(failed, 0) AS answered,
            CASE WHEN there.shard IS NOT NULL THEN coalesce(named.not_reached, 0)
                WHEN settings.turns = 'regenerate' AND coalesce(failed, 0) > 0
                    THEN greatest(coalesce(s.prompts, 0) - ok - failed, 0)
                ELSE 0 END AS not_reached
        FROM shard_prompts s FULL JOIN answered USING (shard)
        LEFT JOIN named USING (shard) LEFT JOIN there USING (shard) CROSS JOIN settings
    """)


def _row(connection: duckdb.DuckDBPyConnection, sql: str) -> tuple[Any, ...]:
    row = connection.execute(sql).fetchone()
    assert row is not None
    return tuple(row)
