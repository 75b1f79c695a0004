"""What a server's answers say about it: is it well, or does it fail, or has it gone bad?

A pure account over the outcomes that jobs report, for one start of one server. Recent answers decide, never averages
over its whole life: a server that was good for ten hours goes bad within minutes (facts: SGLang #36537, #28771).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from shardmill.engines.base import Fault

FAULTS_IN_A_ROW = 3
_RECENT = 16
_BASELINE = 64
_DEGENERATE = 6  # of the recent answers; a healthy model repeats itself endlessly in far fewer
_ACCEPT_FLOOR = 1.2  # 1.0 is every drafted token refused
_ACCEPT_FALL = 0.5  # of what this server had at its start

# Nothing listens any more: one is enough.
_GONE = frozenset({Fault.REFUSED})
# The queue's length says nothing about a server's health.
_BUSY = frozenset({Fault.QUEUE_FULL})


@dataclass(slots=True)
class Record:
    """Outcomes of one start of a server. Times are seconds on the caller's monotonic clock."""

    since: float
    answers: int = 0
    tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    in_a_row: int = 0
    last_answer: float = 0.0
    last_fault: str = ""
    _degenerate: deque[bool] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _accept: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _first_accept: list[tuple[float, int]] = field(default_factory=list)
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def __post_init__(self) -> None:
        self.last_answer = self.since

    def answered(self, now: float, seconds: float, tokens: int, accept_length: float | None, degenerate: bool) -> None:
        """An answer came. `tokens`: ids in it; 0 for a prompt that was refused, which says nothing about quality."""
        self.answers += 1
        self.tokens += tokens
        self.in_a_row = 0
        self.last_answer = now
        self._seconds.append(seconds)
        if tokens == 0 and not degenerate:
            return
        self._degenerate.append(degenerate)
        if accept_length is not None and tokens > 1:
            self._accept.append((accept_length, tokens))
            if len(self._first_accept) < _BASELINE:
                self._first_accept.append((accept_length, tokens))

    def failed(self, fault: Fault, detail: str) -> None:
        self.faults[fault.value] += 1
        if fault not in _BUSY:
            self.in_a_row += 1
            self.last_fault = f"{fault.value}: {detail}" if detail else fault.value
        if fault in _GONE:
            self.in_a_row = max(self.in_a_row, FAULTS_IN_A_ROW)

    @property
    def suspect(self) -> bool:
        """Several faults in a row, with no answer between them."""
        return self.in_a_row >= FAULTS_IN_A_ROW

    @property
    def accept_length(self) -> float | None:
        """Mean of the recent answers, weighted by their tokens."""
        return _mean(self._accept)

    @property
    def bad(self) -> str | None:
        """Why its answers can't be trusted any more; None while they can."""
        repeats = sum(self._degenerate)
        if repeats >= _DEGENERATE:
            return f"{repeats} of its last {len(self._degenerate)} answers repeat themselves endlessly"
        recent, first = self.accept_length, _mean(self._first_accept)
        if recent is None or first is None or len(self._accept) < _RECENT:
            return None
        # A model whose draft never was any good keeps its low value from the start, and is not bad for it.
        fallen = recent < _ACCEPT_FALL * first or (recent < _ACCEPT_FLOOR and first > _ACCEPT_FLOOR + 0.2)
        return f"its accept length fell from {first:.2f} to {recent:.2f}" if fallen else None

    @property
    def slowest(self) -> float:
        """Seconds of the slowest recent answer."""
        return max(self._seconds, default=0.0)


def _mean(values: deque[tuple[float, int]] | list[tuple[float, int]]) -> float | None:
    weight = sum(tokens for _, tokens in values)
    return sum(value * tokens for value, tokens in values) / weight if weight else None
