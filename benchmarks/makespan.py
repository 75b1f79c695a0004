"""How full the fleet is kept: the known run, simulated on a scaled clock, against one shard per GPU at a time.

    python benchmarks/makespan.py                     140,000 answers in 10 s
    python benchmarks/makespan.py --shards 1828       the whole run, in a minute

Seven servers run 16 requests at once, at the speed of tests/simserver's model (a decode step takes 20 ms and 0.6 ms a
running request, and yields 2.7 tokens for each), which is the known run's 914,000 answers of 1,814 tokens in 45 hours.
Lengths are lognormal with a tail to 8,192. What decides who gets which server is the program's own pool
(shardmill/fleet/pool.py); only servers, jobs and the clock are simulated. Both ways get the same prompts.

"of ideal" is tokens made over what the servers can make when all their slots are full, from the first moment when they
are (ramp-up excepted) to the last moment when a prompt still waits (the last answers excepted). "with both ends" is
the whole makespan. Exit code 1 when the pool is under 99 % of ideal.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardmill.fleet.pool import Ask, Pool

SERVERS = 7
CAP = 16
ROWS = 500
MEAN = 1814.0
SIGMA = 0.75
LONGEST = 8192
STEP_S = 0.020
STEP_EACH_S = 0.0006
ACCEPTED = 2.7


def speed(running: int) -> float:
    """Tokens a second of each of `running` requests."""
    return ACCEPTED / (STEP_S + STEP_EACH_S * running)


FULL_RATE = SERVERS * CAP * speed(CAP)


def lengths(count: int, chooser: random.Random) -> list[int]:
    """Lognormal, cut at LONGEST, scaled so that the mean after cutting is MEAN."""
    drawn = [math.exp(chooser.gauss(0.0, SIGMA)) for _ in range(count)]
    scale = MEAN / (sum(drawn) / count)
    for _ in range(5):
        cut = [min(LONGEST, max(1, round(value * scale))) for value in drawn]
        scale *= MEAN / (sum(cut) / count)
    return cut


@dataclass
class Server:
    """Requests share a server's speed; those over CAP wait in its queue. Progress is kept as tokens each has made since
    the server began, so that an event costs no more than a heap operation."""

    made_each: float = 0.0
    moment: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)  # made_each at the end of it, prompt
    queue: deque[tuple[int, int]] = field(default_factory=deque)  # prompt, length
    made: float = 0.0
    generation: int = 0

    def advance(self, now: float) -> None:
        step = speed(len(self.running)) * (now - self.moment) if self.running else 0.0
        self.made_each += step
        self.made += step * len(self.running)
        self.moment = now

    def take(self, prompt: int, length: int) -> None:
        self.queue.append((prompt, length))
        self._fill()

    def finish(self) -> int:
        prompt = heapq.heappop(self.running)[1]
        self._fill()
        return prompt

    def _fill(self) -> None:
        while self.queue and len(self.running) < CAP:
            prompt, length = self.queue.popleft()
            heapq.heappush(self.running, (self.made_each + length, prompt))
        self.generation += 1

    def next_end(self) -> float | None:
        """When its next answer is whole, if nothing comes in between."""
        if not self.running:
            return None
        return self.moment + max(0.0, self.running[0][0] - self.made_each) / speed(len(self.running))


@dataclass(frozen=True)
class Result:
    makespan_s: float
    full_from_s: float
    full_to_s: float
    made_between: float
    tokens: int

    @property
    def of_ideal(self) -> float:
        return self.made_between / (FULL_RATE * (self.full_to_s - self.full_from_s))

    @property
    def with_both_ends(self) -> float:
        return self.tokens / FULL_RATE / self.makespan_s


@dataclass
class Simulation:
    """Events on one clock: an answer ends at a server, a request arrives there, a job starts."""

    prompts: list[int]  # lengths
    now: float = 0.0
    servers: list[Server] = field(default_factory=lambda: [Server() for _ in range(SERVERS)])
    full_from: float | None = None
    made_at_full: float = 0.0
    waits_until: float = 0.0
    made_at_last_wait: float = 0.0
    _events: list[tuple[float, int, str, int, int]] = field(default_factory=list)
    _count: int = 0

    def at(self, moment: float, kind: str, where: int, what: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (moment, self._count, kind, where, what))

    def events(self) -> Iterator[tuple[str, int, int]]:
        while self._events:
            moment, _, kind, where, what = heapq.heappop(self._events)
            if kind == "end":
                server = self.servers[where]
                if what != server.generation:
                    continue  # something came in between, and another end was set
                self.now = moment
                server.advance(moment)
                prompt = server.finish()
                self._set_end(where)
                yield "end", where, prompt
            elif kind == "arrive":
                self.now = moment
                server = self.servers[where]
                server.advance(moment)
                server.take(what, self.prompts[what])
                self._set_end(where)
                if self.full_from is None and all(len(server.running) == CAP for server in self.servers):
                    self.full_from, self.made_at_full = moment, self._made()
            else:
                self.now = moment
                yield kind, where, what

    def note_waiting(self) -> None:
        """Called while prompts wait that no server has."""
        self.waits_until, self.made_at_last_wait = self.now, self._made()

    def result(self) -> Result:
        assert self.full_from is not None
        made = self.made_at_last_wait - self.made_at_full
        return Result(self.now, self.full_from, self.waits_until, made, sum(self.prompts))

    def _set_end(self, where: int) -> None:
        end = self.servers[where].next_end()
        if end is not None:
            self.at(end, "end", where, self.servers[where].generation)

    def _made(self) -> float:
        for server in self.servers:
            server.advance(self.now)
        return sum(server.made for server in self.servers)


def pooled(prompts: list[int], shards: int, cores: int, turnaround_s: float, job_start_s: float) -> Result:
    """shardmill: `cores` jobs at once, each with a shard, on one pool."""
    run = Simulation(prompts)
    pool = Pool()
    for index in range(SERVERS):
        pool.open(str(index), CAP)
    left = [ROWS] * shards
    next_shard = 0
    where: dict[int, int] = {}

    def give_out() -> None:
        for grant in pool.grants():
            run.at(run.now + turnaround_s, "arrive", int(grant.server), grant.ask.number)
            where[grant.ask.number] = int(grant.server)
        if pool.waiting or next_shard < shards:
            run.note_waiting()

    for _ in range(min(cores, shards)):
        run.at(0.0, "job", 0, next_shard)
        next_shard += 1
    for kind, _, what in run.events():
        if kind == "job":
            for prompt in range(what * ROWS, (what + 1) * ROWS):
                pool.ask(Ask(str(what), prompt, order=what, limit=48))
        else:
            shard = what // ROWS
            pool.release((str(shard), what))
            left[shard] -= 1
            if left[shard] == 0 and next_shard < shards:
                run.at(run.now + job_start_s, "job", 0, next_shard)
                next_shard += 1
        give_out()
    assert not any(left) and pool.waiting == 0
    return run.result()


def shard_per_gpu(prompts: list[int], shards: int, turnaround_s: float, job_start_s: float) -> Result:
    """The seed's way: each GPU does a shard, all of its prompts sent at once, and takes the next when that is done."""
    run = Simulation(prompts)
    left = [ROWS] * shards
    next_shard = 0
    for server in range(min(SERVERS, shards)):
        run.at(0.0, "job", server, next_shard)
        next_shard += 1
    for kind, where, what in run.events():
        if kind == "job":
            for prompt in range(what * ROWS, (what + 1) * ROWS):
                run.at(run.now + turnaround_s, "arrive", where, prompt)
        else:
            shard = what // ROWS
            left[shard] -= 1
            if left[shard] == 0 and next_shard < shards:
                run.at(run.now + job_start_s, "job", where, next_shard)
                next_shard += 1
        if next_shard < shards:
            run.note_waiting()
    assert not any(left)
    return run.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shards", type=int, default=280, help=f"of {ROWS} prompts (default: %(default)s)")
    parser.add_argument("--cores", type=int, default=7, help="jobs at once (default: %(default)s)")
    parser.add_argument(
        "--turnaround-ms", type=float, default=20.0, help="from an answer to the next request's arrival"
    )
    parser.add_argument("--job-start-s", type=float, default=3.0, help="from one job's end to the next one's first ask")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    prompts = lengths(given.shards * ROWS, random.Random(given.seed))
    turnaround_s = given.turnaround_ms / 1000
    pool = pooled(prompts, given.shards, given.cores, turnaround_s, given.job_start_s)
    alone = shard_per_gpu(prompts, given.shards, turnaround_s, given.job_start_s)
    print(
        f"{len(prompts):,} answers, mean {sum(prompts) / len(prompts):,.0f} tokens, longest {max(prompts):,}; "
        f"{SERVERS} servers of {CAP}, {FULL_RATE:,.0f} tokens/s when full"
    )
    print(f"{'':26}{'makespan':>12}{'of ideal':>10}{'with both ends':>16}")
    for name, result in (("shardmill's pool", pool), ("one shard per GPU", alone)):
        print(f"{name:26}{result.makespan_s / 3600:10.2f} h{result.of_ideal:10.2%}{result.with_both_ends:16.2%}")
    print(f"The pool is {alone.makespan_s / pool.makespan_s - 1:.1%} faster.")
    return 0 if pool.of_ideal >= 0.99 else 1


if __name__ == "__main__":
    sys.exit(main())
