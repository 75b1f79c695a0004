"""How SGLang is started: flags by version and model, one server a GPU, restarts, and the model's copy in memory."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from fleetjob import answered, send
from fleetkit import build_of, hurried, results, settings_of, state, until
from shardmill import runlock
from shardmill.engines import Fault
from shardmill.engines.choose import new_session
from shardmill.errors import NoServers, SetupFault
from shardmill.fleet.client import Fleet
from shardmill.home import Home
from shardmill.servers import model_cache
from shardmill.servers.model_facts import ModelFacts, model_facts
from shardmill.servers.sglang_flags import Known, Wish, environment, known_flags, server_args
from shardmill.settings import Settings
from simserver.config import VERSIONS
from simserver.flags import parser_of

__all__ = ["hurried", "results"]  # fixtures

QWEN = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"} | {
    "text_config": {
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    }
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}
HYBRID = ModelFacts(mtp=True, hybrid=True)
NAMES = """
model-path served-model-name revision host port nccl-port mem-fraction-static max-running-requests random-seed
enable-metrics watchdog-timeout crash-dump-folder skip-server-warmup speculative-algorithm speculative-num-steps
speculative-eagle-topk speculative-num-draft-tokens disable-radix-cache max-mamba-cache-size mamba-radix-cache-strategy
"""
NEW = Known(frozenset(NAMES.split()), lazy_buffer=True)
OLD = Known(NEW.flags - {"mamba-radix-cache-strategy"} | {"mamba-scheduler-strategy"}, lazy_buffer=False)


def wish(**changes: Any) -> Wish:
    values: dict[str, Any] = {
        "model_path": "/m", "model_name": "Qwen3.6-27B", "revision": None, "concurrency": 48,
        "shared_prefixes": False, "facts": HYBRID, "given": {}, "crash_folder": "/c",
    }  # fmt: skip
    return Wish(**{**values, **changes})


def args(known: Known = NEW, **changes: Any) -> dict[str, Any]:
    return server_args(wish(**changes), known, 3, 20003, 21003)


# Flags


def test_mtp_and_no_prefix_cache_by_default_for_a_hybrid_model() -> None:
    got = args()
    assert got["speculative-algorithm"] == "NEXTN"
    assert [got[f"speculative-{name}"] for name in ("num-steps", "eagle-topk", "num-draft-tokens")] == [3, 1, 4]
    assert got["disable-radix-cache"] is True
    assert (got["max-running-requests"], got["random-seed"], got["port"], got["nccl-port"]) == (48, 1003, 20003, 21003)
    assert "max-mamba-cache-size" not in got and "revision" not in got


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (NEW, {"mamba-radix-cache-strategy": "extra_buffer_lazy", "max-mamba-cache-size": 192}),
        (OLD, {"mamba-scheduler-strategy": "extra_buffer", "max-mamba-cache-size": 240}),
        (
            Known(NEW.flags, lazy_buffer=False),
            {"mamba-radix-cache-strategy": "extra_buffer", "max-mamba-cache-size": 240},
        ),
    ],
)
def test_prefix_cache_is_kept_where_turns_share_prefixes(known: Known, expected: dict[str, Any]) -> None:
    got = args(known, shared_prefixes=True)
    assert "disable-radix-cache" not in got
    assert {name: got.get(name) for name in expected} == expected
    assert len([name for name in got if "mamba" in name]) == 2, "a name that the version does not know"


def test_old_version_never_gets_both_ways_to_keep_state() -> None:
    """0.5.11 refuses extra_buffer with --disable-radix-cache, and speculation with neither."""
    for given in ({}, {"disable-radix-cache": False}, {"mamba-scheduler-strategy": "extra_buffer"}):
        got = args(OLD, given=given)
        assert ("disable-radix-cache" in got) != (got.get("mamba-scheduler-strategy") == "extra_buffer")


def test_the_config_wins_and_takes_defaults_away() -> None:
    got = args(
        given={
            "mem_fraction_static": 0.7,
            "speculative-algorithm": None,
            "watchdog-timeout": False,
            "dtype": "half",
        }
    )
    assert got["mem-fraction-static"] == 0.7 and got["dtype"] == "half"
    assert "speculative-algorithm" not in got and "speculative-num-steps" not in got and "watchdog-timeout" not in got
    assert args(given={"port": 30000})["port"] == 30003
    assert "speculative-num-steps" not in args(given={"speculative-algorithm": "NGRAM"})


def test_dense_models_get_neither_speculation_nor_mamba_flags() -> None:
    got = args(facts=ModelFacts(mtp=False, hybrid=False))
    assert not [name for name in got if name.startswith(("speculative", "mamba", "disable"))]


def test_flags_that_a_version_lacks_are_left_out() -> None:
    got = args(Known(frozenset({"model-path", "port", "nccl-port", "mamba-radix-cache-strategy"}), lazy_buffer=True))
    assert set(got) == {"model-path", "port", "nccl-port"}


def test_environment() -> None:
    assert environment(NEW, 5)["CUDA_VISIBLE_DEVICES"] == "5"
    assert "SGLANG_ENABLE_SPEC_V2" not in environment(NEW, 0)
    assert environment(OLD, 0)["SGLANG_ENABLE_SPEC_V2"] == "1"


@pytest.mark.parametrize("version", VERSIONS)
def test_help_of_a_version_is_read(version: str) -> None:
    known = known_flags(parser_of(version).format_help())
    assert known.old == (version == "0.5.11")
    assert known.has("disable-radix-cache") and known.has("nccl-port") and not known.has("cuda-graph-bs-x")


def test_help_as_argparse_writes_it() -> None:
    known = known_flags(
        "usage: sglang serve [-h] --model-path MODEL_PATH [--tp-size N]\n\noptions:\n"
        "  --tensor-parallel-size N, --tp-size N, --tp N\n                        Not --a-flag in words.\n"
        "  --mamba-radix-cache-strategy {auto,no_buffer,extra_buffer,extra_buffer_lazy}  Replaces --mamba-old.\n"
        "\n--- Help for Diffusion Model Server ---\n  --num-gpus N\n"
    )
    assert {"model-path", "tp-size", "tp", "mamba-radix-cache-strategy"} <= known.flags
    assert not known.flags & {"a-flag", "mamba-old", "num-gpus"} and known.lazy_buffer


# The model


def test_what_a_model_is() -> None:
    assert model_facts(QWEN) == ModelFacts(mtp=True, hybrid=True)
    assert model_facts(LLAMA) == ModelFacts(mtp=False, hybrid=False)
    assert model_facts({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}) == ModelFacts(True, False)
    assert model_facts(QWEN, frozenset({"model.layers.0.x"})).mtp is False, "a copy without its MTP weights"
    assert model_facts(QWEN, frozenset({"mtp.layers.0.x"})).mtp is True


def make_model(folder: Path, config: dict[str, Any] = QWEN, size: int = 1000) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "sub").mkdir()
    (folder / "sub" / "more.txt").write_text("more")
    (folder / "model.safetensors").write_bytes(os.urandom(size))
    return folder


async def test_copy_is_whole_and_used_again(tmp_path: Path) -> None:
    source, cache = make_model(tmp_path / "model"), tmp_path / "ram"
    cache.mkdir()
    copies = await asyncio.gather(*(model_cache.copy(source, cache) for _ in range(3)))
    assert len(set(copies)) == 1
    (copy,) = set(copies)
    assert copy is not None
    assert (copy / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert (copy / "sub" / "more.txt").read_text() == "more"
    made = (copy / "model.safetensors").stat().st_mtime_ns
    assert await model_cache.copy(source, cache) == copy
    assert (copy / "model.safetensors").stat().st_mtime_ns == made


@pytest.mark.parametrize("harm", ["cut", "lost", "partial"])
async def test_cut_copy_is_never_used(tmp_path: Path, harm: str) -> None:
    source, cache = make_model(tmp_path / "model"), tmp_path / "ram"
    cache.mkdir()
    copy = await model_cache.copy(source, cache)
    assert copy is not None
    if harm == "cut":
        (copy / "model.safetensors").write_bytes(b"half")
    elif harm == "lost":
        (copy / "sub" / "more.txt").unlink()
    else:
        copy.rename(copy.with_name(f".{copy.name}.partial"))
    again = await model_cache.copy(source, cache)
    assert again == copy
    assert (copy / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert (copy / "sub" / "more.txt").exists()


async def test_copy_that_does_not_fit_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = make_model(tmp_path / "model", size=100_000), tmp_path / "ram"
    cache.mkdir()
    monkeypatch.setattr(model_cache.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 101_000})())
    assert await model_cache.copy(source, cache) is None
    assert not list(cache.rglob("*.safetensors"))


async def test_changed_model_is_copied_anew(tmp_path: Path) -> None:
    source, cache = make_model(tmp_path / "model"), tmp_path / "ram"
    cache.mkdir()
    first = await model_cache.copy(source, cache)
    (source / "model.safetensors").write_bytes(os.urandom(1000))
    second = await model_cache.copy(source, cache)
    assert second is not None and second != first
    assert (second / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


async def test_cancelled_copy_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = make_model(tmp_path / "model", size=8 << 20), tmp_path / "ram"
    cache.mkdir()
    monkeypatch.setattr(model_cache, "_CHUNK", 16)
    work = asyncio.create_task(model_cache.copy(source, cache))
    await asyncio.sleep(0.05)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not list(cache.rglob("model.safetensors"))


# With a command that says what it was called with, and is a simulated server


def fake_sglang(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    recorder = folder / "record.py"
    recorder.write_text(
        "import json, os, sys\n"
        f"with open({str(folder / 'calls')!r}, 'a') as calls:\n"
        "    kept = {k: v for k, v in os.environ.items() if k.startswith(('CUDA', 'SGLANG'))}\n"
        "    calls.write(json.dumps({'argv': sys.argv[1:], 'env': kept}) + '\\n')\n"
    )
    script = folder / "sglang"
    script.write_text(
        f'#!/bin/sh\n{shlex.quote(sys.executable)} {shlex.quote(str(recorder))} "$@"\n'
        f"export PYTHONPATH={shlex.quote(str(Path(__file__).parent))} SIMSERVER_CONFIG={folder / 'config.json'}\n"
        f'exec {shlex.quote(sys.executable)} -m simserver "$@"\n'
    )
    script.chmod(0o755)
    return script


def calls(folder: Path, what: str = "--port") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "calls").read_text().splitlines()]
    return [call for call in found if what in call["argv"]]


def launched(results: Path, command: str, model: Path, **servers: Any) -> Settings:
    return settings_of(
        results,
        model={"name": str(model), "tokenizer": "x"},
        servers={"engine": "sglang", "gpus": [0, 1], "command": command, **servers},
        generate={"patience_s": 10.0},
    )


SIM = {"instant": True, "log": None, "child": True}


@pytest.mark.parametrize("version", VERSIONS)
async def test_one_server_a_gpu(results: Path, tmp_path: Path, version: str) -> None:
    fake = fake_sglang(tmp_path / "bin", {**SIM, "version": version, "instant": False, "time_scale": 50.0})
    command = f"{fake} serve" if version == "0.5.23" else f"{fake} -m sglang.launch_server"
    settings, build = launched(results, command, make_model(tmp_path / "model")), build_of(results)
    with runlock.acquire(build.lock):
        async with await Fleet.join(settings, build, "a", 0) as fleet, new_session() as session:
            _, _, ids = await send(fleet, session, settings, [5, 6, 7])
            assert ids is not None
            await until(lambda: [s["state"] for s in state(settings)["servers"]] == ["ready"] * 2, "both servers")
            servers = state(settings)["servers"]
            assert [server["name"] for server in servers] == ["gpu0", "gpu1"]
            assert all(server["effective_cap"] == server["requested_cap"] == 4 for server in servers)
            assert all(server["resident_bytes"] > 1 << 20 and Path(server["log"]).exists() for server in servers)
            pids = [server["pid"] for server in servers]
            trees = [process.pid for pid in pids for process in psutil.Process(pid).children(recursive=True)]
            assert len(trees) >= 2
    started = calls(tmp_path / "bin")
    assert len(calls(tmp_path / "bin", "--help")) == 1, "asked once what it knows"
    assert sorted(call["env"]["CUDA_VISIBLE_DEVICES"] for call in started) == ["0", "1"]
    ports = [call["argv"][call["argv"].index(flag) + 1] for call in started for flag in ("--port", "--nccl-port")]
    assert len(set(ports)) == 4
    for call in started:
        assert ("NEXTN" in call["argv"]) and ("--disable-radix-cache" in call["argv"])
        assert call["env"]["SGLANG_TIMEOUT_KEEP_ALIVE"] == "120"
        assert ("SGLANG_ENABLE_SPEC_V2" in call["env"]) == (version == "0.5.11")
    await until(lambda: not any(psutil.pid_exists(pid) for pid in [*pids, *trees]), "all of both trees to go")


async def test_failing_starts_are_tried_again(results: Path, tmp_path: Path) -> None:
    """About one start in five fails (facts: SGLang #28431); here the first two do."""
    log = str(tmp_path / "sim-{gpu}.jsonl")
    config = {**SIM, "log": log, "faults": [{"kind": "start_fail", "starts": [1, 2]}]}
    fake = fake_sglang(tmp_path / "bin", config)
    settings = launched(results, f"{fake} serve", make_model(tmp_path / "model"), gpus=[0])
    async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
        await asyncio.wait_for(fleet.lease(), 30)
        assert len(calls(tmp_path / "bin")) == 3
        ports = {call["argv"][call["argv"].index("--port") + 1] for call in calls(tmp_path / "bin")}
        assert len(ports) == 3, "each start at ports of its own"


async def test_starts_are_bounded_and_the_reason_is_told(results: Path, tmp_path: Path) -> None:
    fake = fake_sglang(tmp_path / "bin", {**SIM, "faults": [{"kind": "start_fail", "code": 7}]})
    settings = launched(results, f"{fake} serve", make_model(tmp_path / "model"), gpus=[0])
    async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
        with pytest.raises(NoServers, match=r"No server can be used: gpu0 ended with exit code 7"):
            await asyncio.wait_for(fleet.lease(), 30)
    assert len(calls(tmp_path / "bin")) == 3  # timing.starts


async def test_flags_that_sglang_refuses_stop_the_run_at_once(results: Path, tmp_path: Path) -> None:
    fake = fake_sglang(tmp_path / "bin", SIM)
    settings = launched(results, f"{fake} serve", make_model(tmp_path / "model"), gpus=[0], args={"no-such": 1})
    async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
        with pytest.raises(SetupFault, match=r"refuses its flags \(unrecognized arguments: --no-such 1\)"):
            await asyncio.wait_for(fleet.lease(), 30)
    assert len(calls(tmp_path / "bin")) == 1


async def test_a_command_that_is_not_there_stops_the_run_at_once(results: Path, tmp_path: Path) -> None:
    settings = launched(results, str(tmp_path / "no-sglang serve"), make_model(tmp_path / "model"), gpus=[0])
    async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
        with pytest.raises(SetupFault, match="make sglang-venv"):
            await asyncio.wait_for(fleet.lease(), 30)


async def test_scheduler_killed_server_restarted_with_its_tree_gone(results: Path, tmp_path: Path) -> None:
    fake = fake_sglang(tmp_path / "bin", {**SIM, "kill_delay_s": 0.2})
    settings = launched(results, f"{fake} serve", make_model(tmp_path / "model"), gpus=[0])
    async with await Fleet.join(settings, build_of(results), "a", 0) as fleet, new_session() as session:
        lease = await fleet.lease()
        await until(lambda: state(settings)["servers"][0]["pid"] is not None, "the pid")
        first = state(settings)["servers"][0]["pid"]
        (scheduler,) = psutil.Process(first).children()
        scheduler.send_signal(signal.SIGKILL)
        await asyncio.wait_for(fleet.lost(lease).wait(), 15)
        after = await fleet.release(lease, answered(0, ok=False, fault=Fault.RESET))
        assert after.server_died
        _, _, ids = await asyncio.wait_for(send(fleet, session, settings, [5, 6, 7]), 20)
        assert ids is not None and not psutil.pid_exists(first)


async def test_server_that_ignores_sigterm_is_killed(results: Path, tmp_path: Path) -> None:
    """0.5.11 did not leave on SIGTERM for 11 minutes (golden/README.md)."""
    fake = fake_sglang(tmp_path / "bin", {**SIM, "faults": [{"kind": "ignore_sigterm"}]})
    settings, build = launched(results, f"{fake} serve", make_model(tmp_path / "model"), gpus=[0]), build_of(results)
    with runlock.acquire(build.lock):
        async with await Fleet.join(settings, build, "a", 0) as fleet:
            await fleet.lease()
            await until(lambda: state(settings)["servers"][0]["pid"] is not None, "the pid")
            pid = state(settings)["servers"][0]["pid"]
    await until(lambda: not psutil.pid_exists(pid), "the server to be killed", 15)
    await until(lambda: not Home.of(settings).alive(), "the fleet to leave")


async def test_a_hung_server_is_killed_and_restarted(results: Path, tmp_path: Path) -> None:
    log = str(tmp_path / "sim-{gpu}.jsonl")
    config = {**SIM, "log": log, "faults": [{"kind": "hang", "health": 503, "at": [3], "starts": [1]}]}
    config["health_timeout_s"] = 0.2
    fake = fake_sglang(tmp_path / "bin", config)
    settings = launched(results, f"{fake} serve", make_model(tmp_path / "model"), gpus=[0])
    async with await Fleet.join(settings, build_of(results), "a", 0) as fleet, new_session() as session:
        answers = [await asyncio.wait_for(send(fleet, session, settings, [5, 6, n]), 40) for n in range(4)]
        assert [ids is not None for _, _, ids in answers].count(False) == 1
        await until(lambda: state(settings)["servers"][0]["restarts"] == 1, "the count")


async def test_a_server_gone_bad_is_drained_and_restarted(results: Path, tmp_path: Path) -> None:
    fake = fake_sglang(tmp_path / "bin", SIM)
    settings = launched(results, f"{fake} serve", make_model(tmp_path / "model"), gpus=[0])
    async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
        kept = await fleet.lease()
        for number in range(11):  # the sixth bad one is the last
            await fleet.release(await fleet.lease(), answered(100, degenerate=number % 2 == 0))
        waiting = asyncio.create_task(fleet.lease())
        await until(lambda: state(settings)["servers"][0]["state"] == "draining", "the drain")
        assert not fleet.lost(kept).is_set(), "the last answers come"
        await fleet.release(kept, answered())
        await asyncio.wait_for(waiting, 20)
        assert "answers repeat themselves endlessly" in Home.of(settings).log.read_text()


async def test_why_a_server_is_capped(results: Path, tmp_path: Path) -> None:
    """Mamba slots // slots a request, and what lifts it."""
    fake = fake_sglang(tmp_path / "bin", {**SIM, "instant": False, "time_scale": 50.0, "mtp": True})
    given = {"disable-radix-cache": False, "mamba-radix-cache-strategy": "extra_buffer", "max-mamba-cache-size": 10}
    settings = launched(results, f"{fake} serve", make_model(tmp_path / "model"), gpus=[0], args=given)
    async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
        await fleet.lease()
        await until(lambda: state(settings)["servers"][0]["state"] == "ready", "the state")
        server = state(settings)["servers"][0]
        assert (server["effective_cap"], server["requested_cap"]) == (2, 4)
        assert "10" in server["cap_reason"] and "// 5" in server["cap_reason"]
        assert "max-mamba-cache-size" in server["cap_reason"]


async def test_model_is_served_from_its_copy(results: Path, tmp_path: Path) -> None:
    fake, cache = fake_sglang(tmp_path / "bin", SIM), tmp_path / "ram"
    cache.mkdir()
    model = make_model(tmp_path / "model")
    settings = launched(results, f"{fake} serve", model, gpus=[0], model_cache=str(cache))
    async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
        await fleet.lease()
    (call,) = calls(tmp_path / "bin")
    served = Path(call["argv"][call["argv"].index("--model-path") + 1])
    assert served.is_relative_to(cache) and (served / "model.safetensors").exists()
    assert call["argv"][call["argv"].index("--served-model-name") + 1] == str(model)
