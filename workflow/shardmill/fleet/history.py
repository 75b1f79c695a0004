"""A fleet's figures over the hours: one line a minute in history.jsonl, for trends. Appended to, and cut at the front.

A line is {"at": Unix time, "servers": {name: figures}}, the figures as in state.py.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson

from shardmill.files import write_bytes

EVERY_S = 60.0
_KEPT_BYTES = 4 << 20  # two days of seven servers
_FIGURES = ("running", "kv_use", "mamba_use", "tokens_per_s", "accept_length", "resident_bytes")


class History:
    def __init__(self, path: Path, every_s: float = EVERY_S) -> None:
        self._path = path
        self._every_s = every_s
        self._noted = float("-inf")

    def note(self, state: dict[str, Any]) -> None:
        """Appends what `state` (state.describe) says of the servers, when the last line is old enough.

        Raises OSError on a full disk.
        """
        now = time.monotonic()
        if now - self._noted < self._every_s:
            return
        self._noted = now
        if self._path.exists() and self._path.stat().st_size > _KEPT_BYTES:
            kept = self._path.read_bytes()[-_KEPT_BYTES // 2 :]
            write_bytes(self._path, kept[kept.find(b"\n") + 1 :])
        servers = {server["name"]: {name: server[name] for name in _FIGURES} for server in state["servers"]}
        with self._path.open("ab") as stream:
            stream.write(orjson.dumps({"at": round(time.time(), 1), "servers": servers}) + b"\n")


def read(path: Path, since: float) -> list[dict[str, Any]]:
    """The lines that are not older than `since` (Unix time), oldest first. A half-written line is left out."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    samples = []
    for line in lines:
        try:
            sample = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if sample["at"] >= since:
            samples.append(sample)
    return samples
