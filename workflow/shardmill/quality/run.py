"""Runs the checks over the pilot, a shard or the whole build, and says whether they passed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from shardmill.catalog import connect
from shardmill.effort import read_efforts, total
from shardmill.errors import DataError
from shardmill.facts import build_facts
from shardmill.files import write_json
from shardmill.paths import BuildPaths
from shardmill.quality.accounting import account
from shardmill.quality.checks import Check, load_checks
from shardmill.quality.earlier import earlier_results, keep_result, shards_without_prompts
from shardmill.quality.lengths import lengths
from shardmill.quality.tables import leave_out_reused, prepare
from shardmill.settings import Quality, Settings

if TYPE_CHECKING:
    import duckdb

# Below this many rows a share says too little to stop a run (CONTRACTS.md, Checks and limits).
LEAST_ROWS = 12
# A shard is a sample of the build: its share may lie this many standard deviations beyond a limit that is meant for
# the whole. With four, 1,828 shards exactly at the limit stop a good run once in about ten.
_DEVIATIONS = 4.0
_EXAMPLES = 3
_EXAMPLE_CHARACTERS = 200

Report = dict[str, Any]


def check_pilot(build: BuildPaths, settings: Settings, shards: Sequence[str]) -> Report:
    """Checks `shards` by the limits of the whole build and writes quality/pilot.json."""
    report = _check(build, settings, "pilot", shards)
    write_json(build.pilot_report, report)
    return report


def check_shard(build: BuildPaths, settings: Settings, shard: str) -> Report:
    """Checks one shard, before it is published. Shares may exceed their limit by what so small a sample may."""
    return _check(build, settings, "shard", [shard])


def check_build(build: BuildPaths, settings: Settings) -> Report:
    """Checks the whole build and writes quality/report.json. A build that doesn't balance never passes."""
    report = _check(build, settings, "build", None)
    write_json(build.quality_report, report)
    if not report["shards_without_prompts"]:
        keep_result(build, report)
    return report


def _check(build: BuildPaths, settings: Settings, scope: str, shards: Sequence[str] | None) -> Report:
    import duckdb

    try:
        return _checked(build, settings, scope, shards)
    except duckdb.Error as error:
        # What is wrong with a check itself is told by _run.
        line = " ".join(str(error).split())[:300]
        raise DataError(
            f"The rows of {build.root} can't be read ({line}): `shardmill verify` says which file is damaged, and what "
            f"to do; where none is, this machine lacks memory or disk for the checks."
        ) from None


def _checked(build: BuildPaths, settings: Settings, scope: str, shards: Sequence[str] | None) -> Report:
    checks = load_checks(settings.quality)
    with connect(build, shards) as connection:
        effort = _effort(connection, build, shards)
        prepare(connection, settings, build_facts(build))
        accounting = account(connection) if scope == "build" else None
        totals = _totals(connection)
        # Pilot and shards are judged where their prompts were just answered.
        lacking = shards_without_prompts(build) if scope == "build" else 0
        earlier = earlier_results(build) if lacking else {}
        results = [
            _result_without_prompts(connection, check, settings.quality, earlier.get(check.name))
            if lacking and check.needs_prompts
            else _result(connection, check, settings.quality, totals["ok"] if scope == "shard" else None)
            for check in checks.of_scope(scope)
        ]
        reused, failures = _reused(connection), _failures(connection)
        distributions = lengths(connection) if scope == "build" else None
    if scope != "build" and totals["reused"] and totals["rows"] - totals["reused"] >= LEAST_ROWS:
        apart = [check for check in checks.of_scope(scope) if check.reused_apart]
        new = _of_new_rows(build, settings, scope, shards, apart)
        worse = {item["name"]: item for item in new if not item["passed"]}
        results = [worse.get(item["name"], item) if item["passed"] else item for item in results]
    few = totals["rows"] < (1 if scope == "build" else LEAST_ROWS)
    failing = [item for item in results if _stops(item)]
    if few:
        for item in failing:
            item["severity"] = "warning"
    sound = not failing and (accounting is None or accounting["balanced"])
    report = {
        "build": build.name,
        # Of a sample too small to judge the run goes on; a build without a row is nothing that passed.
        "passed": scope != "build" if few else sound,
        "verdict": "none" if few else "passed" if sound else "failed",
        "scope": scope,
        "shards": list(shards) if shards is not None else None,
        "checked_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "note": _note(few, totals["rows"], failing),
        **totals,
        "reused_from": reused,
        "failures": failures,
        "effort": effort,
        "checks": results,
        "off": list(checks.off),
    }
    if accounting is None:
        return report
    return {**report, "accounting": accounting, "lengths": distributions, "shards_without_prompts": lacking}


def _of_new_rows(
    build: BuildPaths, settings: Settings, scope: str, shards: Sequence[str] | None, checks: Sequence[Check]
) -> list[Report]:
    """`checks` over what was asked here alone: among many rows of another build, today's servers would not show.

    Those alone that such rows can be held against: where only what a limit had cut is asked again, they are longer than
    others, and are cut or repeat themselves more often.
    """
    with connect(build, shards) as connection:
        _effort(connection, build, shards)
        leave_out_reused(connection)
        prepare(connection, settings, build_facts(build))
        sample = _totals(connection)["ok"] if scope == "shard" else None
        results = [_result(connection, check, settings.quality, sample) for check in checks]
    return [{**result, "title": f"{result['title']} (rows asked here)"} for result in results]


def _stops(result: Report) -> bool:
    return not result["passed"] and result["severity"] == "error" and not result["overridden"]


