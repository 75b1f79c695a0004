"""The timing model: slots, a waiting queue, and a decode speed that depends on the batch, on a scaled clock.

Every running request gains one step per decode step, so one counter of steps done (`_steps`) serves all: a request
ends when the counter reaches the value it had at admission plus the steps that it needs. Admitting a request stops
decoding for the time of its prefill. Between events the counter grows linearly, so the model is exact in simulated
time however late the event loop wakes up.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .config import SimConfig


@dataclass(eq=False)
class Job:
    """One sequence to generate. `done(job)` is called once: when it has ended, or was aborted."""

    prompt_tokens: int
    tokens: int
    accept_length: float
    done: Callable[[Job], None]
    state: str = "new"  # new, queued, running, ended, aborted
    queued_abort: bool = False  # aborted before it ever ran
    produced: int = 0
    queued_at: float = 0.0
    started_at: float = 0.0
    first_step: float = field(default=0.0, repr=False)

    @property
    def steps(self) -> int:
        return max(1, math.ceil(self.tokens / self.accept_length))


class Engine:
    def __init__(self, config: SimConfig, loop: asyncio.AbstractEventLoop) -> None:
        self._config = config
        self._loop = loop
        self._cap = config.effective_max_running
        self._queue: deque[Job] = deque()
        self._heap: list[tuple[float, int, Job]] = []
        self._pushed = 0
        self._steps = 0.0
        self._at = loop.time()
        self._prefill_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.paused = False
        self.running = 0
        self.running_tokens = 0
        self.generated = 0
        self.verify_steps = 0

    @property
    def queued(self) -> int:
        return len(self._queue)

    def step_s(self) -> float:
        """Real seconds of one decode step of the present batch."""
        c = self._config
        return c.scaled(c.step_base_s + c.step_per_request_s * max(self.running, 1))

    def throughput(self, accept_length: float) -> float:
        """Tokens a simulated second, as /server_info and /metrics report it."""
        if not self.running or self.paused:
            return 0.0
        return self.running * accept_length / (self.step_s() * self._config.time_scale)

    def full(self) -> bool:
        limit = self._config.max_queued_requests
        return limit is not None and len(self._queue) >= limit and (self.running >= self._cap or self.paused)

    def submit(self, job: Job) -> None:
        now = self._loop.time()
        job.queued_at = now
        if self._config.instant and not self.paused:
            job.state, job.started_at = "running", now
            self._finish(job, now)
            return
        self._advance(now)
        job.state = "queued"
        self._queue.append(job)
        self._admit(now)
        self._arm()

    def abort(self, job: Job) -> None:
        """Frees the slot or the place in the queue. The job's callback is called with what it had got so far."""
        if job.state not in ("queued", "running"):
            return
        self._advance(self._loop.time())
        if job.state == "queued":
            self._queue.remove(job)
            job.queued_abort = True
        else:
            self.running -= 1
            self.running_tokens -= job.prompt_tokens + job.tokens
            job.produced = min(job.tokens, int((self._steps - job.first_step) * job.accept_length))
            self._count(job)
        job.state = "aborted"
        self._admit(self._loop.time())
        self._arm()
        job.done(job)

    def pause(self) -> None:
        self._advance(self._loop.time())
        self.paused = True
        self._arm()

    def resume(self) -> None:
        self._advance(self._loop.time())
        self.paused = False
        if self._config.instant:
            waiting, self._queue = self._queue, deque()
            for job in waiting:
                self.submit(job)
            return
        self._admit(self._loop.time())
        self._arm()

    def drop_all(self) -> None:
        """What a crash does: every request is gone, and nobody is told."""
        for job in self._queue:
            job.state = "aborted"
        for _, _, job in self._heap:
            job.state = "aborted"
        self._queue.clear()
        self._heap.clear()
        self.running = self.running_tokens = 0
        self._prefill_until = 0.0
        self._arm()

    def _count(self, job: Job) -> None:
        self.generated += job.produced
        self.verify_steps += math.ceil(job.produced / job.accept_length)

    def _finish(self, job: Job, now: float) -> None:
        job.state = "ended"
        job.produced = job.tokens
        self._count(job)
        job.done(job)

    def _admit(self, now: float) -> None:
        c = self._config
        while self._queue and self.running < self._cap and not self.paused:
            job = self._queue.popleft()
            self.running += 1
            self.running_tokens += job.prompt_tokens + job.tokens
            job.state, job.started_at, job.first_step = "running", now, self._steps
            self._prefill_until = max(self._prefill_until, now) + c.scaled(job.prompt_tokens / c.prefill_tokens_per_s)
            self._pushed += 1
            heapq.heappush(self._heap, (self._steps + job.steps, self._pushed, job))

    def _next_end(self) -> float | None:
        """Real time at which the first running request ends, if nothing else happens."""
        while self._heap and self._heap[0][2].state != "running":
            heapq.heappop(self._heap)
        if not self._heap or self.paused:
            return None
        return max(self._at, self._prefill_until) + (self._heap[0][0] - self._steps) * self.step_s()

    def _move_to(self, now: float) -> None:
        if not self.paused and self.running:
            self._steps += max(0.0, now - max(self._at, self._prefill_until)) / self.step_s()
        self._at = max(self._at, now)

    def _advance(self, now: float) -> None:
        """Brings the model up to `now`, each end at its own exact time."""
        while (end := self._next_end()) is not None and end <= now:
            self._move_to(end)
            steps, _, job = heapq.heappop(self._heap)
            self._steps = max(self._steps, steps)
            self.running -= 1
            self.running_tokens -= job.prompt_tokens + job.tokens
            self._admit(end)
            self._finish(job, end)
        self._move_to(now)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        end = self._next_end()
        if end is not None:
            self._timer = self._loop.call_at(end, self._fire)

    def _fire(self) -> None:
        self._timer = None
        # The loop may wake up to a clock tick early; what it was armed for is due.
        self._advance(self._loop.time() + 1e-4)
        self._arm()
