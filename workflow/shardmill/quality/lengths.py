"""Length distributions for the report: counted while the checks' tables are there, so that nothing is read twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb

_BINS = 40


def lengths(connection: duckdb.DuckDBPyConnection) -> dict[str, dict[str, Any]]:
    """Histograms in tokens of prompts, answers and thinking over the ok rows; no thinking where there is none."""
    found = {
        "prompt": _histogram(connection, "prompt_tokens", "true"),
        "answer": _histogram(connection, "completion_tokens", "true"),
        "thinking": _histogram(connection, "thinking_tokens", "thinks"),
    }
    return {name: histogram for name, histogram in found.items() if histogram is not None}


def _histogram(connection: duckdb.DuckDBPyConnection, column: str, where: str) -> dict[str, Any] | None:
    """{"width", "counts", "mean", "p50", "p95", "max"}: bin i holds [i*width, (i+1)*width), the last all above."""
    row = connection.execute(
        f"SELECT count(*), avg({column}), quantile_cont({column}, 0.5), quantile_cont({column}, 0.95), "
        f"quantile_cont({column}, 0.995), max({column}) FROM answers WHERE {where}"
    ).fetchone()
    assert row is not None
    count, mean, median, p95, reach, most = row
    if not count:
        return None
    width = _nice_width(float(reach))
    counted = connection.execute(
        f"SELECT least({column} // {width}, {_BINS}), count(*) FROM answers WHERE {where} GROUP BY 1"
    ).fetchall()
    bins = [0] * (_BINS + 1)
    for index, rows in counted:
        bins[int(index)] = int(rows)
    while len(bins) > 1 and bins[-1] == 0:
        bins.pop()
    return {"width": width, "counts": bins, "mean": mean, "p50": median, "p95": p95, "max": int(most)}


def _nice_width(reach: float) -> int:
    """The smallest 1, 2 or 5 times a power of ten with which the bins cover `reach`."""
    width = 1
    while True:
        for factor in (1, 2, 5):
            if factor * width * _BINS > reach:
                return factor * width
        width *= 10
