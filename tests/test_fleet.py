"""The fleet with real processes: started once, shared, survived, adopted, and gone when its run is over."""

from __future__ import annotations

import asyncio
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

from fleetjob import answered, send
from fleetkit import build_of, fleet_pid, hurried, hurry, results, server_state, settings_of, state, until
from shardmill import runlock
from shardmill.engines import Fault
from shardmill.engines.choose import new_session
from shardmill.errors import NoServers, SetupFault, ShardmillError
from shardmill.files import read_json, write_json
from shardmill.fleet import command
from shardmill.fleet.client import Fleet
from shardmill.home import Home
from simserver import SimFleet

__all__ = ["hurried", "results"]  # fixtures

JOB = Path(__file__).parent / "fleetjob.py"


# One fleet for all


def test_five_jobs_at_once_start_one_fleet_and_share_its_limit(results: Path, tmp_path: Path) -> None:
    timed = {"step_base_s": 0.01, "step_per_request_s": 0.0, "length_mean": 8.0, "mamba_slots": None}
    with SimFleet(2, timed, folder=tmp_path / "sims") as sims:
        settings = settings_of(results, *sims.urls)
        given = tmp_path / "settings.json"
        write_json(given, settings.as_dict())
        jobs = [
            subprocess.Popen(
                [sys.executable, str(JOB), str(given), str(build_of(results).root), str(order), "12"],
                stdout=subprocess.PIPE,
                text=True,
            )
            for order in range(5)
        ]
        done = [json.loads(job.communicate(timeout=60)[0]) for job in jobs]
        assert [job["answers"] for job in done] == [12] * 5
        assert Home.of(settings).log.read_text().count(" at work for ") == 1
        received = [line for line in sims.logs() if line["event"] == "received" and line["rid"].count("-") < 2]
        assert len(received) >= 60
        for index in range(2):
            assert most_at_once(sims.log(index)) <= 4 + 1, "generate.concurrency over all jobs, and one probe"
            assert sum(job["servers"].get(sims.urls[index].removeprefix("http://"), 0) for job in done) > 12


def most_at_once(log: list[dict[str, Any]]) -> int:
    running = most = 0
    for line in log:
        running += {"received": 1, "done": -1}.get(line["event"], 0)
        most = max(most, running)
    return most


async def test_fleet_leaves_when_the_run_is_over_and_tells_its_jobs(results: Path, tmp_path: Path) -> None:
    with SimFleet(1, {"instant": True}, folder=tmp_path / "sims") as sims:
        settings, build = settings_of(results, *sims.urls), build_of(results)
        lock = runlock.acquire(build.lock)
        async with await Fleet.join(settings, build, "a", 0) as fleet:
            await fleet.lease()
        await asyncio.sleep(2.0)
        assert Home.of(settings).alive(), "between two jobs of a run the fleet stays"
        async with await Fleet.join(settings, build, "b", 1) as fleet:
            lock.release()
            await asyncio.wait_for(fleet.stop_requested.wait(), 5)
        await until(lambda: not Home.of(settings).alive(), "the fleet to leave", 5)


async def test_a_job_that_does_not_leave_is_left(results: Path, tmp_path: Path) -> None:
    with SimFleet(1, {"instant": True}, folder=tmp_path / "sims") as sims:
        settings, build = settings_of(results, *sims.urls), build_of(results)
        with runlock.acquire(build.lock):
            fleet = await Fleet.join(settings, build, "a", 0)
            await fleet.lease()
        await until(lambda: not Home.of(settings).alive(), "the fleet to leave", 8)
        await fleet.__aexit__(None, None, None)


async def test_the_lease_of_a_killed_job_is_free_again(results: Path, tmp_path: Path) -> None:
    with SimFleet(1, {"instant": True}, folder=tmp_path / "sims") as sims:
        settings, build = settings_of(results, *sims.urls, generate={"concurrency": 1}), build_of(results)
        first = await Fleet.join(settings, build, "a", 0)
        async with await Fleet.join(settings, build, "b", 1) as second:
            await first.lease()
            waiting = asyncio.create_task(second.lease())
            await asyncio.sleep(0.3)
            assert not waiting.done()
            await first.__aexit__(None, None, None)
            await asyncio.wait_for(waiting, 5)


