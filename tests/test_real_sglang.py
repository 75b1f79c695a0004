"""The build against a real SGLang on this CPU: `SHARDMILL_SGLANG=FOLDER make test-sglang`.

FOLDER is one that sglang-cpu/install.sh has made, and SHARDMILL_SGLANG_STUBS the stubs/ beside that script (without it,
../shared/sglang-cpu/stubs is looked for). A start takes a minute or two, so it is one long test.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from fleetjob import GREEDY
from shardmill.engines import Request, engine
from shardmill.engines.choose import new_session
from test_run_lifecycle import journal_lines, processes_of, wait_for
from workspace import REPO, Workspace

FOLDER = os.environ.get("SHARDMILL_SGLANG", "")
STUBS = os.environ.get("SHARDMILL_SGLANG_STUBS", str(REPO.parent / "shared" / "sglang-cpu" / "stubs"))
MODEL = Path(FOLDER, "models", "smollm2").absolute()
ARGS = {"device": "cpu", "attention-backend": "torch_native", "dtype": "float32"} | {
    "mem-fraction-static": 0.5,
    "max-total-tokens": 32768,
}

pytestmark = [
    pytest.mark.skipif(not FOLDER, reason="SHARDMILL_SGLANG names no folder with a real SGLang"),
    pytest.mark.timeout(1800),
]


def config(**servers: Any) -> dict[str, Any]:
    return {
        "prompts": {"shards": 2, "limit": 40, "max_prompt_tokens": 300},
        "model": {"name": str(MODEL), "tokenizer": str(MODEL), "context": 2048},
        "sampling": {"temperature": 0.0, "max_new_tokens": 24},
        "servers": {"engine": "sglang", **servers},
        # Greedy answers are the same only at concurrency 1: batching changes numerics.
        "generate": {"concurrency": 1, "pilot_shards": 1},
        "quality": {"override": ["all"]},
    }


def launched() -> dict[str, Any]:
    return config(gpus=[0], command=f"{Path(FOLDER).absolute()}/venv/bin/python -m sglang.launch_server", args=ARGS)


@pytest.fixture(autouse=True)
def cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What sglang-cpu/start.sh sets."""
    cache = str(Path(FOLDER).absolute() / "cache")
    monkeypatch.setenv("PYTHONPATH", STUBS)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SGLANG_CACHE_DIR", cache)
    monkeypatch.setenv("XDG_CACHE_HOME", cache)


def server(workspace: Workspace) -> dict[str, Any]:
    done = subprocess.run(
        [
            str(Path(workspace.command()[0]).parent / "shardmill"),
            "servers",
            "status",
            "--json",
            "--configfile",
            "overlay.yaml",
        ],
        cwd=workspace.root,
        env=workspace.environment(),
        capture_output=True,
        text=True,
    )
    state = json.loads(done.stdout)
    return dict(state["servers"][0])


def rows(workspace: Workspace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted((workspace.results / "completions").glob("*.parquet")):
        found += pq.read_table(path).to_pylist()
    return sorted(found, key=lambda row: (row["conversation_id"], row["turn"]))


async def straight_from(url: str, prompts: list[list[int]], most: int) -> list[list[int]]:
    sglang = engine("sglang")
    async with new_session() as session:
        requests = [Request(f"direct-{n}", ids, most, GREEDY) for n, ids in enumerate(prompts)]
        return [(await sglang.generate(session, url, request, 300)).output_ids for request in requests]


def test_a_real_sglang_builds_survives_and_repeats_itself(tmp_path: Path) -> None:
    first = Workspace(make(tmp_path / "first"), launched())
    try:
        up = first.shardmill("servers", "up", "--configfile", "overlay.yaml")
        assert "1 of 1 servers ready" in up.stdout
        began = server(first)
        assert began["version"] == "0.5.23" and began["effective_cap"] == 1 and began["context"] >= 2048

        # Its scheduler is killed in the middle of the build.
        run = first.start()
        wait_for(lambda: journal_lines(first) >= 4, 300, "some answers")
        (scheduler,) = [
            process
            for process in psutil.Process(began["pid"]).children(recursive=True)
            if "sglang::scheduler" in " ".join(process.cmdline())
        ]
        scheduler.send_signal(signal.SIGKILL)
        assert run.wait(900) == 0, first.log.read_text()[-3000:]
        after = server(first)
        assert after["pid"] != began["pid"] and after["restarts"] == 1 and not psutil.pid_exists(began["pid"])

        built = rows(first)
        prompts = [
            row
            for path in sorted((first.results / "prompts").glob("shard-*.parquet"))
            for row in pq.read_table(path).to_pylist()
        ]
        keys = [(row["conversation_id"], row["turn"]) for row in built]
        assert len(keys) == len(set(keys)) == len(prompts) > 20, "every prompt exactly once"
        assert all(row["status"] == "ok" and row["server"] == "gpu0" for row in built)

        # Ids as the server sends them, and greedy answers the same on a second run, without launching this time.
        some = [row for row in built if row["finish_reason"] == "length"][:8]
        direct = asyncio.run(straight_from(after["url"], [row["prompt_ids"] for row in some], 24))
        assert direct == [row["output_ids"] for row in some]
        second = Workspace(make(tmp_path / "second"), config(endpoints=[after["url"]]))
        second.build()
        again = rows(second)
        assert [row["output_ids"] for row in again] == [row["output_ids"] for row in built]
        assert all(row["reused_from"] is None for row in again)
    finally:
        first.shardmill("servers", "down", "--configfile", "overlay.yaml")
    assert not psutil.pid_exists(after["pid"])
    wait_for(lambda: not processes_of(first) and not processes_of(second), 60, "nothing left running")


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder
