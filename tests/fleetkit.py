"""What tests with a real fleet process share: a fleet that hurries, and that is gone at the end of a test.

The fixtures are for a test file to import; `hurried` then goes for each of its tests.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from shardmill import runlock
from shardmill.files import read_json
from shardmill.fleet.timing import VARIABLE
from shardmill.home import Home, fleets
from shardmill.paths import BuildPaths
from shardmill.settings import Settings, resolve

HURRIED = {
    "tick_s": 0.1,
    "state_s": 0.3,
    "endpoints_s": 0.2,
    "health_every_s": 0.5,
    "health_timeout_s": 2.0,
    "probe_timeout_s": 2.0,
    "quiet_s": 1.0,
    "start_deadline_s": 60.0,
    "starts": 3,
    "backoff_s": 0.1,
    "backoff_most_s": 1.0,
    "drain_s": 3.0,
    "grace_s": 3.0,
    "linger_s": 1.0,
    "leave_s": 3.0,
    "orphan_s": 10.0,  # a machine in use takes seconds to start a fleet
    "verdict_s": 3.0,
}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def hurry(monkeypatch: pytest.MonkeyPatch, **changes: float) -> None:
    """For fleets started from now on."""
    monkeypatch.setenv(VARIABLE, orjson.dumps({**HURRIED, **changes}).decode())


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Path]:
    """A results folder; every fleet in it, and every server of theirs, is gone at the end of the test."""
    folder = tmp_path / "results"
    yield folder
    for lock in fleets(str(folder)).glob("*/lock"):
        who = runlock.holder(lock)
        if who:
            os.kill(who["pid"], signal.SIGKILL)
    for record in fleets(str(folder)).glob("*/servers/*.json"):
        if runlock.holder(record.with_suffix(".lock")) is not None and "guardian" in (found := read_json(record)):
            os.kill(found["guardian"], signal.SIGKILL)


def settings_of(results: Path, *urls: str, **changes: Any) -> Settings:
    """Simulated SGLang servers at `urls`; without any, the embedded server."""
    config: dict[str, Any] = {
        "results": str(results),
        "model": {"context": 2048},
        "prompts": {"max_prompt_tokens": 1000},
        "servers": {"engine": "sglang", "endpoints": list(urls)} if urls else {"engine": "llamacpp"},
        "generate": {"patience_s": 2.0, "concurrency": 4},
    }
    for section, values in changes.items():
        config[section] = {**config[section], **values}
    return resolve(config)


def build_of(results: Path) -> BuildPaths:
    return BuildPaths(results / "sample-0123456789")


def state(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = read_json(Home.of(settings).state)
    return found


async def until(holds: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        await asyncio.sleep(0.05)


def fleet_pid(settings: Settings) -> int:
    """0 while there is none."""
    return int((runlock.holder(Home.of(settings).lock) or {}).get("pid", 0))


def server_state(settings: Settings, index: int = 0) -> str:
    try:
        return str(state(settings)["servers"][index]["state"])
    except (OSError, IndexError):
        return ""
