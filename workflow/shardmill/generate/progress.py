"""What a job has done so far: counted as it happens, written for `status`, said in a line now and then.

Counts of rows come from the journal, so that they are right after any kill. Faults, degenerate answers and working time
go on from the progress file of the earlier run, and lose at most its last few seconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardmill.effort import Effort
from shardmill.engines import Answer, Fault
from shardmill.errors import ShardmillError
from shardmill.files import read_json, write_json
from shardmill.generate.audit import Degenerate, Kept
from shardmill.generate.reasons import FailReason
from shardmill.generate.rows import Completion

_WINDOW_S = 60.0  # over which the rate is taken


class Tally:
    """Counts of one job. `progress` is the file for `status`, `line` what a person reads in the log."""

    def __init__(self, shard: str, prompts: int, path: Path) -> None:
        self.shard = shard
        self._prompts = prompts
        self._path = path
        self._writing = threading.Lock()
        self._ended = False
        self._started = time.monotonic()
        self._started_at = time.time()
        self.ok = 0
        self.failed: Counter[str] = Counter()
        self.reused = 0
        self.not_reached = 0
        self.in_flight = 0
        self.stuck = 0  # prompts set aside after nothing but server faults
        self._tokens = 0
        self._attempts = 0
        self._cut = 0
        self._accept_sum = 0.0
        self._accept_tokens = 0
        self._faults: Counter[str] = Counter()
        self._degenerate: Counter[str] = Counter()
        self._by_server: dict[str, Counter[str]] = {}
        self._recent: deque[tuple[float, int, int]] = deque([(self._started, 0, 0)])
        self._kept_now = 0  # rows and tokens since the start of this process
        self._tokens_now = 0
        self._starts = 1
        self._seconds_before = 0.0
        self._carry_on()

    def earlier(self, effort: Effort) -> None:
        """What a file of this shard took that `retry` took apart. The progress file, where it is left, has it too."""
        self._cut += effort.cut_at_stop
        self._faults |= effort.faults
        self._degenerate |= effort.degenerate

    @property
    def done(self) -> int:
        return self.ok + self.failed.total()

    def restored(self, record: dict[str, Any]) -> None:
        """A row that the journal already has."""
        self._attempts += 0 if record["reused_from"] else record["attempts"]
        self._cut += record.get("cut", False)
        if record["reason"] is None:
            self.ok += 1
            self.reused += record["reused_from"] is not None
            self._add_tokens(len(record["output_ids"]), record["accept_length"])
        else:
            self.failed[record["reason"]] += 1

    @contextmanager
    def flying(self) -> Iterator[None]:
        """While one request is with a server."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def answered(self, server: str, kept: Kept, answer: Answer) -> None:
        tokens = len(kept.output_ids)
        self.ok += 1
        self._attempts += 1
        self._cut += kept.cut
        self._kept_now += 1
        self._tokens_now += tokens
        self._add_tokens(tokens, answer.accept_length)
        self._server(server)["ok"] += 1

    def reuse(self, completion: Completion) -> None:
        """A row that another build had. It counts with its tokens, and not into the rates."""
        self.ok += 1
        self.reused += 1
        self._add_tokens(len(completion.output_ids), completion.accept_length)

    def degenerate(self, server: str, kind: Degenerate, attempt: bool) -> None:
        """`attempt`: it counts as one of the prompt's, the server being well."""
        self._attempts += attempt
        self._degenerate[kind.value] += 1
        self._server(server)["degenerate"] += 1

    def fault(self, server: str, fault: Fault) -> None:
        self._faults[fault.value] += 1
        self._server(server)["faults"] += 1

    def fail(self, reason: FailReason) -> None:
        self.failed[reason.value] += 1
        self._kept_now += 1

    def progress(self, state: str) -> dict[str, Any]:
        """`state`: running | done | stopped. Rates are over the last minute, `seconds` over all starts."""
        now = time.monotonic()
        self._recent.append((now, self._kept_now, self._tokens_now))
        while len(self._recent) > 2 and now - self._recent[1][0] > _WINDOW_S:
            self._recent.popleft()
        since, rows, tokens = self._recent[0]
        span = max(now - since, 1e-3)
        return {
            "shard": self.shard,
            "state": state,
            "pid": os.getpid(),
            "started_at": self._started_at,
            "updated_at": time.time(),
            "starts": self._starts,
            "seconds": round(self._seconds_before + now - self._started, 3),
            "prompts": self._prompts,
            "done": self.done,
            "ok": self.ok,
            "reused": self.reused,
            "failed": dict(self.failed),
            "not_reached": self.not_reached,
            "in_flight": self.in_flight,
            "stuck": self.stuck,
            "waiting": self._prompts - self.done - self.not_reached - self.in_flight - self.stuck,
            "attempts": self._attempts,
            **self.effort().as_dict(),
            "tokens": self._tokens,
            "rows_per_s": round((self._kept_now - rows) / span, 3),
            "tokens_per_s": round((self._tokens_now - tokens) / span, 1),
            "accept_length": self._accept_mean(),
            "servers": {name: dict(counts) for name, counts in sorted(self._by_server.items())},
        }

    def effort(self) -> Effort:
        return Effort(self._cut, self._degenerate, self._faults)

    def write(self, progress: dict[str, Any]) -> None:
        """What `progress` gave, to the file. May run in another thread; after a job's last words nothing is written."""
        try:
            with self._writing:
                if self._ended:
                    return
                self._ended = progress["state"] != "running"
                write_json(self._path, progress)
        except OSError as error:
            raise ShardmillError(
                f"{self._path} cannot be written ({error.strerror}): free some space, and run again. Rows are kept."
            ) from error

    def _add_tokens(self, tokens: int, accept_length: float | None) -> None:
        self._tokens += tokens
        if accept_length is not None:
            self._accept_sum += accept_length * tokens
            self._accept_tokens += tokens

    def _accept_mean(self) -> float | None:
        """Over kept answers, weighted by their tokens."""
        return round(self._accept_sum / self._accept_tokens, 4) if self._accept_tokens else None

    def _server(self, name: str) -> Counter[str]:
        return self._by_server.setdefault(name, Counter())

    def _carry_on(self) -> None:
        try:
            earlier = read_json(self._path)
        except (FileNotFoundError, ValueError):
            return
        self._starts = int(earlier["starts"]) + 1
        self._seconds_before = float(earlier["seconds"])
        self._faults.update(earlier["faults"])
        self._degenerate.update(earlier["degenerate"])
        for name, counts in earlier["servers"].items():
            self._server(name).update(counts)


