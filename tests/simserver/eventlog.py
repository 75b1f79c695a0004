"""A server's own log: what it was asked and what it sent, so that a test can count what was done twice.

One JSON object a line, each written by one unbuffered write, so that none is lost when the server kills itself:

    {"event": "start", "t", "pid", "port", "start"}          start numbers count from 1 over the file
    {"event": "ready" | "stop" | "refuse" | "outage" | "hang" | "die" | "crash" | "back", "t"}
    {"event": "refused", "t", "status"}                      a request that is wrong in itself
    {"event": "received", "t", "n", "rid", "prompt", "prompt_tokens", "max_new_tokens", "ready", "fault"}
    {"event": "done", "t", "t0", "n", "rid", "prompt", "status", "tokens", "outcome", "fault"}

`n` counts a process's generation requests from 1; `prompt` is answers.prompt_hash; times are Unix seconds. `status` is
0 where no status line was sent. `outcome`: answered (whole and right), spoilt (by `fault`), refused (an error answer),
aborted (by /abort_request), gone (the client left first), lost (the server went down), broken (reset or cut by a
fault). A request without a "done" was in flight when the server died.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import orjson


class EventLog:
    def __init__(self, path: str | None) -> None:
        self.recent: deque[dict[str, Any]] = deque(maxlen=10_000)
        self.outcomes: Counter[str] = Counter()
        self._fd: int | None = None
        self.start = 1
        if path is not None:
            file = Path(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.exists():
                self.start += file.read_bytes().count(b'{"event":"start"')
            self._fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: str, **fields: Any) -> None:
        line = {"event": event, "t": time.time(), **fields}
        self.recent.append(line)
        if event == "done":
            self.outcomes[fields["outcome"]] += 1
        if self._fd is not None:
            os.write(self._fd, orjson.dumps(line) + b"\n")


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The whole lines of a log; a line that is being written is left out."""
    file = Path(path)
    if not file.exists():
        return []
    lines = file.read_bytes().split(b"\n")[:-1]
    return [orjson.loads(line) for line in lines]