async def test_a_cancelled_lease_takes_no_place(results: Path, tmp_path: Path) -> None:
    with SimFleet(1, {"instant": True}, folder=tmp_path / "sims") as sims:
        settings = settings_of(results, *sims.urls, generate={"concurrency": 1})
        async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
            held = await fleet.lease()
            waiting = [asyncio.create_task(fleet.lease()) for _ in range(5)]
            await asyncio.sleep(0.2)
            for task in waiting[:4]:
                task.cancel()
            await fleet.release(held, answered())
            await fleet.release(await asyncio.wait_for(waiting[4], 5), answered())
            await asyncio.wait_for(fleet.lease(), 5)


# Servers that fail


async def test_a_dead_server_is_left_and_let_back_in(results: Path, tmp_path: Path) -> None:
    with SimFleet(2, {"instant": True}, folder=tmp_path / "sims") as sims:
        settings = settings_of(results, *sims.urls, generate={"concurrency": 2})
        names = [url.removeprefix("http://") for url in sims.urls]
        async with await Fleet.join(settings, build_of(results), "a", 0) as fleet, new_session() as session:
            await until(lambda: [server_state(settings, i) for i in (0, 1)] == ["ready"] * 2, "both servers")
            sims.kill(0)
            seen = [await send(fleet, session, settings, [5, 6, n]) for n in range(8)]
            failed = [after for server, after, ids in seen if ids is None]
            assert all(after.server_died for after in failed) and len(failed) <= 2
            assert {server for server, _, ids in seen if ids is not None} == {names[1]}
            sims.start(0)
            await until(lambda: server_state(settings, 0) == "ready", "the server to come back")
            leases = [await fleet.lease() for _ in range(4)]
            assert {lease.server for lease in leases} == set(names)


async def test_a_hung_server_is_found_and_its_leases_are_lost(results: Path, tmp_path: Path) -> None:
    """/health stays 200 and nothing is generated: only a real probe finds it."""
    with SimFleet(2, {"instant": True}, folder=tmp_path / "sims") as sims:
        settings = settings_of(results, *sims.urls, generate={"concurrency": 1})
        async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
            await until(lambda: [server_state(settings, i) for i in (0, 1)] == ["ready"] * 2, "both servers")
            # From some server's answer it is known how long they take.
            await fleet.release(await fleet.lease(), answered())
            leases = [await fleet.lease() for _ in range(2)]
            hung = next(lease for lease in leases if lease.url == sims.urls[0])
            sims.faults(0, {"kind": "hang", "health": 200})
            await asyncio.wait_for(fleet.lost(hung).wait(), 20)
            assert not any(fleet.lost(lease).is_set() for lease in leases if lease is not hung)
            await until(lambda: server_state(settings, 0) != "ready", "the state")
            for lease in leases:
                await fleet.release(lease, answered())
            assert (await fleet.lease()).url == sims.urls[1]


async def test_a_full_server_whose_first_answers_take_long_is_well(results: Path, tmp_path: Path) -> None:
    """Its probes wait behind them, and time out. Nobody has answered yet, so nobody knows how long that should take."""
    sims = {"max_running_requests": 1, "length_mean": 4000, "length_min": 4000, "length_cap": 8000, "mamba_slots": None}
    with SimFleet(1, sims, folder=tmp_path / "sims") as fleet_of_sims:
        settings = settings_of(results, *fleet_of_sims.urls)
        async with await Fleet.join(settings, build_of(results), "a", 0) as fleet, new_session() as session:
            await until(lambda: server_state(settings) == "ready", "the server")
            lease = await fleet.lease()
            payload = {"input_ids": [11, 12], "sampling_params": {"max_new_tokens": 4000, "temperature": 0}, "rid": "r"}
            working = asyncio.create_task(session.post(f"{lease.url}/generate", json=payload))
            # Three probes of 2 s each, 0.5 s apart, after 1 s, took it out.
            await asyncio.sleep(11)
            assert not working.done() and not fleet.lost(lease).is_set() and server_state(settings) == "ready"
            assert Home.of(settings).log.read_text().count("ready") == 1
            working.cancel()


