"""A disk that gets tight: generation waits instead of failing, a core stays free, and in the end one sentence tells."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from genkit import completions, generate, make_settings, make_shard, random_prompt
from s3proxy import wait_until
from shardmill.disk import Room, room_of
from shardmill.errors import ShardmillError
from shardmill.generate import space
from shardmill.paths import BuildPaths
from simserver import SimFleet
from workspace import Workspace

SERVER = {"instant": True, "length_mean": 20.0}
DISK = 64 << 20


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that are free, as a list of one, of 100 that are needed."""
    free = [1000]
    monkeypatch.setattr(space, "room_of", lambda folder: Room(free[0], 100))
    return free


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)], check=False)
    if done.returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_job_waits_while_the_disk_is_tight(tmp_path: Path, disk: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with SimFleet(1, SERVER) as fleet, caplog.at_level(logging.INFO):
        settings = make_settings(fleet.urls, generate={"concurrency": 2, "patience_s": 60})
        build = make_shard(tmp_path / "b", settings, [random_prompt(number) for number in range(40)])
        disk[0] = 99
        job = threading.Thread(target=generate, args=(settings, build))
        job.start()
        wait_until(lambda: "nothing new is asked" in caplog.text, 30)
        time.sleep(0.3)
        assert sum(fleet.received().values()) == 0 and not build.completions("shard-00000-of-00001").exists()
        disk[0] = 100
        job.join(60)
    assert len(completions(build)) == 40
    assert caplog.text.count("nothing new is asked") == caplog.text.count("has room again") == 1


def test_a_disk_that_stays_tight_ends_the_job_and_what_was_answered_is_kept(tmp_path: Path, disk: list[int]) -> None:
    with SimFleet(1, SERVER) as fleet:
        settings = make_settings(fleet.urls, generate={"concurrency": 2, "patience_s": 0.2})
        build = make_shard(tmp_path / "b", settings, [random_prompt(number) for number in range(40)])
        disk[0] = 0
        with pytest.raises(ShardmillError, match=r"has had less than .* left for 0 s \(generate\.patience_s\): free"):
            generate(settings, build)
        disk[0] = 100
        generate(make_settings(fleet.urls, generate={"concurrency": 2, "patience_s": 60}), build)
        assert len(completions(build)) == 40 == sum(fleet.received().values())


def test_a_share_of_a_small_disk_is_kept_and_two_gigabytes_of_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_of(size: int, free: int) -> Room:
        blocks = (4096, 4096, size // 4096, free // 4096, free // 4096, 0, 0, 0, 0, 255)
        monkeypatch.setattr(os, "statvfs", lambda folder: os.statvfs_result(blocks))
        return room_of(Path())

    assert disk_of(10**10, 6 * 10**8).tight is False and disk_of(10**10, 4 * 10**8).tight
    assert disk_of(3 * 10**13, 21 * 10**8).tight is False and disk_of(3 * 10**13, 19 * 10**8).tight


def test_a_run_waits_for_a_disk_with_a_core_to_spare(tmp_path: Path, small_disk: Path) -> None:
    """A real disk of 64 MB: too little room ends the run by one sentence, room that comes lets it go on."""
    with SimFleet(1, SERVER) as fleet:
        mill = Workspace(
            tmp_path,
            {
                "results": str(small_disk / "results"),
                "prompts": {"limit": 8, "shards": 4},
                "servers": {"engine": "sglang", "endpoints": fleet.urls},
                "generate": {"pilot_shards": 0, "patience_s": 1},
                "quality": {"override": ["all"]},
            },
        )
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(DISK - (2 << 20)))
        failed = mill.snakemake(cores=2, expect=1)
        said = failed.stdout + failed.stderr
        assert "Error: The disk of" in said and "generate.patience_s" in said and "Traceback" not in said

        mill.configure({"generate": {"patience_s": 600}})
        build = BuildPaths((small_disk / "results" / "latest").resolve())

        def waiting() -> list[str]:
            logs = (build.logs / "generate").glob("*.log")
            return [path.stem for path in logs if "for 600 s at most" in path.read_text()]

        run = mill.start(cores=2)
        try:
            wait_until(lambda: bool(waiting()), 300)
            time.sleep(3)
            # Two cores, four shards that could be answered: one waits, and a core is there for what frees space.
            assert len(waiting()) == 1
            told = mill.shardmill("status", "--build", str(build.root)).stdout
            assert "nothing new is asked until it has 3 MB" in told
            ballast.unlink()
            assert run.wait(300) == 0
        finally:
            run.kill()
    assert len(list((build.root / "manifests").glob("*.json"))) == 4
