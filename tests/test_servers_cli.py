"""`shardmill servers`: up, status, down, as a person uses them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from fleetkit import hurried, hurry, results
from shardmill.fleet import show
from shardmill.fleet.gpus import parse
from shardmill.home import Home
from shardmill.settings import load
from simserver import SimFleet

__all__ = ["hurried", "results"]  # fixtures


def config_of(folder: Path, results: Path, **servers: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"results": str(results), "servers": servers}))
    return path


def shardmill(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "shardmill"), "servers", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_up_status_down(results: Path, tmp_path: Path) -> None:
    config = ["--configfile", str(config_of(tmp_path, results, engine="llamacpp"))]
    assert "No server is running" in shardmill("status", *config, expect=1).stdout
    assert "1 of 1 servers ready" in shardmill("up", *config).stdout
    home = Home.of(load(Path(config[1])))
    time.sleep(2.5)
    assert home.alive(), "servers that were started by hand stay without a run"
    shown = shardmill("status", *config).stdout
    assert "embedded-0" in shown and "ready" in shown and "up until `shardmill servers down`" in shown
    state = json.loads(shardmill("status", "--json", *config).stdout)
    pid = state["servers"][0]["pid"]
    assert state["servers"][0]["resident_bytes"] > 100 << 20
    assert "1 of 1 servers ready" in shardmill("up", *config).stdout, "up twice is up"
    assert "1 server stopped" in shardmill("down", *config).stdout
    assert not psutil.pid_exists(pid) and not home.alive()
    assert "No server was running" in shardmill("down", *config).stdout


def test_servers_started_by_hand_outlive_a_killed_fleet_and_go_down(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, orphan_s=2.0)
    config = ["--configfile", str(config_of(tmp_path, results, engine="llamacpp"))]
    shardmill("up", *config)
    state = json.loads(shardmill("status", "--json", *config).stdout)
    os.kill(state["pid"], signal.SIGKILL)
    pid = state["servers"][0]["pid"]
    time.sleep(4)
    assert psutil.pid_exists(pid)
    assert (
        json.loads(shardmill("up", *config).stdout and shardmill("status", "--json", *config).stdout)["servers"][0][
            "pid"
        ]
        == pid
    ), "the next fleet takes it over"
    os.kill(json.loads(shardmill("status", "--json", *config).stdout)["pid"], signal.SIGKILL)
    assert "1 server stopped" in shardmill("down", *config).stdout
    assert not psutil.pid_exists(pid)


def test_up_says_why_a_server_is_not_ready(results: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, results, engine="llamacpp", args={"no-such-flag": 1})
    done = shardmill("up", "--configfile", str(config), expect=1)
    assert "no-such-flag" in done.stdout and "refused" in done.stdout
    shardmill("down", "--configfile", str(config))


def test_endpoints_are_looked_at_without_a_fleet(results: Path, tmp_path: Path) -> None:
    config = {"mamba_slots": 80, "max_running_requests": 48}
    with SimFleet(1, config, folder=tmp_path / "sims") as sims:
        path = str(config_of(tmp_path, results, engine="sglang", endpoints=[*sims.urls, "http://127.0.0.1:1"]))
        shown = shardmill("status", "--configfile", path).stdout
        assert "1 of 2 servers ready" in shown and "nothing listens at its port" in shown
        assert "16 of 48" in shown and "80" in shown and "// 5" in shown
        assert not Home.of(load(Path(path))).alive()
        refused = shardmill("up", "--configfile", path, expect=2)
        assert refused.stderr.startswith("Error: The config gives endpoints")
    assert json.loads(shardmill("status", "--json", "--configfile", path, expect=1).stdout)["servers"][0]["state"]


def test_used_wrongly(tmp_path: Path) -> None:
    assert "not a build's folder" in shardmill("status", "--build", str(tmp_path), expect=2).stderr
    both = shardmill("status", "--build", str(tmp_path), "--configfile", "x.yaml", expect=2)
    assert "not both" in both.stderr


SERVER = {
    "name": "gpu0", "url": "http://127.0.0.1:30000", "state": "ready", "why": "", "for_s": 8040.0, "starts": 2,
    "restarts": 1, "in_flight": 18, "answers": 9000, "faults": {"reset": 3}, "last_fault": "reset: peer", "running": 16,
    "queued": 2, "effective_cap": 16, "requested_cap": 48,
    "cap_reason": "80 Mamba state slots // 5 a request = 16: set servers.args max-mamba-cache-size to 240 for 48",
    "kv_use": 0.43, "mamba_use": 1.0, "tokens_per_s": 1459.4, "accept_length": 3.311, "resident_bytes": 12 << 30,
    "gpu": {"index": 0, "utilisation": 0.97, "power_w": 812.0, "memory_used_mib": 1.0, "memory_mib": 2.0}, "log": "/l",
}  # fmt: skip


def test_all_that_status_shows(capsys: pytest.CaptureFixture[str]) -> None:
    state = {"model": "Qwen3.6-27B", "host": "h", "engine": "sglang", "jobs": [], "waiting": 7, "stay": False}
    show.show({**state, "servers": [SERVER], "warnings": ["Look out."]}, show.console())
    shown = capsys.readouterr().out
    for words in (
        "2h14m",
        "16 of 48",
        "43%",
        "100%",
        "1,459",
        "3.31",
        "12.0 GiB",
        "97%",
        "812 W",
        "80 Mamba state slots",
    ):
        assert words in shown, words
    assert "max-mamba-cache-size" in shown and "reset 3" in shown and "Warning: Look out." in shown
    assert all(len(line) <= 200 for line in shown.splitlines())


def test_nvidia_smi_as_it_writes() -> None:
    gpus = parse("0, 97, 812.34, 171008, 183359\n1, [N/A], [N/A], 4, 183359\nsome warning\n")
    assert gpus[0].utilisation == 0.97 and gpus[0].power_w == 812.34
    assert gpus[1].utilisation is None and gpus[1].memory_used_mib == 4
