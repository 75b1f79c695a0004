"""kill -9 of Snakemake, a job or a server at random moments over a build, until the build is done all the same."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from simserver import SimFleet, prompt_hash
from test_run_lifecycle import journal_lines, processes_of, prompts, rows, wait_for
from workspace import Workspace

SOAK = os.environ.get("SHARDMILL_SOAK") == "1"
# In full: 12 builds with 9 kills each.
SEEDS = range(12) if SOAK else [int(os.environ.get("SHARDMILL_SEED", "1"))]
KILLS, ROWS = (9, 96) if SOAK else (6, 60)
SERVERS, SLOTS = 3, 4
# Slow enough that a kill meets requests in flight; one id a step, so that a prompt takes about two seconds.
SLOW = {"length_mean": 60, "time_scale": 0.7, "mamba_slots": None, "max_running_requests": SLOTS, "kill_delay_s": 0.0}


def a_job(workspace: Workspace, rng: random.Random) -> int | None:
    """The pid of a generate job that is at work."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(workspace.root) and "generate" in process.cmdline():
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return rng.choice(found) if found else None


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_killed_every_prompt_is_answered_once(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    killed = {"snakemake": 0, "job": 0, "server": 0}
    with SimFleet(SERVERS, SLOW) as fleet:
        workspace = Workspace(
            tmp_path,
            {
                "prompts": {"limit": ROWS, "shards": 4},
                "servers": {"engine": "sglang", "endpoints": fleet.urls},
                "generate": {"pilot_shards": 0, "patience_s": 60},
                "quality": {"override": ["all"]},
            },
        )
        run = workspace.start()
        wait_for(lambda: journal_lines(workspace) > 0, 90, "a first row")
        while sum(killed.values()) < KILLS and run.poll() != 0:
            if run.poll() is not None:  # it did all but the shards whose jobs were killed
                run = workspace.start()
            time.sleep(rng.uniform(0.2, 2.0))
            what = rng.choice(["snakemake", "job", "server"])
            if what == "server":
                victim = rng.randrange(SERVERS)
                if fleet.alive(victim):
                    fleet.kill(victim)
                    time.sleep(rng.uniform(0.0, 1.0))
                    fleet.start(victim)
                    killed[what] += 1
            elif what == "snakemake":
                run.kill()
                run.wait()
                killed[what] += 1
                run = workspace.start()
            elif (job := a_job(workspace, rng)) is not None:
                os.kill(job, signal.SIGKILL)
                killed[what] += 1
        run.wait(timeout=600)
        if run.returncode:
            workspace.build()
        assert len(rows(workspace)) == len(set(rows(workspace))) == ROWS
        answered = fleet.answered()
        times = [answered[prompt_hash(ids)] for ids in prompts(workspace)]
        assert min(times) >= 1
        # A kill repeats no more than what was in flight at it: a server's slots for a server, all of them for the rest.
        assert sum(times) - len(times) <= SERVERS * SLOTS * sum(killed.values())
        assert all(row["status"] == "ok" for row in completions(workspace))
        wait_for(lambda: not processes_of(workspace), 90, "all processes gone")


def completions(workspace: Workspace) -> list[dict[str, object]]:
    import pyarrow.parquet as pq

    paths = sorted(workspace.results.glob("completions/*.parquet"))
    return [row for path in paths for row in pq.read_table(path, columns=["status", "reason"]).to_pylist()]
