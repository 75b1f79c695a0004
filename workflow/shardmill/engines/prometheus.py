"""Gauges out of a Prometheus text exposition, the little of the format that servers' metrics need."""

from __future__ import annotations

import math


def total(text: str, name: str) -> float | None:
    """The sum of a gauge over its label sets; None when it isn't there.

    `text` is a /metrics body: `name{labels} value [timestamp]` a line.
    """
    values = _values(text, name)
    return math.fsum(values) if values else None


def mean(text: str, *names: str) -> float | None:
    """The mean over its label sets of the first gauge of `names` that is there."""
    for name in names:
        values = _values(text, name)
        if values:
            return math.fsum(values) / len(values)
    return None


def _values(text: str, name: str) -> list[float]:
    return [value for line in text.splitlines() if (value := _value(line, name)) is not None]


def _value(line: str, name: str) -> float | None:
    if not line.startswith(name):
        return None
    rest = line[len(name) :]
    if rest.startswith("{"):
        rest = rest[rest.rfind("}") + 1 :]
    elif not rest.startswith((" ", "\t")):
        return None  # a longer name
    fields = rest.split()
    try:
        value = float(fields[0]) if fields else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None