def _note(few: bool, rows: int, failing: list[Report]) -> str | None:
    if not few:
        return None
    said = f"{rows} rows, {LEAST_ROWS} are needed" if rows else "0 rows"
    return f"{said}; {len(failing)} checks would have failed" if failing else said


def _result(
    connection: duckdb.DuckDBPyConnection,
    check: Check,
    quality: Quality,
    sample: int | None,
    earlier: Report | None = None,
) -> Report:
    """One entry of the report. `sample`: rows that a share is over, when they are a sample of a larger whole.

    `earlier`: a result of the same check whose value and examples are taken in place of a query's.
    """
    value = _value(connection, check) if earlier is None else earlier["value"]
    limit = check.limit if sample is None else _for_sample(check, sample)
    passed = check.passes(value, limit)
    result: Report = {
        "name": check.name,
        "title": check.title,
        "value": value,
        "limit": limit,
        "passed": passed,
        "severity": check.severity,
        "direction": check.direction,
        "unit": check.unit,
        "overridden": not passed and not {check.name, "all"}.isdisjoint(quality.override),
        "advice": check.advice,
        "examples": earlier["examples"] if earlier is not None else [] if passed else _examples(connection, check),
    }
    return result


def _result_without_prompts(
    connection: duckdb.DuckDBPyConnection, check: Check, quality: Quality, earlier: Report | None
) -> Report:
    """`judged_at` None: not judged over all rows."""
    judged_at = None if earlier is None else earlier["judged_at"]
    return {**_result(connection, check, quality, None, earlier), "judged_at": judged_at}


def _for_sample(check: Check, rows: int) -> float | None:
    limit = check.limit
    if limit is None or check.unit != "share" or not 0 < limit < 1 or rows == 0:
        return limit
    slack = _DEVIATIONS * math.sqrt(limit * (1 - limit) / rows)
    return min(1.0, limit + slack) if check.direction == "max" else max(0.0, limit - slack)


def _value(connection: duckdb.DuckDBPyConnection, check: Check) -> float | None:
    rows = _run(connection, check, check.query)
    if len(rows) != 1 or len(rows[0]) != 1:
        raise DataError(f"The check {check.path} must give one row of one value; it gave {len(rows)} rows.")
    value = rows[0][0]
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise DataError(f"The check {check.path} must give a number; it gave {value!r}.") from None
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() else number


def _examples(connection: duckdb.DuckDBPyConnection, check: Check) -> list[Report]:
    if check.examples is None:
        return []
    rows = _run(connection, check, check.examples)[:_EXAMPLES]
    if rows and len(rows[0]) != 2:
        raise DataError(f"The examples of the check {check.path} must have two columns: prompt_id, and what is wrong.")
    return [{"prompt_id": row[0], "what": _short(str(row[1]))} for row in rows]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _EXAMPLE_CHARACTERS else line[: _EXAMPLE_CHARACTERS - 1] + "…"


def _run(connection: duckdb.DuckDBPyConnection, check: Check, sql: str) -> list[tuple[Any, ...]]:
    import duckdb

    try:
        return connection.execute(sql).fetchall()
    except duckdb.Error as error:
        raise DataError(f"DuckDB refuses the check {check.path}: {' '.join(str(error).split())}") from None


def _totals(connection: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """Rows, ok rows, those of them that another build made, and the ok rows' prompt and completion tokens."""
    row = connection.execute(
        "SELECT count(*), count(*) FILTER (status = 'ok'), count(*) FILTER (reused_from IS NOT NULL), "
        "coalesce(sum(prompt_tokens) FILTER (status = 'ok'), 0), "
        "coalesce(sum(completion_tokens) FILTER (status = 'ok'), 0) FROM completions"
    ).fetchone()
    assert row is not None
    return dict(zip(("rows", "ok", "reused", "prompt_tokens", "completion_tokens"), map(int, row), strict=True))


def _effort(
    connection: duckdb.DuckDBPyConnection, build: BuildPaths, shards: Sequence[str] | None
) -> dict[str, Any] | None:
    """Of all shards together, and the table shard_effort; None where no file tells."""
    there = sorted((build.root / "completions").glob("shard-*.parquet"))
    efforts = read_efforts(path for path in there if shards is None or path.stem in shards)
    connection.execute(
        "CREATE TEMP TABLE shard_effort AS SELECT unnest($1::VARCHAR[]) AS shard, unnest($2::BIGINT[]) AS cut_at_stop, "
        "unnest($3::BIGINT[]) AS degenerate, unnest($4::BIGINT[]) AS faults",
        [
            list(efforts),
            [effort.cut_at_stop for effort in efforts.values()],
            [effort.degenerate.total() for effort in efforts.values()],
            [effort.faults.total() for effort in efforts.values()],
        ],
    )
    return total(efforts.values()).as_dict() if efforts else None


def _reused(connection: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """Ok rows by the build that made them, this one left out."""
    rows = connection.execute(
        "SELECT reused_from, count(*) FROM completions WHERE status = 'ok' AND reused_from IS NOT NULL "
        "GROUP BY reused_from ORDER BY 2 DESC, 1"
    ).fetchall()
    return {str(source): int(count) for source, count in rows}


def _failures(connection: duckdb.DuckDBPyConnection) -> dict[str, int]:
    rows = connection.execute(
        "SELECT reason, count(*) FROM completions WHERE status = 'failed' GROUP BY reason ORDER BY 2 DESC, 1"
    ).fetchall()
    return {str(reason): int(count) for reason, count in rows}
