"""Generate jobs as the workflow starts them, on the real fleet: servers die and come back, jobs share them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetkit import hurried, results
from genkit import completions, conversation_id, expected, make_settings, make_shard, random_prompt
from shardmill import runlock
from shardmill.errors import ShardError
from shardmill.files import read_json, write_json, write_text
from shardmill.fleet.client import Fleet
from shardmill.identity import build_identity
from shardmill.journal import read_records
from shardmill.paths import BuildPaths, shard_name
from shardmill.plan import make_plan
from shardmill.settings import Settings
from shardmill.store.listing import Published
from simserver import SimFleet

SOAK = bool(os.environ.get("SHARDMILL_SOAK"))
CONFIG: dict[str, Any] = {"mtp": True, "length_mean": 40, "time_scale": 4, "mamba_slots": None, "kill_delay_s": 0.1}

__all__ = ["hurried", "results"]  # fixtures


def start(build: BuildPaths, shard: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "shardmill", "step", "--build", str(build.root), "generate", shard],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def finish(job: subprocess.Popen[bytes], code: int = 0, timeout_s: float = 120) -> str:
    _, errors = job.communicate(timeout=timeout_s)
    assert job.returncode == code, errors.decode()
    assert b"Traceback" not in errors
    return errors.decode()


Shards = dict[str, list[list[int]]]


def shards(settings: Settings, results: Path, count: int, prompts: int) -> tuple[BuildPaths, Shards]:
    """A build with `count` shards of `prompts` prompts, as a run leaves it before its generate jobs."""
    by_shard = {
        shard_name(index, count): [random_prompt(1000 * index + number) for number in range(prompts)]
        for index in range(count)
    }
    for shard, asked in by_shard.items():
        build = make_shard(results / "sample-0123456789", settings, asked, shard=shard)
    identity = build_identity(settings, "0" * 64, "0" * 64, None)
    write_json(build.build_json, {**read_json(build.build_json), "identity": identity})
    make_plan(settings, build, Published).save(build.plan)
    return build, by_shard


def assert_right(build: BuildPaths, settings: Settings, by_shard: Shards) -> None:
    for shard, prompts in by_shard.items():
        rows = completions(build, shard)
        assert [row["conversation_id"] for row in rows] == sorted(conversation_id(n) for n in range(len(prompts)))
        assert [row["reason"] for row in rows if row["status"] != "ok"] == []
        right = expected(CONFIG, prompts, settings)
        assert [row for row in rows if row["output_ids"] != right[row["conversation_id"]]] == []


def test_jobs_share_the_fleet_and_survive_its_servers_deaths(results: Path) -> None:
    source = random.Random(3)
    with SimFleet(3, CONFIG) as servers:
        settings = make_settings(servers.urls, prompts={"shards": 3}, generate={"concurrency": 6, "patience_s": 20})
        build, by_shard = shards(settings, results, 3, 600 if SOAK else 150)
        with runlock.acquire(build.lock, runlock.myself("test")):
            jobs = [start(build, shard) for shard in by_shard]
            deaths = 0
            while any(job.poll() is None for job in jobs):
                time.sleep(source.uniform(0.3, 0.8))
                if deaths < (100 if SOAK else 5):
                    victim = source.randrange(3)
                    if servers.alive(victim):
                        servers.kill(victim)
                        deaths += 1
                        time.sleep(0.2)
                    servers.start(victim)
            for job in jobs:
                finish(job)
        assert_right(build, settings, by_shard)
        assert deaths > 0
        asked = servers.asked()
        assert len(asked) == sum(map(len, by_shard.values()))
        repeated = asked.total() - len(asked)
        assert repeated <= deaths * 6, f"{repeated} asked again after {deaths} deaths"


def test_what_was_made_of_earlier_answers_goes_before_new_ones_come(results: Path) -> None:
    """A stop between the two would leave old training rows beside new answers, to be published with them."""
    with SimFleet(1, CONFIG) as servers:
        settings = make_settings(servers.urls, generate={"concurrency": 6})
        build, by_shard = shards(settings, results, 1, 5)
        (shard,) = by_shard
        for earlier in (build.tokens(shard), build.manifest(shard)):
            write_text(earlier, "of other answers")
        with runlock.acquire(build.lock, runlock.myself("test")):
            finish(start(build, shard))
        assert_right(build, settings, by_shard)
        assert not build.tokens(shard).exists() and not build.manifest(shard).exists()
        plan = make_plan(settings, build, Published)
        assert plan.generate == () and plan.tokenize == plan.publish == (shard,)


def test_a_job_that_is_told_to_stop_halts_no_run(results: Path) -> None:
    """By kill, or by a cluster that takes its node: the other shards are none the worse for it."""
    with job_at_work(results) as (build, job, lock):
        with lock:
            job.terminate()
            assert "was told to stop" in finish(job, code=1, timeout_s=20)
        assert not build.halt.exists()


def test_a_job_whose_run_ended_before_it_joined_asks_nothing(results: Path) -> None:
    """It waited for a claim or for disk meanwhile; and it is no job of the run after that one."""
    with SimFleet(1, CONFIG) as servers:
        settings = make_settings(servers.urls)
        build, by_shard = shards(settings, results, 1, 5)
        (shard,) = by_shard
        with runlock.acquire(build.lock, runlock.myself("the run before")):
            before = runlock.holder(build.lock)
        for after in (contextlib.nullcontext(), runlock.acquire(build.lock, runlock.myself("the next run"))):
            with after, pytest.raises(ShardError, match="its run has ended"):
                asyncio.run(Fleet.join(settings, build, shard, 0, run=before))
        assert servers.received().total() == 0


def test_more_requests_than_the_usual_limit_of_open_files(results: Path) -> None:
    """A job raises its own, as far as the machine lets it."""
    with SimFleet(1, {**CONFIG, "max_running_requests": 120, "mamba_slots": None}) as servers:
        settings = make_settings(servers.urls, generate={"concurrency": 120})
        build, by_shard = shards(settings, results, 1, 200)
        (shard,) = by_shard
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with runlock.acquire(build.lock, runlock.myself("test")):
            command = [sys.executable, "-m", "shardmill", "step", "--build", str(build.root), "generate", shard]
            job = subprocess.Popen(
                ["prlimit", f"--nofile=64:{hard}", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            finish(job)
        assert_right(build, settings, by_shard)


def test_all_servers_dead_it_waits_its_patience_out_and_the_next_run_goes_on(results: Path) -> None:
    with SimFleet(1, CONFIG) as servers:
        settings = make_settings(servers.urls, generate={"concurrency": 6, "patience_s": 2})
        build, by_shard = shards(settings, results, 1, 100)
        (shard,) = by_shard
        with runlock.acquire(build.lock, runlock.myself("test")):
            job = start(build, shard)
            _until(lambda: rows_kept(build, shard) > 10)
            servers.kill(0)
            began = time.monotonic()
            errors = finish(job, code=1, timeout_s=30)
            assert time.monotonic() - began >= 1.5
            assert errors.strip().splitlines()[-1].endswith(".")
            kept = rows_kept(build, shard)
            assert kept > 10 and not build.completions(shard).exists()
            servers.start(0)
            before = servers.asked().total()
            finish(start(build, shard))
        assert_right(build, settings, by_shard)
        assert servers.asked().total() - before == 100 - kept, "only what was missing"
        assert read_json(build.progress(shard))["starts"] == 2


def test_a_job_leaves_when_its_run_is_over(results: Path) -> None:
    with job_at_work(results) as (_, job, lock):
        lock.release()
        errors = finish(job, code=1, timeout_s=20)
        assert "its run has ended" in errors


@contextlib.contextmanager
def job_at_work(results: Path) -> Iterator[tuple[BuildPaths, subprocess.Popen[bytes], runlock.RunLock]]:
    """A build, its one job, which waits for answers that take long, and the lock of the run that the job is of."""
    with SimFleet(1, {**CONFIG, "length_mean": 4000, "time_scale": 1}) as servers:
        settings = make_settings(servers.urls, sampling={"max_new_tokens": 8000})
        build, by_shard = shards(settings, results, 1, 20)
        (shard,) = by_shard
        with runlock.acquire(build.lock, runlock.myself("test")) as lock:
            job = start(build, shard)
            _until(lambda: servers.received().total() > 3)
            yield build, job, lock


def rows_kept(build: BuildPaths, shard: str) -> int:
    """Rows in the journal; notes about prompts that are not done are left out."""
    return sum("note" not in record for record in read_records(build.journal(shard)))


def _until(holds: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
