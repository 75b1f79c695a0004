"""A run's life as a user sees it: servers come with it and go with it, however it ends, and the next run goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from simserver import SimFleet, prompt_hash
from workspace import Workspace

SLOW = {"length_mean": 120, "time_scale": 2.0, "mamba_slots": None, "max_running_requests": 8}


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds} s: {what}"
        time.sleep(0.2)


def processes_of(workspace: Workspace) -> list[str]:
    """Command lines of every process that works in or for this workspace."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            if str(workspace.root) in line or process.cwd() == str(workspace.root):
                found.append(line)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def journal_lines(workspace: Workspace) -> int:
    journals = (workspace.root / "results").glob("*/run/journals/*.jsonl")
    return sum(journal.read_bytes().count(b"\n") for journal in journals)


def rows(workspace: Workspace) -> list[tuple[str, int]]:
    tables = [pq.read_table(path) for path in sorted(workspace.results.glob("completions/shard-*"))]
    return [(row["conversation_id"], row["turn"]) for table in tables for row in table.to_pylist()]


def prompts(workspace: Workspace) -> list[list[int]]:
    tables = [pq.read_table(path, columns=["prompt_ids"]) for path in sorted(workspace.results.glob("completions/*"))]
    return [ids for table in tables for ids in table["prompt_ids"].to_pylist()]


def embedded(tmp_path: Path) -> Workspace:
    return Workspace(
        tmp_path,
        {
            "prompts": {"limit": 12, "shards": 2},
            "sampling": {"max_new_tokens": 24},
            "quality": {"override": ["all"]},
        },
    )


@pytest.mark.parametrize("end", ["kill -9", "Ctrl-C", "SIGTERM"])
def test_the_embedded_server_leaves_with_its_run(tmp_path: Path, end: str) -> None:
    workspace = embedded(tmp_path)
    run = workspace.start()
    wait_for(lambda: journal_lines(workspace) > 0, 120, "a first row")
    assert any("shardmill.servers.embedded" in line for line in processes_of(workspace))
    if end == "kill -9":
        run.kill()
    elif end == "Ctrl-C":
        os.killpg(run.pid, signal.SIGINT)
    else:
        run.terminate()
    run.wait(timeout=90)
    wait_for(lambda: not processes_of(workspace), 60, "all processes gone")
    if end != "SIGTERM":  # which lets running jobs end first
        # The next run goes on, and leaves nothing either.
        assert workspace.build()["generate"] >= 1
        wait_for(lambda: not processes_of(workspace), 60, "all processes gone after the second run")
    assert len(rows(workspace)) == len(set(rows(workspace))) > 0
    if end != "kill -9":
        return
    assert len(rows(workspace)) == 12
    # One with nothing to generate starts no server.
    state = next((workspace.root / "results" / ".fleet").glob("*/state.json"))
    before = state.read_bytes()
    for path in workspace.results.glob("tokens/*"):
        path.unlink()
    assert "generate" not in workspace.build()
    assert processes_of(workspace) == [] and state.read_bytes() == before


def test_a_second_run_is_refused_and_told_who_holds_the_build(tmp_path: Path) -> None:
    with SimFleet(1, SLOW) as fleet:
        workspace = Workspace(tmp_path, {"servers": {"engine": "sglang", "endpoints": fleet.urls}})
        run = workspace.start()
        wait_for(lambda: journal_lines(workspace) > 0, 60, "a first row")
        second = workspace.snakemake(expect=1)
        assert f"pid {run.pid}" in second.stderr and "Traceback" not in second.stderr
        assert run.poll() is None
        run.kill()
        run.wait()
        wait_for(lambda: not processes_of(workspace), 60, "all processes gone")


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """Every prompt exactly once, and what the server answered twice is no more than what was in flight at the kill."""
    with SimFleet(1, SLOW) as fleet:
        workspace = Workspace(
            tmp_path,
            {
                "prompts": {"limit": 40, "shards": 2},
                "servers": {"engine": "sglang", "endpoints": fleet.urls},
                "quality": {"override": ["all"]},
            },
        )
        for already in (1, 15):
            run = workspace.start()
            wait_for(lambda already=already: journal_lines(workspace) > already, 60, "more rows")  # type: ignore[misc]
            run.kill()
            run.wait()
        workspace.build()
        assert len(rows(workspace)) == len(set(rows(workspace))) == 40
        times_answered = fleet.answered()
        asked = [times_answered[prompt_hash(ids)] for ids in prompts(workspace)]
        assert min(asked) >= 1
        assert sum(asked) - len(asked) <= 2 * 8
        wait_for(lambda: not processes_of(workspace), 60, "all processes gone")