def line(progress: dict[str, Any]) -> str:
    """One line for a person."""
    failed = sum(progress["failed"].values())
    reused = progress["reused"]
    parts = [f"{progress['shard']}: {progress['done']} of {progress['prompts']} done"]
    if reused:
        parts.append(f"{reused} of them from other builds")
    if failed:
        parts.append(f"{failed} failed ({', '.join(f'{n} {reason}' for reason, n in progress['failed'].items())})")
    if progress["not_reached"]:
        parts.append(f"{progress['not_reached']} turns not reached")
    if progress["stuck"]:
        parts.append(f"{progress['stuck']} set aside")
    if progress["state"] == "running":
        parts.append(f"{progress['in_flight']} in flight")
        parts.append(f"{progress['tokens_per_s']:.0f} tokens/s")
    else:
        parts.append(f"{progress['tokens']} tokens in {progress['seconds']:.0f} s")
    if progress["accept_length"] is not None:
        parts.append(f"accept length {progress['accept_length']:.2f}")
    if progress["cut_at_stop"]:
        parts.append(f"{progress['cut_at_stop']} cut at the stop id")
    faults = sum(progress["faults"].values())
    if faults:
        parts.append(f"{faults} server faults ({', '.join(f'{n} {kind}' for kind, n in progress['faults'].items())})")
    return ", ".join(parts)
