"""A map over a stream that keeps its order, over several processes when the stream is worth them."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_CHUNK = 64
# Starting workers costs seconds (each loads a tokenizer): a stream this short is done sooner without.
_WORTH_IT = 2048


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[tuple[Item, Result]]:
    """Pairs of item and `function(item)`, in the order of `items`, which may be endless: few are held at a time.

    `function` is pickled once for each worker process.
    """
    stream = iter(items)
    if workers < 2:
        yield from ((item, function(item)) for item in stream)
        return
    head = list(islice(stream, _WORTH_IT))
    yield from ((item, function(item)) for item in head)
    if len(head) < _WORTH_IT:
        return
    yield from _in_processes(function, stream, workers)


def _in_processes(
    function: Callable[[Item], Result], stream: Iterator[Item], workers: int
) -> Iterator[tuple[Item, Result]]:
    context = multiprocessing.get_context("spawn")
    pending: deque[tuple[list[Item], Future[list[Result]]]] = deque()
    with ProcessPoolExecutor(workers, context, initializer=_keep, initargs=(function,)) as pool:
        while True:
            while len(pending) < 3 * workers and (chunk := list(islice(stream, _CHUNK))):
                pending.append((chunk, pool.submit(_apply, chunk)))
            if not pending:
                return
            chunk, future = pending.popleft()
            yield from zip(chunk, future.result(), strict=True)


_function: Callable[..., object]


def _keep(function: Callable[..., object]) -> None:
    global _function
    _function = function


def _apply(chunk: list[Item]) -> list[Result]:
    return [_function(item) for item in chunk]  # type: ignore[misc]