async def test_one_failed_probe_takes_no_busy_server_out(results: Path, tmp_path: Path) -> None:
    with SimFleet(1, {"instant": True}, folder=tmp_path / "sims") as sims:
        settings = settings_of(results, *sims.urls)
        async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
            await until(lambda: server_state(settings) == "ready", "the server")
            await fleet.lease()
            sims.faults(0, {"kind": "health", "status": 503, "seconds": 0.6})
            await asyncio.sleep(2.5)
            assert Home.of(settings).log.read_text().count("ready") == 1


async def test_faults_in_a_row_take_a_server_out_until_it_is_well(results: Path, tmp_path: Path) -> None:
    with SimFleet(1, {"instant": True}, folder=tmp_path / "sims") as sims:
        settings = settings_of(results, *sims.urls, generate={"patience_s": 30.0})
        async with await Fleet.join(settings, build_of(results), "a", 0) as fleet, new_session() as session:
            await until(lambda: server_state(settings) == "ready", "the server")
            sims.faults(0, {"kind": "error_500"})
            for number in range(3):
                _, after, ids = await send(fleet, session, settings, [7, 8, number])
                assert ids is None and not after.server_died
            await until(lambda: server_state(settings) in ("suspect", "starting"), "the server to leave")
            waiting = asyncio.create_task(send(fleet, session, settings, [9, 9]))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            sims.faults(0, [])
            assert (await asyncio.wait_for(waiting, 10))[2] is not None


async def test_a_server_gone_bad_is_left(results: Path, tmp_path: Path) -> None:
    with SimFleet(2, {"instant": True}, folder=tmp_path / "sims") as sims:
        settings = settings_of(results, *sims.urls, generate={"concurrency": 1})
        async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
            await until(lambda: [server_state(settings, i) for i in (0, 1)] == ["ready"] * 2, "both servers")
            for _ in range(80):
                leases = [await fleet.lease() for _ in range(2)]
                for lease in leases:
                    await fleet.release(lease, answered(100, accept_length=3.3))
            for _ in range(40):
                lease = await fleet.lease()
                bad = lease.url == sims.urls[0]
                await fleet.release(lease, answered(100, accept_length=1.0 if bad else 3.3))
            assert "accept length fell from 3.30 to" in Home.of(settings).log.read_text()
            assert (await fleet.lease()).url == sims.urls[1]


# Patience and refusals


async def test_no_server_left_fails_after_patience_with_the_reason(results: Path, tmp_path: Path) -> None:
    with SimFleet(1, {"instant": True}, folder=tmp_path / "sims") as sims:
        settings = settings_of(results, *sims.urls)
        async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
            held = await fleet.lease()
            sims.kill(0)
            begun = time.monotonic()
            after = await fleet.release(held, answered(0, ok=False, fault=Fault.RESET))
            assert after.server_died
            with pytest.raises(NoServers, match=r"No server was left for 2 s \(generate.patience_s\): 127.*nothing"):
                await fleet.lease()
            assert 1.5 < time.monotonic() - begun < 8


