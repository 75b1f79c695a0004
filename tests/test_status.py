"""`shardmill status`: right while a run is at work, after it, after a kill, and on another machine; and cheap."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from builds import START, Answer, MadeBuild, good, settings_of
from shardmill.cli import cli
from shardmill.files import read_json, write_json
from shardmill.fleet import history
from shardmill.home import Home, fleet_key
from shardmill.journal import open_journal
from shardmill.paths import BuildPaths, shard_name
from shardmill.plan import make_plan
from shardmill.quality.run import check_build, check_pilot
from shardmill.runlock import acquire
from shardmill.schemas import COMPLETIONS, read_rows, write_table
from shardmill.settings import Settings
from shardmill.status import rows, trends
from shardmill.status.gather import Gatherer, gather
from shardmill.status.model import Status
from shardmill.store.listing import Published
from shardmill.store.uploads import note_upload
from simserver import SimFleet
from workspace import BIN, Workspace

SGLANG = {"engine": "sglang", "gpus": [0, 1]}
SHARDS = 4


def build_of(tmp_path: Path, answers: list[Answer], **sections: Any) -> tuple[Settings, BuildPaths]:
    base: dict[str, Any] = {
        "prompts": {"shards": SHARDS},
        "model": {"name": "Qwen/Qwen3.6-27B", "context": 32768},
        "servers": SGLANG,
        "cost": {"usd_per_gpu_hour": 3.6},
    }
    settings = settings_of(**{**base, **sections})
    made = MadeBuild(tmp_path / "results" / "sample-0123456789", settings, shards=SHARDS)
    build = made.write(answers)
    for shard in made.names():
        _true_manifest(build, shard, key=None)
    return settings, build


def _true_manifest(build: BuildPaths, shard: str, key: str | None) -> None:
    manifest = read_json(build.manifest(shard))
    objects = [
        {
            "kind": kind,
            "path": f"{kind}/{shard}.parquet",
            "key": None if key is None else f"{key}{kind}/{shard}.parquet",
            "size": (build.root / kind / f"{shard}.parquet").stat().st_size,
            "sha256": "0" * 64,
            "rows": 1,
        }
        for kind in ("completions", "tokens")
    ]
    write_json(build.manifest(shard), {**manifest, "objects": objects, "shardmill": "0.1.0", "format": 1})


def unmake(build: BuildPaths, shard: str) -> None:
    for path in (build.completions(shard), build.tokens(shard), build.manifest(shard)):
        path.unlink(missing_ok=True)


def progress_of(shard: str, **changes: Any) -> dict[str, Any]:
    base = {
        "shard": shard, "state": "running", "pid": 1, "started_at": time.time() - 100, "updated_at": time.time(),
        "starts": 1, "seconds": 100.0, "prompts": 3, "done": 2, "ok": 1, "reused": 0, "failed": {"empty": 1},
        "not_reached": 0, "in_flight": 1, "waiting": 0, "attempts": 3, "degenerate": {}, "faults": {"reset": 2},
        "cut_at_stop": 0, "tokens": 60, "rows_per_s": 0.5, "tokens_per_s": 30.0, "accept_length": 2.5,
        "servers": {"gpu-0": {"ok": 1}},
    }  # fmt: skip
    return {**base, **changes}


def server_state(name: str, **changes: Any) -> dict[str, Any]:
    base = {
        "name": name, "url": "http://127.0.0.1:30000", "state": "ready", "why": "", "for_s": 60.0, "starts": 1,
        "restarts": 0, "in_flight": 16, "answers": 5, "faults": {}, "last_fault": "", "running": 16, "queued": 1,
        "effective_cap": 16, "requested_cap": 48, "cap_reason": "80 Mamba state slots // 5 a request = 16: do so",
        "kv_use": 0.4, "mamba_use": 1.0, "tokens_per_s": 900.0, "accept_length": 2.8, "model": "q", "context": 32768,
        "vocab_size": 9, "version": "0.5.23", "pid": 7, "resident_bytes": 5 << 30, "log": None,
        "gpu": {"index": 0, "utilisation": 0.97, "power_w": 880.0, "memory_used_mib": 1024.0, "memory_mib": 2048.0},
    }  # fmt: skip
    return {**base, **changes}


@contextmanager
def fleet_at_work(settings: Settings, build: BuildPaths, *servers: Mapping[str, Any], **more: Any) -> Iterator[Home]:
    home = Home(build.root.parent / ".fleet" / fleet_key(settings))
    state = {
        "updated": datetime.now(UTC).isoformat(timespec="seconds"),
        "waiting": 7,
        "runs": [{"lock": str(build.lock.absolute()), "holder": None}],
        "servers": list(servers),
        "warnings": [],
        **more,
    }
    write_json(home.state, state)
    with acquire(home.lock):
        yield home


def shardmill(*arguments: str) -> str:
    result = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def status_json(build: BuildPaths) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(shardmill("status", "--json", "--build", str(build.root)))
    return answer


def failed(number: int, reason: str) -> Answer:
    return good(number, status="failed", reason=reason, question=f"Why did {number} fail?")


def test_a_finished_build(tmp_path: Path) -> None:
    answers = [good(number) for number in range(10)] + [failed(10, "empty"), good(11, finish_reason="length")]
    settings, build = build_of(tmp_path, answers)
    status = gather(settings, build)
    ok = [row for shard in range(SHARDS) for row in read_rows(build.completions(shard_name(shard, SHARDS)))]
    ok = [row for row in ok if row["status"] == "ok"]
    tokens = sum(row["completion_tokens"] for row in ok)
    assert (status.shards.published, status.shards.all, status.run.at_work) == (SHARDS, SHARDS, False)
    assert (status.prompts.all, status.prompts.ok, status.prompts.failed, status.prompts.left) == (12, 11, 1, 0)
    assert status.prompts.tokens == tokens and status.prompts.mean_tokens == pytest.approx(tokens / 11)
    assert status.prompts.cut_share == pytest.approx(1 / 11)
    assert status.outlook.left_s == 0 and status.outlook.usd_to_come == 0
    assert status.dataset.records == 17 and status.dataset.rejected_by_reason == {"no_user_turn": 2}
    assert status.store.where is None
    assert [(failure.reason, failure.rows) for failure in status.failures] == [("empty", 1)]
    example = status.failures[0].examples[0]
    assert example.prompt == "Why did 10 fail?" and example.shard == shard_name(2, SHARDS)


def test_every_shard_is_in_one_stage(tmp_path: Path) -> None:
    """Published, answered, being generated, begun and stopped, waiting: told apart, during a run and after it."""
    settings, build = build_of(tmp_path, [good(number) for number in range(12)])
    names = [shard_name(index, SHARDS) for index in range(SHARDS)]
    build.manifest(names[1]).unlink()
    unmake(build, names[2])
    unmake(build, names[3])
    write_json(build.progress(names[2]), progress_of(names[2]))
    with open_journal(build.journal(names[2])) as journal:
        row = {"conversation_id": "c", "turn": 0, "prompt_id": "p", "reason": "empty", "attempts": 4, "server": "gpu-0"}
        journal.append(row)
    make_plan(settings, build, Published).save(build.plan)
    stopped = gather(settings, build)
    assert stages(stopped) == (1, 1, 0, 1, 1)
    with acquire(build.lock):
        at_work = gather(settings, build)
        write_json(build.progress(names[2]), progress_of(names[2], updated_at=time.time() - 3600))
        silent = gather(settings, build)
    assert stages(at_work) == (1, 1, 1, 0, 1) and stages(silent) == (1, 1, 0, 1, 1)
    prompts = at_work.prompts
    assert (prompts.ok, prompts.failed, prompts.in_flight, prompts.left) == (7, 1, 1, 4)
    assert stopped.prompts.ok == 7 and stopped.prompts.in_flight == 0
    assert at_work.pace.tokens_per_s_now == 30 and stopped.pace.tokens_per_s_now is None
    assert at_work.faults == {"reset": 2}
    assert {server.name: server.answers for server in at_work.fleet.servers} == {
        "127.0.0.1:30000": 6,
        "gpu-0": 1,
    }
    assert [example.conversation_id for example in at_work.failures[0].examples] == ["c"]
    mean = at_work.prompts.mean_tokens
    assert mean is not None and at_work.outlook.left_s == pytest.approx(4 * mean / 30)
    assert at_work.outlook.finished_at is not None and stopped.outlook.finished_at is None


def stages(status: Status) -> tuple[int, int, int, int, int]:
    shards = status.shards
    assert shards.all == shards.published + shards.answered + shards.generating + shards.begun + shards.waiting
    return shards.published, shards.answered, shards.generating, shards.begun, shards.waiting


def test_what_was_asked_again_is_told_by_files_and_by_jobs_at_work(tmp_path: Path) -> None:
    """A finished shard's file tells on any machine; its job's progress, which says the same, is not counted twice."""
    settings, build = build_of(tmp_path, [])
    names = [shard_name(index, SHARDS) for index in range(SHARDS)]
    effort = {"cut_at_stop": 3, "degenerate": {"repetition": 1}, "faults": {"reset": 4}}
    made = MadeBuild(build.root, settings, shards=SHARDS, effort=effort)
    made.write([good(number) for number in range(12)])
    for shard in names[2:]:
        unmake(build, shard)
    write_json(build.progress(names[0]), progress_of(names[0], state="done", **effort))
    write_json(build.progress(names[2]), progress_of(names[2], faults={"timed_out": 1}, cut_at_stop=1))
    with acquire(build.lock):
        status = gather(settings, build)
    assert (status.cut_at_stop, status.degenerate) == (7, {"repetition": 2})
    assert status.faults == {"reset": 8, "timed_out": 1}
    text = shardmill("status", "--build", str(build.root))
    assert "7 went on after their stop token" in text
    assert "asked again: 2 repetition; server faults, all tried again: 8 reset, 1 timed out" in text


def test_a_pilot_of_few_rows_is_not_called_passed(tmp_path: Path) -> None:
    settings, build = build_of(tmp_path, [good(number) for number in range(8)])
    check_pilot(build, settings, [shard_name(0, SHARDS)])
    assert "pilot no verdict: too few rows, build not checked yet" in shardmill("status", "--build", str(build.root))
    check_build(build, settings)
    assert gather(settings, build).verdict.build == "passed"


def test_before_anything_was_made(tmp_path: Path) -> None:
    settings, build = build_of(tmp_path, [])
    for index in range(SHARDS):
        unmake(build, shard_name(index, SHARDS))
    build.build_json.unlink()
    status = gather(settings, build)
    assert stages(status) == (0, 0, 0, 0, SHARDS) and status.prompts.all is None and status.outlook.left_s is None
    assert "not read yet" in shardmill("status", "--build", str(build.root))


def test_restored_shards_are_told_from_made_ones(tmp_path: Path) -> None:
    settings, build = build_of(tmp_path, [good(number) for number in range(8)], s3={"bucket": "mill", "prefix": "team"})
    names = [shard_name(index, SHARDS) for index in range(SHARDS)]
    for name in names:
        unmake_all = name in names[:2]
        if unmake_all:
            build.manifest(name).unlink()
    make_plan(settings, build, lambda: Published(frozenset(names[:2]))).save(build.plan)
    for name in names[:1]:
        write_json(build.manifest(name), {"build": build.name, "shard": name, "rows": {}, "created_at": "2026-11-29"})
        _true_manifest(build, name, key=f"team/{build.name}/")
    status = gather(settings, build)
    # The other manifests are of a build without a bucket: nothing of them is in S3.
    assert (status.shards.published, status.shards.restored, status.shards.to_restore) == (1, 1, 2)
    store = status.store
    assert store.where == f"s3://mill/team/{build.name}/"
    sizes = {name: build.completions(name).stat().st_size + build.tokens(name).stat().st_size for name in names}
    assert (store.published_shards, store.published_bytes) == (1, sizes[names[0]])
    assert (store.behind_shards, store.behind_bytes) == (3, sum(sizes[name] for name in names[1:]))
    assert "3 shards" in shardmill("status", "--build", str(build.root))


def test_what_waits_for_the_store_and_how_far_behind_it_is(tmp_path: Path) -> None:
    settings, build = build_of(tmp_path, [good(number) for number in range(8)], s3={"bucket": "mill"})
    names, now = [shard_name(index, SHARDS) for index in range(SHARDS)], time.time()
    for index, name in enumerate(names):
        os.utime(build.completions(name), (now - 100 * (index + 1), now - 100 * (index + 1)))
    store = gather(settings, build).store
    assert (store.upload_s, store.upload_bytes_per_s, store.lag_s) == (None, None, None)
    assert store.behind_shards == SHARDS and store.behind_s == pytest.approx(100 * SHARDS, abs=10)
    for seconds, name in zip((1.0, 2.0, 6.0), names, strict=False):
        note_upload(build, name, 4_000_000, seconds)
    build.upload(names[3]).write_text("{")
    store = gather(settings, build).store
    assert store.upload_s == 2.0 and store.upload_bytes_per_s == pytest.approx(12e6 / 9)
    assert store.lag_s == pytest.approx(200, abs=10)
    text = shardmill("status", "--build", str(build.root))
    assert "4 shards and" in text and "waiting for 6m" in text
    assert "last uploads 2.0 s a shard at 1.3 MB/s, 3m after their answers" in text


def test_servers_as_the_fleet_tells_them(tmp_path: Path) -> None:
    settings, build = build_of(tmp_path, [good(number, server="gpu-0") for number in range(8)])
    late = server_state("gpu-1", state="failed", why="not ready 1800 s after its start", accept_length=None, gpu=None)
    with fleet_at_work(settings, build, server_state("gpu-0"), late):
        status = gather(settings, build)
        text = shardmill("status", "--build", str(build.root))
    fleet = status.fleet
    assert fleet.alive and fleet.ready == 1 and fleet.mtp == "on" and fleet.accept_length == pytest.approx(2.8)
    first = fleet.servers[0]
    assert (first.running, first.queued, first.kv_use, first.mamba_use) == (16, 1, 0.4, 1.0)
    assert (first.answers, first.gpu_use, first.gpu_power_w, first.gpu_bytes) == (8, 0.97, 880.0, 1 << 30)
    assert first.accept_length == pytest.approx(3.0)
    for part in ("16 of 48", "97%", "880 W", "MTP is on, accept length 2.80", "80 Mamba state slots // 5", "1800 s"):
        assert part in text, part
    gone = gather(settings, build)
    assert not gone.fleet.alive and gone.fleet.ready == 0 and gone.fleet.servers[0].running is None
    assert gone.fleet.mtp == "on" and gone.fleet.accept_length == pytest.approx(3.0)  # of the rows


def test_another_machine_has_the_rows_alone(tmp_path: Path) -> None:
    settings, build = build_of(tmp_path, [good(n, server=f"gpu-{n % 2}", accept_length=None) for n in range(8)])
    fleet = gather(settings, build).fleet
    assert [server.name for server in fleet.servers] == ["gpu-0", "gpu-1"] and fleet.mtp == "off"
    assert [server.answers for server in fleet.servers] == [4, 4]


def test_gpus_that_no_server_names_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers elsewhere don't say which GPU is theirs: nvidia-smi of this machine is shown beside them."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho '0, 97, 655.32, 150000, 183359'\necho '1, [N/A], [N/A], 10, 183359'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    settings, build = build_of(tmp_path, [good(number) for number in range(4)])
    first, second = gather(settings, build).other_gpus
    assert (first.index, first.use, first.power_w, first.bytes) == (0, 0.97, 655.32, 150000 << 20)
    assert (second.use, second.power_w) == (None, None)
    assert "GPU 0 of this machine: 97% busy, 655 W" in shardmill("status", "--build", str(build.root))


def test_a_useless_draft_is_warned_of(tmp_path: Path) -> None:
    settings, build = build_of(tmp_path, [good(n, accept_length=1.0) for n in range(4)])
    status = gather(settings, build)
    assert status.fleet.mtp == "useless" and any("every draft is refused" in warning for warning in status.warnings)


def test_cost_counts_the_time_of_answering_and_no_pause(tmp_path: Path) -> None:
    """Two servers of ten minutes each, a night, and ten minutes of one of them."""
    settings, build = build_of(tmp_path, [good(number) for number in range(4)])
    made = [row for index in range(SHARDS) for row in read_rows(build.completions(shard_name(index, SHARDS)))]
    timed = []
    for hours, server in ((0, "gpu-0"), (0, "gpu-1"), (9, "gpu-0")):
        for minute in range(1, 11):
            at = START + timedelta(hours=hours, minutes=minute)
            timed.append({**made[0], "server": server, "latency_s": 60.0, "finished_at": at, "completion_tokens": 100})
    write_table(build.completions(shard_name(0, SHARDS)), COMPLETIONS, timed)
    for index in range(1, SHARDS):
        unmake(build, shard_name(index, SHARDS))
    status = gather(settings, build)
    assert status.pace.server_hours == pytest.approx(0.5) and status.outlook.usd_so_far == pytest.approx(1.8)
    assert status.pace.tokens_per_s_per_server == pytest.approx(100 / 60)
    assert status.pace.tokens_per_s == pytest.approx(3000 / 1200)


def test_a_second_look_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, build = build_of(tmp_path, [good(number) for number in range(8)])
    read: list[list[str]] = []
    connect = rows.connect
    monkeypatch.setattr(rows, "connect", lambda build, shards: read.append(list(shards)) or connect(build, shards))
    gatherer = Gatherer(settings, build)
    assert gatherer.gather().prompts.ok == 8
    assert gatherer.gather().prompts.ok == 8 and len(read) == 1
    new = shard_name(2, SHARDS)
    write_table(build.completions(new), COMPLETIONS, list(read_rows(build.completions(new)))[:1])
    assert gatherer.gather().prompts.ok == 7 and read[1:] == [[new]]
    unmake(build, new)
    assert gatherer.gather().prompts.ok == 6 and len(read) == 2


def test_completions_that_cannot_be_read_are_one_sentence(tmp_path: Path) -> None:
    _, build = build_of(tmp_path, [good(number) for number in range(8)])
    build.completions(shard_name(1, SHARDS)).write_bytes(b"PAR1 and nothing")
    done = subprocess.run(
        [sys.executable, "-m", "shardmill", "status", "--build", str(build.root)], capture_output=True, text=True
    )
    assert done.returncode == 1 and "`shardmill verify`" in done.stderr and done.stderr.count("\n") == 1
    assert shard_name(1, SHARDS) in done.stderr


def test_drift_is_warned_of_where_it_is(tmp_path: Path) -> None:
    settings, build = build_of(tmp_path, [good(number) for number in range(4)])
    with acquire(build.lock), fleet_at_work(settings, build, server_state("gpu-0"), server_state("gpu-1")) as home:
        now = time.time()
        who = read_json(build.lock)
        began = datetime.fromtimestamp(now - 7200, UTC)
        build.lock.write_text(json.dumps({**who, "started": began.isoformat()}))
        figures = {"running": 16, "kv_use": 0.3, "mamba_use": 0.5, "resident_bytes": 4 << 30, "accept_length": 2.8}
        for minute in range(120):
            falling = {**figures, "tokens_per_s": 900.0 - 3 * minute, "accept_length": 2.8 - 0.008 * minute}
            steady = {**figures, "tokens_per_s": 900.0, "resident_bytes": (4 << 30) + minute * (10 << 20)}
            line = {"at": now - 7200 + 60 * minute, "servers": {"gpu-0": falling, "gpu-1": steady}}
            with home.history.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        status = gather(settings, build)
        text, values = shardmill("status", "--build", str(build.root)), status_json(build)
    assert values["warnings"] == list(status.warnings)
    assert all(f"Warning: {warning}" in text for warning in status.warnings)
    moved = next(line for line in text.splitlines() if line.startswith("gpu-0") and "→" in line)
    assert moved.split()[1:5] == ["2.68", "→", "1.96", "-27%"]
    warned = {(trend.what, trend.server) for trend in status.trends if trend.warning}
    assert warned == {("accept length", "gpu-0"), ("tokens/s", "gpu-0"), ("memory", "gpu-1")}
    assert sum("fell from" in warning or "may leak" in warning for warning in status.warnings) == 3
    assert all(len(trend.points) <= 60 for trend in status.trends)


def test_a_rate_at_the_end_of_the_work_is_no_drift() -> None:
    """The last requests of a build run alone: the servers are not slower for it."""
    samples = []
    for minute in range(120):
        running = 16 if minute < 80 else 2
        figures = {"running": running, "tokens_per_s": 60.0 * running, "accept_length": None, "resident_bytes": None}
        samples.append({"at": 60.0 * minute, "servers": {"gpu-0": figures}})
    assert [trend.warning for trend in trends.from_history(samples)] == [None]


def test_the_fleets_history_is_bounded_and_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'{"at": 1.0, "servers": {}}\n' * 200_000 + b'{"at": 9e9, "servers": {}}\n')
    kept = history.History(path, every_s=0)
    kept.note({"servers": [server_state("gpu-0")]})
    assert path.stat().st_size < 3 << 20
    with path.open("ab") as stream:
        stream.write(b'{"at": 2.0, "serv')
    samples = history.read(path, since=2.0)
    assert [sorted(sample["servers"]) for sample in samples] == [[], ["gpu-0"]]
    assert samples[1]["servers"]["gpu-0"]["accept_length"] == 2.8


def test_history_is_noted_once_a_minute(tmp_path: Path) -> None:
    noted = history.History(tmp_path / "history.jsonl")
    for _ in range(5):
        noted.note({"servers": []})
    assert len(history.read(tmp_path / "history.jsonl", 0)) == 1


@hypothesis_settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_the_length_of_a_union(pairs: list[tuple[int, int]]) -> None:
    intervals = [(float(start), float(start + length)) for start, length in pairs]
    covered = {second for start, length in pairs for second in range(start, start + length)}
    assert rows.union_length(intervals) == len(covered)


def test_failures_and_estimates_are_in_text_and_in_json(tmp_path: Path) -> None:
    _, build = build_of(tmp_path, [*(good(number) for number in range(11)), failed(11, "empty")])
    values, text = status_json(build), shardmill("status", "--build", str(build.root))
    (failure,) = values["failures"]
    assert failure["reason"] == "empty" and failure["rows"] == 1
    for said in ("1 failed: empty", failure["meaning"], failure["examples"][0]["prompt"]):
        assert said in text
    estimated, actual = values["outlook"]["estimated"], values["outlook"]["actual"]
    for name, form in (
        ("usd", "${:,.2f}"),
        ("server_hours", "{:,.2f}"),
        ("mean_tokens", "{:,.0f}"),
        ("tokens", "{:,.0f}"),
    ):
        pair = " ".join(form.format(figures[name]) for figures in (estimated, actual))
        assert any(" ".join(line.split()).endswith(pair) for line in text.splitlines()), (name, pair)


def test_json_holds_every_part_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILL_KEY", "s3cr3t-k3y")
    servers = {"engine": "sglang", "endpoints": ["http://127.0.0.1:1"], "api_key_env": "MILL_KEY"}
    _, build = build_of(tmp_path, [good(0), failed(1, "repetition")], servers=servers)
    values = status_json(build)
    assert {"run", "shards", "prompts", "pace", "outlook", "fleet", "store", "dataset", "failures", "trends"} <= set(
        values
    )
    assert "s3cr3t-k3y" not in json.dumps(values)


def test_during_a_real_run_after_a_kill_and_at_its_end(tmp_path: Path) -> None:
    config = {"length_mean": 300, "time_scale": 0.6, "mamba_slots": None, "max_running_requests": 3, "mtp": True}
    with SimFleet(2, config) as fleet:
        workspace = Workspace(
            tmp_path,
            {
                "servers": {"engine": "sglang", "endpoints": fleet.urls},
                "quality": {"override": ["all"]},
                "prompts": {"limit": 32, "shards": 2},
                "sampling": {"max_new_tokens": 500},
                "cost": {"usd_per_gpu_hour": 3.8},
            },
        )
        run = workspace.start()
        try:
            live = wait_for(workspace, lambda now: now["prompts"]["ok"] > 3 and now["pace"]["tokens_per_s_now"])
            assert live["run"]["at_work"] and live["run"]["pid"] == run.pid and live["shards"]["generating"] > 0
            assert live["fleet"]["alive"] and live["fleet"]["ready"] == 2 and live["fleet"]["mtp"] == "on"
            assert live["prompts"]["all"] == 32 and live["outlook"]["usd_so_far"] > 0
            assert any(server["running"] for server in live["fleet"]["servers"])
            told = workspace.shardmill("status").stdout
            assert "at work since" in told and "MTP is on" in told and f"pid {run.pid}" in told
            watching = subprocess.Popen(
                [str(BIN / "shardmill"), "status", "--watch", "--every", "2", "--json"],
                cwd=tmp_path, env=workspace.environment(), stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert watching.stdout is not None
            looks = [json.loads(watching.stdout.readline()) for _ in range(2)]
            assert looks[1]["taken"] > looks[0]["taken"] and looks[1]["prompts"]["ok"] >= looks[0]["prompts"]["ok"]
            watching.send_signal(signal.SIGINT)
            watching.wait(20)
        finally:
            run.kill()
            run.wait()
        killed = read_status(workspace)
        assert not killed["run"]["at_work"] and killed["prompts"]["ok"] >= live["prompts"]["ok"]
        workspace.build()
        done = read_status(workspace)
    rows_made = [row for path in sorted(workspace.results.glob("completions/shard-*")) for row in read_rows(path)]
    assert done["prompts"]["ok"] == sum(row["status"] == "ok" for row in rows_made)
    assert done["prompts"]["tokens"] == sum(row["completion_tokens"] for row in rows_made)
    assert done["prompts"]["left"] == 0 and done["shards"]["published"] == done["shards"]["all"]
    assert sum(server["answers"] for server in done["fleet"]["servers"]) == len(rows_made) == 32


def read_status(workspace: Workspace) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(workspace.shardmill("status", "--json").stdout)
    return answer


def wait_for(workspace: Workspace, holds: Any, seconds: float = 90) -> dict[str, Any]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (workspace.root / "results" / "latest").exists():
            status = read_status(workspace)
            if holds(status):
                return status
        time.sleep(0.3)
    raise AssertionError(workspace.log.read_text())
