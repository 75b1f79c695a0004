"""Loops anywhere in an answer, for SQL: a function over lists of ids that costs about a comparison an id.

An answer loops when, for a period p, ids[i] = ids[i - p] holds for so many i in a row:
128 with p up to 32, 512 with p up to 128, 2,048 with p up to 512. That is five repeats or more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterator

    import duckdb

Ids = npt.NDArray[np.int32]

# A run of so many steps' length holds this many places of any grid of that step: the places are looked at first.
_PLACES = 4
_GRIDS = ((32, range(1, 33)), (128, range(33, 129)), (512, range(129, 513)))


def register(connection: duckdb.DuckDBPyConnection) -> None:
    """Makes `loop_at(ids)` known: where the loop with the shortest period begins (from 1), or 0."""
    from duckdb.func import ARROW

    connection.create_function("loop_at", _loop_at, ["INTEGER[]"], "INTEGER", type=ARROW)


def _loop_at(lists: Any) -> Any:
    return pa.array(np.concatenate([_of_chunk(chunk) for chunk in lists.chunks] or [np.zeros(0, np.int32)]))


def _of_chunk(chunk: Any) -> Ids:
    """All lists at once: they lie one after another in memory, and a run over the border of two is none."""
    offsets = chunk.offsets.to_numpy()
    ids = chunk.values.to_numpy()[offsets[0] : offsets[-1]]
    borders = offsets - offsets[0]
    found = np.zeros(len(chunk), np.int32)
    for place, period, least in _suspects(ids):
        row = int(np.searchsorted(borders, place, side="right")) - 1
        if not found[row]:
            answer = ids[borders[row] : borders[row + 1]]
            found[row] = _loop_around(answer, place - int(borders[row]), period, least)
    return found


def _suspects(ids: Ids) -> Iterator[tuple[int, int, int]]:
    """Places, with a period and the length of a run, from which the next places of the grid repeat as well."""
    for step, periods in _GRIDS:
        # A row a place within the step, so that what is compared lies together in memory.
        grid = np.full(-(-len(ids) // step) * step, -1, np.int32)
        grid[: len(ids)] = ids
        grid = np.ascontiguousarray(grid.reshape(-1, step).T)
        for period in periods:
            equal = grid[period] == grid[0] if period < step else grid[0, 1:] == grid[0, :-1]
            starts = len(equal) - _PLACES + 1
            if starts < 1:
                continue
            together = equal[:starts].copy()
            for later in range(1, _PLACES):
                together &= equal[later : later + starts]
            for index in np.flatnonzero(together):
                yield period + int(index) * step, period, _PLACES * step


def _loop_around(answer: Ids, place: int, period: int, least: int) -> int:
    """Where the loop begins (from 1) whose run holds `place`, or 0 when that run is shorter than `least`."""
    if place < period:
        return 0  # it repeats ids of the answer before
    differs = np.flatnonzero(answer[period:] != answer[:-period])
    after = int(np.searchsorted(differs, place - period))
    begin = int(differs[after - 1]) + 1 if after else 0
    end = int(differs[after]) if after < len(differs) else len(answer) - period
    return begin + 1 if end - begin >= least else 0