@pytest.mark.parametrize(
    ("server", "changes", "words"),
    [
        ({"context": 1024}, {}, r"context of 1024 tokens, but model.context is 2048"),
        ({"api_key": "k"}, {}, r"401 and wants an API key"),
    ],
)
async def test_a_server_that_does_not_fit_stops_the_run(
    results: Path, tmp_path: Path, server: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with SimFleet(1, {"instant": True, **server}, folder=tmp_path / "sims") as sims:
        settings = settings_of(results, *sims.urls, generate={"patience_s": 60.0}, **changes)
        async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
            with pytest.raises(SetupFault, match=words):
                await asyncio.wait_for(fleet.lease(), 20)


async def test_another_name_is_warned_of_and_nothing_more(results: Path, tmp_path: Path) -> None:
    with SimFleet(1, {"instant": True, "model": "Qwen9"}, folder=tmp_path / "sims") as sims:
        settings = settings_of(results, *sims.urls)
        async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
            await fleet.lease()
            await until(lambda: bool(state(settings)["warnings"]), "the warning")
            assert "calls its model Qwen9, and the config SmolLM2" in state(settings)["warnings"][0]


# Endpoints that come and go


async def test_endpoints_file_is_read_again(results: Path, tmp_path: Path) -> None:
    with SimFleet(2, {"instant": True}, folder=tmp_path / "sims") as sims:
        listed = tmp_path / "endpoints"
        settings = settings_of(
            results, servers={"engine": "sglang", "endpoints_file": str(listed)}, generate={"patience_s": 30.0}
        )
        async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
            waiting = asyncio.create_task(fleet.lease())
            await asyncio.sleep(0.5)
            assert not waiting.done()
            listed.write_text(f"# one of two\n{sims.urls[0]}/  # the first\n")
            first = await asyncio.wait_for(waiting, 10)
            assert first.url == sims.urls[0]
            listed.write_text(f"{sims.urls[1]}\n")
            await until(lambda: [s["url"] for s in state(settings)["servers"]] == [sims.urls[1]], "the change")
            await until(lambda: server_state(settings) == "ready", "the second server")
            assert {(await fleet.lease()).url for _ in range(3)} == {sims.urls[1]}
            await fleet.release(first, answered())
            listed.write_text("no url\n")
            await asyncio.sleep(0.5)
            assert (await fleet.lease()).url == sims.urls[1], "a slip of the pen takes no server away"
            assert "Line 1 of the endpoints file" in Home.of(settings).log.read_text()


# kill -9


async def test_jobs_outlive_a_killed_fleet_and_keep_their_leases(results: Path, tmp_path: Path) -> None:
    with SimFleet(1, {"instant": True}, folder=tmp_path / "sims") as sims:
        settings = settings_of(results, *sims.urls, generate={"concurrency": 2})
        async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
            held = [await fleet.lease() for _ in range(2)]
            waiting = asyncio.create_task(fleet.lease())
            await asyncio.sleep(0.1)
            first = fleet_pid(settings)
            os.kill(first, signal.SIGKILL)
            await until(lambda: fleet_pid(settings) not in (0, first), "another fleet")
            await until(lambda: server_state(settings) == "ready", "the server")
            await asyncio.sleep(0.3)
            assert not waiting.done(), "what is in flight from before still counts"
            await fleet.release(held[0], answered())
            third = await asyncio.wait_for(waiting, 10)
            fourth = asyncio.create_task(fleet.lease())
            await asyncio.sleep(0.3)
            assert not fourth.done()
            await fleet.release(held[1], answered())
            assert (await asyncio.wait_for(fourth, 10)).id != third.id


async def test_a_fleet_that_hangs_is_replaced(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch, silent_s=1.0)
    with SimFleet(1, {"instant": True}, folder=tmp_path / "sims") as sims:
        settings = settings_of(results, *sims.urls, generate={"concurrency": 2})
        build = build_of(results)
        async with await Fleet.join(settings, build, "a", 0) as a, await Fleet.join(settings, build, "b", 1) as b:
            held = await a.lease()
            await until(lambda: len(state(settings)["jobs"]) == 2, "both jobs in the state")
            hung = fleet_pid(settings)
            os.kill(hung, signal.SIGSTOP)
            await asyncio.wait_for(b.lease(), 20)
            second = fleet_pid(settings)
            assert second not in (0, hung)
            waiting = asyncio.create_task(b.lease())
            await asyncio.sleep(2.5)
            assert not waiting.done(), "what is in flight from before still counts"
            await a.release(held, answered())
            await asyncio.wait_for(waiting, 5)
            assert fleet_pid(settings) == second, "both jobs saw it hang, and one fleet took its place"


async def test_a_job_that_stood_still_itself_kills_no_fleet(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, silent_s=0.5)
    with SimFleet(1, {"instant": True}, folder=tmp_path / "sims") as sims:
        settings = settings_of(results, *sims.urls)
        async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
            await fleet.lease()
            pid = fleet_pid(settings)
            for _ in range(3):
                time.sleep(1.2)  # the whole loop, as SIGSTOP would
                await asyncio.sleep(0.1)
            await asyncio.wait_for(fleet.lease(), 5)
            assert fleet_pid(settings) == pid


async def test_a_hung_fleet_is_a_sentence_by_hand_and_goes_down(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_LOOK_S", 0.5)
    with SimFleet(1, {"instant": True}, folder=tmp_path / "sims") as sims:
        settings = settings_of(results, *sims.urls)
        async with await Fleet.join(settings, build_of(results), "a", 0):
            pass
        hung = fleet_pid(settings)
        os.kill(hung, signal.SIGSTOP)
        with pytest.raises(ShardmillError, match=rf"process {hung}\) does not answer; `shardmill servers down`"):
            await command.look(settings)
        await command.down(settings)
        assert not Home.of(settings).alive()


async def test_embedded_server_killed_restarted_adopted_and_gone(results: Path) -> None:
    settings, build = settings_of(results), build_of(results)
    with runlock.acquire(build.lock):
        async with await Fleet.join(settings, build, "a", 0) as fleet, new_session() as session:
            _, _, before = await send(fleet, session, settings, [1, 2, 3, 4])
            assert before is not None

            # A server dies under a request.
            held = await fleet.lease()
            await until(lambda: server_state(settings) == "ready", "the state")
            first = state(settings)["servers"][0]["pid"]
            os.kill(first, signal.SIGKILL)
            after = await fleet.release(held, answered(0, ok=False, fault=Fault.RESET))
            assert after.server_died
            _, after, again = await send(fleet, session, settings, [1, 2, 3, 4])
            assert again == before and not after.server_died
            await until(lambda: state(settings)["servers"][0]["pid"] not in (first, None), "the new server's pid")
            second = state(settings)["servers"][0]["pid"]
            assert state(settings)["servers"][0]["restarts"] == 1

            # The fleet dies: the server goes on, and the next fleet takes it over.
            killed = fleet_pid(settings)
            os.kill(killed, signal.SIGKILL)
            await until(lambda: fleet_pid(settings) not in (0, killed), "another fleet")
            _, _, again = await send(fleet, session, settings, [1, 2, 3, 4])
            assert again == before
            assert f"taken over, process {second}" in Home.of(settings).log.read_text()
            assert psutil.pid_exists(second)
    await until(lambda: not psutil.pid_exists(second), "the server to go with its run")
    await until(lambda: not Home.of(settings).alive(), "the fleet to go with its run")


async def test_servers_outlive_no_killed_fleet_that_nobody_replaces(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, orphan_s=2.0)
    settings = settings_of(results)
    async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
        await fleet.lease()
    record = read_json(Home.of(settings).servers / "embedded-0.json")
    os.kill(fleet_pid(settings), signal.SIGKILL)
    await asyncio.sleep(0.5)
    assert psutil.pid_exists(record["pid"])
    await until(lambda: not psutil.pid_exists(record["pid"]), "the orphan to go", 8)
    await until(lambda: not psutil.pid_exists(record["guardian"]), "its guardian to go", 8)


async def test_a_server_dies_with_its_guardian(results: Path) -> None:
    settings = settings_of(results)
    async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
        await fleet.lease()
        record = read_json(Home.of(settings).servers / "embedded-0.json")
        os.kill(record["guardian"], signal.SIGKILL)
        await until(lambda: not psutil.pid_exists(record["pid"]), "the server to go", 5)
        await asyncio.wait_for(fleet.lease(), 20)


async def test_a_server_that_cannot_start_fails_with_its_own_words(results: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    settings = settings_of(results, servers={"engine": "llamacpp", "args": {"model": str(broken)}})
    async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
        with pytest.raises(NoServers, match=r"embedded-0 embedded server: .*broken.gguf did not start"):
            await asyncio.wait_for(fleet.lease(), 40)


async def test_a_wrong_flag_is_the_set_ups_fault_and_is_not_tried_again(results: Path) -> None:
    settings = settings_of(results, servers={"engine": "llamacpp", "args": {"no-such-flag": 1}})
    async with await Fleet.join(settings, build_of(results), "a", 0) as fleet:
        with pytest.raises(SetupFault, match="no-such-flag"):
            await asyncio.wait_for(fleet.lease(), 20)


async def test_a_start_that_is_cut_short_leaves_nothing(results: Path) -> None:
    settings, build = settings_of(results), build_of(results)
    with runlock.acquire(build.lock):
        async with await Fleet.join(settings, build, "a", 0):
            pass
        os.kill(fleet_pid(settings), signal.SIGTERM)
        await until(lambda: not Home.of(settings).alive(), "the fleet to leave", 20)
        servers = Home.of(settings).servers
        assert not [lock for lock in servers.glob("*.lock") if runlock.holder(lock) is not None]
