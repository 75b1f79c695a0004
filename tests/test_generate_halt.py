"""What one failed shard means to the run: the others are finished, unless all would fail the same way."""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from typing import Any

import orjson
import pytest

from fleetkit import hurried
from shardmill import halt, runlock
from shardmill.generate.pace import VARIABLE
from shardmill.paths import BuildPaths
from shardmill.schemas import read_rows
from simserver import SimFleet, free_ports, prompt_hash
from workspace import Workspace

__all__ = ["hurried"]  # a fixture


def workspace_of(folder: Path, urls: list[str], patience_s: float) -> Workspace:
    config: dict[str, Any] = {
        "prompts": {"shards": 3, "limit": 30},
        "servers": {"engine": "sglang", "endpoints": urls},
        "generate": {"pilot_shards": 0, "patience_s": patience_s},
        "quality": {"override": ["all"]},
    }
    return Workspace(folder, config)


def test_a_prompt_that_no_server_survives_leaves_all_other_shards_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, orjson.dumps({"backoff_s": 0.02, "backoff_most_s": 0.1}).decode())
    with SimFleet(2, {"instant": True}) as fleet:
        workspace = workspace_of(tmp_path, fleet.urls, patience_s=5)
        workspace.snakemake("--until", "make_prompts")
        shards = sorted(workspace.results.glob("prompts/shard-*"))
        poison = next(row for path in shards for row in read_rows(path))
        for server in range(2):
            fleet.faults(server, {"kind": "nan", "prompts": [prompt_hash(poison["prompt_ids"])]})
        done = workspace.snakemake(cores=2, expect=1)
        assert "prompts met nothing but server faults, the last nan: " in done.stderr
        assert f"(source id {poison['source_id']})" in done.stderr and "No more jobs were started" not in done.stderr
        assert len(list(workspace.results.glob("manifests/*"))) == 2
        for server in range(2):
            fleet.faults(server, [])
        before = fleet.asked().total()
        assert workspace.build()["generate"] == 1
        assert fleet.asked().total() == before + 1, "of its shard, too, everything else was kept"


def test_a_run_is_told_to_halt_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks that it took when it began, since this is one of the reasons to halt."""
    build = BuildPaths(tmp_path / "made-0123456789")

    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with runlock.acquire(build.lock, runlock.myself("test")):
        monkeypatch.setattr(signal, "getsignal", lambda _: None)
        halt.watch(build)
        monkeypatch.setattr(halt, "write_json", full)
        halt.ask(build, runlock.holder(build.lock), "The disk is full. " + "é" * 9000)
    why = halt.reason(build)
    assert why is not None and why.startswith("The disk is full. é") and not build.halt_reserve.exists()


def test_no_server_left_halts_the_run(tmp_path: Path) -> None:
    workspace = workspace_of(tmp_path, [f"http://127.0.0.1:{free_ports(1)[0]}"], patience_s=1)
    done = workspace.snakemake(cores=2, expect=1)
    assert "No more jobs were started: No server was left for 1 s (generate.patience_s)" in done.stderr
    assert len(list(workspace.results.glob("logs/generate/*.log"))) == 1, "no other job waited for the same"
