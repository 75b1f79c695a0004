"""How accept length, rate and memory of each server move over the hours, and which of them drifts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median, quantiles
from typing import Any

from shardmill.status.model import Point, Trend
from shardmill.status.rows import BIN_S, Work

_DRAWN = 60  # points of a curve at most
_LEAST_POINTS = 8  # below this a curve says nothing about drift
_LEAST_S = 1800.0
_FULL = 0.8  # of the usual load: a rate at less of it is no measure of the server
_ACCEPT_FALL = 0.10
_RATE_FALL = 0.20
_MEMORY_RISE = 0.15
_MEMORY_BYTES = 1 << 28


def from_history(samples: Sequence[Mapping[str, Any]]) -> list[Trend]:
    """Of the fleet's own samples (fleet/history.py)."""
    trends: list[Trend | None] = []
    for name in sorted({name for sample in samples for name in sample["servers"]}):
        seen = [(float(sample["at"]), sample["servers"][name]) for sample in samples if name in sample["servers"]]
        trends += [
            _trend("accept length", name, _series(seen, "accept_length")),
            _trend("tokens/s", name, _series(_at_full_load(seen), "tokens_per_s")),
            _trend("memory", name, _series(seen, "resident_bytes")),
        ]
    return _sorted(trends)


def from_rows(curves: Mapping[str, Mapping[float, Work]]) -> list[Trend]:
    """Of finished rows (rows.curves), where no fleet has left samples.

    Rates are shown and never warned of: rows don't say how much work the server had.
    """
    trends: list[Trend | None] = []
    for name, bins in sorted(curves.items()):
        accept = [(at, done.accept_length) for at, done in sorted(bins.items()) if done.accept_length is not None]
        rate = [(at, done.tokens / BIN_S) for at, done in sorted(bins.items())][1:-1]  # the ends are parts of a bin
        trends += [_trend("accept length", name, accept), _trend("tokens/s", name, rate, may_warn=False)]
    return _sorted(trends)


def _sorted(trends: Sequence[Trend | None]) -> list[Trend]:
    return sorted((trend for trend in trends if trend is not None), key=lambda trend: (trend.what, trend.server))


def _series(seen: Sequence[tuple[float, Mapping[str, Any]]], figure: str) -> list[tuple[float, float]]:
    return [(at, float(figures[figure])) for at, figures in seen if figures.get(figure) is not None]


def _at_full_load(seen: list[tuple[float, Mapping[str, Any]]]) -> list[tuple[float, Mapping[str, Any]]]:
    loads = [figures["running"] for _, figures in seen if figures.get("running")]
    if len(loads) < 2:
        return []
    usual = quantiles(loads, n=10)[-1]
    return [(at, figures) for at, figures in seen if (figures.get("running") or 0) >= _FULL * usual]


def _trend(what: str, server: str, series: Sequence[tuple[float, float]], may_warn: bool = True) -> Trend | None:
    if len(series) < 2:
        return None
    quarter = max(1, len(series) // 4)
    first = median(value for _, value in series[:quarter])
    last = median(value for _, value in series[-quarter:])
    if first <= 0:
        return None
    change = last / first - 1
    long_enough = len(series) >= _LEAST_POINTS and series[-1][0] - series[0][0] >= _LEAST_S
    warning = _warning(what, server, first, last, change) if may_warn and long_enough else None
    return Trend(what, server, _drawn(series), first, last, change, warning)


def _warning(what: str, server: str, first: float, last: float, change: float) -> str | None:
    if what == "memory":
        if change < _MEMORY_RISE or last - first < _MEMORY_BYTES:
            return None
        return f"{server} takes {last / (1 << 30):.1f} GiB, {change:.0%} more than at first: it may leak"
    if change > -(_ACCEPT_FALL if what == "accept length" else _RATE_FALL):
        return None
    digits = 2 if what == "accept length" else 0
    return f"{what} of {server} fell from {first:.{digits}f} to {last:.{digits}f} ({change:+.0%})"


def _drawn(series: Sequence[tuple[float, float]]) -> tuple[Point, ...]:
    size = -(-len(series) // _DRAWN)
    parts = [series[start : start + size] for start in range(0, len(series), size)]
    return tuple(Point(fmean(at for at, _ in part), fmean(value for _, value in part)) for part in parts)
