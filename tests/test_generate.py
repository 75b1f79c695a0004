"""A generate job against simulated servers: every prompt exactly once, whatever they do."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from genkit import (
    FAST,
    SHARD,
    StandIn,
    completions,
    conversation_id,
    expected,
    generate,
    make_settings,
    make_shard,
    random_prompt,
)
from shardmill.errors import DataError, NoServers, SetupFault, ShardError, ShardmillError
from shardmill.files import read_json
from shardmill.generate.ask import DEATHS
from shardmill.generate.job import generate_shard
from shardmill.journal import open_journal, read_records
from shardmill.paths import BuildPaths
from shardmill.schemas import COMPLETIONS, read_notes, write_table
from shardmill.settings import Settings
from simserver import SimFleet, free_ports, prompt_hash
from simserver.faults import ANSWER_KINDS, REFUSAL_KINDS

SOAK = bool(os.environ.get("SHARDMILL_SOAK"))
CONFIG: dict[str, Any] = {"instant": True, "mtp": True, "length_mean": 40}
# Not a server's faults by shardmill's rules: a refused prompt, and a wrong set-up.
OWN_RULES = {"error_400", "error_400_string", "error_400_object", "unauthorized", "forbidden", "not_found"}
DEGENERATE = {"empty_output", "zero_loop", "cycle_loop"}
FAULTS = sorted({*REFUSAL_KINDS, *ANSWER_KINDS} - OWN_RULES)


HASTY = replace(FAST, backoff_s=0.01, backoff_most_s=0.02)


@pytest.fixture(scope="module")
def fleet() -> Iterator[SimFleet]:
    with SimFleet(2, CONFIG) as servers:
        yield servers


@pytest.fixture(autouse=True)
def well(request: pytest.FixtureRequest) -> Iterator[None]:
    """Servers without faults for the next test."""
    yield
    if "fleet" in request.fixturenames:
        servers: SimFleet = request.getfixturevalue("fleet")
        for number in range(len(servers)):
            servers.faults(number, [])


def set_faults(servers: SimFleet, *rules: Mapping[str, Any]) -> None:
    for number in range(len(servers)):
        servers.faults(number, list(rules))


def assert_right(build: BuildPaths, settings: Settings, prompts: list[list[int]], config: Mapping[str, Any]) -> None:
    """Every prompt once, none failed, each answer what a server without faults gives."""
    rows = completions(build)
    assert [row["conversation_id"] for row in rows] == sorted(conversation_id(n) for n in range(len(prompts)))
    assert [row["reason"] for row in rows if row["status"] != "ok"] == []
    right = expected(config, prompts, settings)
    assert [row["conversation_id"] for row in rows if row["output_ids"] != right[row["conversation_id"]]] == []


def test_rows_are_what_the_contract_says(fleet: SimFleet, tmp_path: Path) -> None:
    settings, prompts = make_settings(fleet.urls), [random_prompt(n) for n in range(40)]
    build = make_shard(tmp_path / "b-1", settings, prompts)
    generate(settings, build)
    assert pq.read_schema(build.completions(SHARD)).equals(COMPLETIONS)
    assert_right(build, settings, prompts, CONFIG)
    by_id = {conversation_id(number): (number, ids) for number, ids in enumerate(prompts)}
    for row in completions(build):
        number, ids = by_id[row["conversation_id"]]
        assert row["prompt_ids"] == ids and row["prompt_tokens"] == len(ids)
        assert row["source_id"] == f"source-{number}" and row["turn"] == 0 and row["attempts"] == 1
        assert row["completion_tokens"] == len(row["output_ids"])
        assert row["finish_reason"] == ("stop" if row["output_ids"][-1] == 2 else "length")
        assert "<|im_end|>" not in row["text"] and row["text"]
        assert row["server"] in fleet.urls and row["latency_s"] > 0 and row["reused_from"] is None
        assert 1 <= row["accept_length"] <= 4
        assert abs(row["finished_at"].timestamp() - time.time()) < 60
    progress = read_json(build.progress(SHARD))
    assert (progress["state"], progress["ok"], progress["attempts"], progress["faults"]) == ("done", 40, 40, {})
    assert progress["tokens"] == sum(row["completion_tokens"] for row in completions(build))


@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_alone(fleet: SimFleet, tmp_path: Path, kind: str) -> None:
    timeout = 0.5 if kind == "hang_request" else 20
    settings = make_settings(fleet.urls, generate={"request_timeout_s": timeout})
    prompts = [random_prompt(n) for n in range(100)]
    build = make_shard(tmp_path / "b-1", settings, prompts)
    before = len(fleet.logs())
    set_faults(fleet, {"kind": kind, "p": 0.1, **({"seconds": 0.1} if kind == "slow" else {})})
    generate(settings, build)
    assert_right(build, settings, prompts, CONFIG)
    lines = fleet.logs()[before:]
    fired = sum(line["event"] == "received" and line["fault"] is not None for line in lines)
    received = Counter(line["prompt"] for line in lines if line["event"] == "received")
    assert fired > 0 and len(received) == 100
    # Sent twice is no more than what was spoilt, and a control for each degenerate answer.
    each = 2 if kind in DEGENERATE else 1
    assert received.total() - 100 <= each * fired, f"{received.total()} requests for 100 prompts and {fired} faults"


def test_answers_cut_at_their_stop_are_counted_in_the_file(fleet: SimFleet, tmp_path: Path) -> None:
    """Exactly, also when all but the journal was lost on the way."""
    settings = make_settings(fleet.urls)
    build = make_shard(tmp_path / "b-1", settings, [random_prompt(n) for n in range(60)])
    before = len(fleet.logs())
    set_faults(fleet, {"kind": "junk_after_eos", "p": 0.5})
    generate(settings, build)
    fired = sum(line["event"] == "received" and line["fault"] is not None for line in fleet.logs()[before:])
    # An answer that the limit cuts has no stop token for junk to follow.
    cut = read_notes(build.completions(SHARD))
    assert cut is not None and 0 < cut["cut_at_stop"] <= fired
    assert cut["cut_at_stop"] == read_json(build.progress(SHARD))["cut_at_stop"]
    build.completions(SHARD).unlink()
    build.progress(SHARD).unlink()
    generate(settings, build)
    assert read_notes(build.completions(SHARD)) == cut


def test_all_faults_together(fleet: SimFleet, tmp_path: Path) -> None:
    settings = make_settings(fleet.urls, generate={"request_timeout_s": 0.5, "patience_s": 60})
    prompts = [random_prompt(n) for n in range(300 if SOAK else 80)]
    build = make_shard(tmp_path / "b-1", settings, prompts)
    set_faults(fleet, *({"kind": kind, "p": 0.1 if SOAK else 0.02, "seconds": 0.1} for kind in FAULTS))
    generate(settings, build)
    assert_right(build, settings, prompts, CONFIG)


def test_answers_are_spread_over_a_hung_server(tmp_path: Path) -> None:
    with SimFleet(2, CONFIG) as servers:
        servers.faults(0, {"kind": "hang_request"})
        settings = make_settings(servers.urls, generate={"request_timeout_s": 0.3})
        prompts = [random_prompt(n) for n in range(20)]
        build = make_shard(tmp_path / "b-1", settings, prompts)
        generate(settings, build)
        assert_right(build, settings, prompts, CONFIG)
        assert {row["server"] for row in completions(build)} == {servers.urls[1]}
        # Whoever timed out was sent again under a new id, and never back to where it timed out.
        asked = [line["rid"] for line in servers.logs() if line["event"] == "received"]
        assert len(asked) == len(set(asked))


# What is the prompt's own


@pytest.mark.parametrize(("kind", "reason"), [("empty_output", "empty"), ("cycle_loop", "repetition")])
def test_the_same_degenerate_answer_after_all_attempts_is_the_prompts(
    fleet: SimFleet, tmp_path: Path, kind: str, reason: str
) -> None:
    settings, prompts = make_settings(fleet.urls), [random_prompt(n) for n in range(30)]
    build = make_shard(tmp_path / "b-1", settings, prompts)
    set_faults(fleet, {"kind": kind, "prompts": [prompt_hash(prompts[3])]})
    generate(settings, build)
    rows = {row["conversation_id"]: row for row in completions(build)}
    failed = rows[conversation_id(3)]
    assert (failed["status"], failed["reason"]) == ("failed", reason)
    assert settings.generate.attempts <= failed["attempts"] <= 2 * settings.generate.attempts
    assert (failed["output_ids"], failed["text"], failed["finish_reason"]) == ([], None, None)
    assert (failed["prompt_tokens"], failed["completion_tokens"]) == (0, 0)
    assert failed["prompt_ids"] == prompts[3]
    assert sum(row["status"] == "ok" for row in rows.values()) == 29
    assert read_json(build.progress(SHARD))["failed"] == {reason: 1}


def test_a_server_that_gives_everyone_degenerate_answers_fails_no_prompt(tmp_path: Path) -> None:
    with SimFleet(1, CONFIG) as servers:
        settings, prompts = make_settings(servers.urls), [random_prompt(n) for n in range(40)]
        build = make_shard(tmp_path / "b-1", settings, prompts)
        # After 10 answers the server loops until it is well again, which no release tells.
        servers.faults(0, {"kind": "zero_loop", "at": list(range(11, 400))})
        generate(settings, build)
        assert_right(build, settings, prompts, CONFIG)


def test_a_prompt_longer_than_the_context_is_too_long_without_a_retry(fleet: SimFleet, tmp_path: Path) -> None:
    settings, prompts = make_settings(fleet.urls), [random_prompt(n) for n in range(10)]
    prompts[4] = [11] * 9000
    build = make_shard(tmp_path / "b-1", settings, prompts)
    before = len(fleet.logs())
    generate(settings, build)
    rows = {row["conversation_id"]: row for row in completions(build)}
    assert (rows[conversation_id(4)]["reason"], rows[conversation_id(4)]["attempts"]) == ("too_long", 0)
    assert sum(row["status"] == "ok" for row in rows.values()) == 9
    assert sum(line["event"] == "refused" for line in fleet.logs()[before:]) == 1


def test_a_server_that_keeps_room_for_drafts_gets_a_smaller_request(fleet: SimFleet, tmp_path: Path) -> None:
    settings = make_settings(fleet.urls, sampling={"max_new_tokens": 4000})
    prompt = [11 + n for n in range(8000)]
    build = make_shard(tmp_path / "b-1", settings, [prompt], max_new_tokens=192)
    generate(settings, build)
    (row,) = completions(build)
    assert row["status"] == "ok"


def test_an_id_outside_the_vocabulary_is_never_sent(fleet: SimFleet, tmp_path: Path) -> None:
    settings = make_settings(fleet.urls)
    build = make_shard(tmp_path / "b-1", settings, [[10, 49152], [10, 11], [], [1, 10]])
    before = len(fleet.logs())
    generate(settings, build)
    assert Counter(row["reason"] for row in completions(build)) == {"bad_prompt_ids": 2, None: 2}
    assert {line["prompt"] for line in fleet.logs()[before:]} == {prompt_hash([10, 11]), prompt_hash([1, 10])}


def test_a_prompt_that_kills_servers_is_tried_alone_and_then_failed(fleet: SimFleet, tmp_path: Path) -> None:
    settings, prompts = make_settings(fleet.urls), [random_prompt(n) for n in range(20)]
    build = make_shard(tmp_path / "b-1", settings, prompts)
    set_faults(fleet, {"kind": "close_before", "prompts": [prompt_hash(prompts[7])]})
    stand_in = StandIn(fleet.urls)
    stand_in.died = dict.fromkeys(fleet.urls, True)  # what a fleet says whose server is gone after the request
    generate(settings, build, stand_in)
    rows = {row["conversation_id"]: row for row in completions(build)}
    assert rows[conversation_id(7)]["reason"] == "kills_server"
    assert stand_in.alone_leases == 1
    assert len(stand_in.outcomes) == 19 + DEATHS + 1
    assert sum(row["status"] == "ok" for row in rows.values()) == 19


def test_an_innocent_bystander_of_three_deaths_is_answered_alone(fleet: SimFleet, tmp_path: Path) -> None:
    settings, prompts = make_settings(fleet.urls), [random_prompt(n) for n in range(5)]
    build = make_shard(tmp_path / "b-1", settings, prompts)
    hashes = [prompt_hash(prompts[2])]
    fleet.faults(0, {"kind": "close_before", "prompts": hashes, "times": 2})
    fleet.faults(1, {"kind": "close_before", "prompts": hashes, "times": 1})
    stand_in = StandIn(fleet.urls)
    stand_in.died = dict.fromkeys(fleet.urls, True)
    generate(settings, build, stand_in)
    assert_right(build, settings, prompts, CONFIG)
    assert stand_in.alone_leases == 1


# What stops the run


@pytest.mark.parametrize("kind", ["unauthorized", "forbidden", "not_found", "error_400_string", "error_400_object"])
def test_a_wrong_set_up_stops_the_job_with_one_sentence(fleet: SimFleet, tmp_path: Path, kind: str) -> None:
    settings, prompts = make_settings(fleet.urls), [random_prompt(n) for n in range(30)]
    build = make_shard(tmp_path / "b-1", settings, prompts)
    set_faults(fleet, {"kind": kind, "at": list(range(15, 10_000))})
    with pytest.raises(SetupFault) as caught:
        generate(settings, build)
    assert "\n" not in str(caught.value)
    assert not build.completions(SHARD).exists()
    assert read_json(build.progress(SHARD))["state"] == "stopped"


def test_without_servers_it_waits_then_fails_and_keeps_what_it_has(tmp_path: Path) -> None:
    with SimFleet(1, CONFIG) as servers:
        settings = make_settings(servers.urls, generate={"patience_s": 1})
        prompts = [random_prompt(n) for n in range(30)]
        build = make_shard(tmp_path / "b-1", settings, prompts)
        generate(settings, build)
        kept = len(list(read_records(build.journal(SHARD))))
    assert kept == 30
    build.completions(SHARD).unlink()
    empty = make_settings([f"http://127.0.0.1:{free_ports(1)[0]}"], generate={"patience_s": 1})
    more = make_shard(tmp_path / "b-2", empty, [random_prompt(99)])
    stand_in = StandIn([], patience_s=0.3)
    with pytest.raises(NoServers):
        generate(empty, more, stand_in)
    generate(settings, build, StandIn([], patience_s=0.3))  # all of it was in the journal
    assert_right(build, settings, prompts, CONFIG)


def test_a_missing_key_is_said_before_anything_is_sent(
    fleet: SimFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    settings = make_settings(fleet.urls, servers={"api_key_env": "NO_SUCH_KEY"})
    with pytest.raises(SetupFault, match="NO_SUCH_KEY"):
        generate(settings, make_shard(tmp_path / "b-1", settings, [[10, 11]]))


def test_the_end_of_the_run_ends_the_job_within_seconds(tmp_path: Path) -> None:
    with SimFleet(1, {**CONFIG, "instant": False, "length_mean": 3000}) as servers:
        settings = make_settings(servers.urls, sampling={"max_new_tokens": 8000}, generate={"request_timeout_s": 1000})
        build = make_shard(tmp_path / "b-1", settings, [random_prompt(n) for n in range(20)])
        stand_in = StandIn(servers.urls)

        async def join(*_: object) -> StandIn:
            asyncio.get_running_loop().call_later(0.5, stand_in.stop_requested.set)
            return stand_in

        started = time.monotonic()
        with pytest.raises(ShardmillError, match="its run has ended"):
            generate_shard(settings, build, SHARD, join=join, pace=FAST)
        assert time.monotonic() - started < 20  # at once, but for the disk; the answers would take minutes


# Resume


def test_an_empty_shard_is_a_schema_true_file(fleet: SimFleet, tmp_path: Path) -> None:
    """Case 131, for a shard without any row."""
    settings = make_settings(fleet.urls)
    build = make_shard(tmp_path / "b-1", settings, [])
    generate(settings, build, StandIn([]))
    assert pq.read_schema(build.completions(SHARD)).equals(COMPLETIONS)
    assert completions(build) == []


def test_a_shard_of_failed_rows_alone_is_schema_true(fleet: SimFleet, tmp_path: Path) -> None:
    """Case 131: only empty lists."""
    settings = make_settings(fleet.urls)
    build = make_shard(tmp_path / "b-1", settings, [[10] * 9000, [11] * 9000])
    generate(settings, build)
    assert [row["output_ids"] for row in completions(build)] == [[], []]
    assert pq.read_schema(build.completions(SHARD)).equals(COMPLETIONS)


def test_a_torn_journal_is_mended_and_nothing_is_asked_twice(fleet: SimFleet, tmp_path: Path) -> None:
    """Case 121."""
    settings, prompts = make_settings(fleet.urls), [random_prompt(n) for n in range(30)]
    build = make_shard(tmp_path / "b-1", settings, prompts)
    generate(settings, build)
    first = completions(build)
    build.completions(SHARD).unlink()
    journal = build.journal(SHARD)
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 1
    journal.write_bytes(content[:-20])
    before = len(fleet.logs())
    generate(settings, build)
    again = [line["prompt"] for line in fleet.logs()[before:] if line["event"] == "received"]
    assert len(again) == len(set(again)) == 2
    assert [row["output_ids"] for row in completions(build)] == [row["output_ids"] for row in first]
    untouched = sum(a["finished_at"] == b["finished_at"] for a, b in zip(first, completions(build), strict=True))
    assert untouched == 28


def test_rows_of_prompts_that_are_not_there_any_more_are_left_out(fleet: SimFleet, tmp_path: Path) -> None:
    settings, prompts = make_settings(fleet.urls), [random_prompt(n) for n in range(10)]
    build = make_shard(tmp_path / "b-1", settings, prompts)
    generate(settings, build)
    changed = [*prompts[:4], *(random_prompt(100 + n) for n in range(4))]
    build.completions(SHARD).unlink()
    before = len(fleet.logs())
    make_shard(tmp_path / "b-1", settings, changed)
    generate(settings, build)
    assert_right(build, settings, changed, CONFIG)
    assert sum(line["event"] == "received" for line in fleet.logs()[before:]) == 4


def test_attempts_and_deaths_survive_a_restart(fleet: SimFleet, tmp_path: Path) -> None:
    settings, prompts = make_settings(fleet.urls), [random_prompt(n) for n in range(1)]
    build = make_shard(tmp_path / "b-1", settings, prompts)
    with open_journal(build.journal(SHARD)) as journal:
        note = {"attempts": 2, "deaths": DEATHS, "useless": {"empty": 2}}
        journal.append({"conversation_id": conversation_id(0), "turn": 0, "note": note})
    stand_in = generate(settings, build)
    (row,) = completions(build)
    assert row["attempts"] == 3
    assert stand_in.alone_leases == 1


def test_a_lost_prompts_file_is_one_sentence(fleet: SimFleet, tmp_path: Path) -> None:
    settings = make_settings(fleet.urls)
    build = make_shard(tmp_path / "b-1", settings, [[10, 11]])
    build.prompts(SHARD).write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot be read"):
        generate(settings, build)


def test_a_full_disk_at_the_end_keeps_the_journal(
    fleet: SimFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, prompts = make_settings(fleet.urls), [random_prompt(n) for n in range(10)]
    build = make_shard(tmp_path / "b-1", settings, prompts)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shardmill.generate.rows.write_table", full)
    with pytest.raises(ShardmillError, match="No space left on device"):
        generate(settings, build)
    monkeypatch.setattr("shardmill.generate.rows.write_table", write_table)
    before = len(fleet.logs())
    generate(settings, build)
    assert_right(build, settings, prompts, CONFIG)
    assert fleet.logs()[before:] == []


# Killed at any moment

JOB = """
import logging, sys
from pathlib import Path
from genkit import FAST, SHARD, StandIn
from shardmill.generate.job import generate_shard
from shardmill.errors import ShardmillError
from shardmill.paths import BuildPaths
from shardmill.files import read_json
from shardmill.settings import resolve
build = BuildPaths(Path(sys.argv[1]))
settings = resolve(read_json(build.settings))
stand_in = StandIn(settings.servers.endpoints, settings.generate.concurrency)
print("ready", flush=True)
try:
    generate_shard(settings, build, SHARD, join=stand_in.join, pace=FAST)
except ShardmillError as error:
    sys.exit(str(error))
"""


def start_job(build: BuildPaths) -> subprocess.Popen[bytes]:
    tests = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, str(build.root)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert job.stdout is not None
    assert job.stdout.readline() == b"ready\n"
    return job


def test_killed_at_random_moments_each_prompt_is_there_once(tmp_path: Path) -> None:
    rounds, concurrency = (100, 8) if SOAK else (8, 8)
    config = {**CONFIG, "instant": False, "time_scale": 4, "mamba_slots": None, "kill_delay_s": 0.1}
    source = random.Random(7)
    with SimFleet(2, config) as servers:
        settings = make_settings(servers.urls, generate={"concurrency": concurrency})
        prompts = [random_prompt(n) for n in range(1500 if SOAK else 250)]
        build = make_shard(tmp_path / "b-1", settings, prompts)
        kills = 0
        for _ in range(rounds):
            job = start_job(build)
            time.sleep(source.uniform(0.0, 0.5))
            kills += job.poll() is None
            job.kill()
            job.wait()
        job = start_job(build)
        _, errors = job.communicate(timeout=120)
        assert job.returncode == 0, errors.decode()
        assert_right(build, settings, prompts, config)
        # Nothing was asked again but what was in flight at a kill.
        asked = servers.received()
        repeated = sum(count - 1 for count in asked.values())
        assert len(asked) == len(prompts)
        assert repeated <= kills * concurrency * len(servers), f"{repeated} repeated after {kills} kills"
        assert read_json(build.progress(SHARD))["attempts"] == len(prompts)


def test_sigterm_stops_in_order(tmp_path: Path) -> None:
    with SimFleet(1, {**CONFIG, "instant": False, "length_mean": 300}) as servers:
        settings = make_settings(servers.urls, sampling={"max_new_tokens": 4000})
        build = make_shard(tmp_path / "b-1", settings, [random_prompt(n) for n in range(60)])
        job = start_job(build)
        deadline = time.monotonic() + 30
        while not list(read_records(build.journal(SHARD))) and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        _, errors = job.communicate(timeout=30)
        assert job.returncode == 1
        assert b"was told to stop" in errors and b"Traceback" not in errors
        progress = json.loads(build.progress(SHARD).read_bytes())
        assert progress["state"] == "stopped"
        assert progress["done"] == len(list(read_records(build.journal(SHARD)))) > 0


# Several turns


def test_turns_are_asked_in_order_on_the_models_own_answers(fleet: SimFleet, tmp_path: Path) -> None:
    from shardmill.rendering.files import embedded_tokenizer
    from shardmill.rendering.render import Renderer

    settings = make_settings(fleet.urls, prompts={"turns": "regenerate"})
    prompts = [random_prompt(n) for n in range(12)]
    build = make_shard(tmp_path / "b-1", settings, prompts, later_turns=2)
    generate(settings, build)
    rows = completions(build)
    assert [(row["conversation_id"], row["turn"]) for row in rows] == sorted(
        (conversation_id(number), turn) for number in range(12) for turn in range(3)
    )
    assert all(row["status"] == "ok" for row in rows)
    renderer = Renderer(embedded_tokenizer(), None, settings.model.thinking)
    by_key = {(row["conversation_id"], row["turn"]): row for row in rows}
    for number in range(12):
        messages: list[dict[str, Any]] = []
        for turn in range(3):
            row = by_key[conversation_id(number), turn]
            messages.append({"role": "user", "content": f"Question {turn} of conversation {number}?"})
            if turn > 0:
                assert row["prompt_ids"] == renderer.render(messages).ids
                assert row["prompt_tokens"] == len(row["prompt_ids"])
            messages.append({"role": "assistant", "content": row["text"]})
    assert len({row["prompt_id"] for row in rows}) == 36


def test_a_failed_turn_ends_its_conversation(fleet: SimFleet, tmp_path: Path) -> None:
    settings = make_settings(fleet.urls, prompts={"turns": "regenerate"})
    prompts = [random_prompt(n) for n in range(6)]
    build = make_shard(tmp_path / "b-1", settings, prompts, later_turns=2)
    set_faults(fleet, {"kind": "empty_output", "prompts": [prompt_hash(prompts[1])]})
    generate(settings, build)
    rows = completions(build)
    assert len(rows) == 3 * 5 + 1
    assert [(row["status"], row["reason"]) for row in rows if row["conversation_id"] == conversation_id(1)] == [
        ("failed", "empty")
    ]
    assert read_json(build.progress(SHARD))["not_reached"] == 2
    build.completions(SHARD).unlink()
    generate(settings, build, StandIn([]))  # and is not asked again
    assert len(completions(build)) == 16
    assert read_json(build.progress(SHARD))["not_reached"] == 2


def test_a_later_turn_too_long_is_its_own_fault(fleet: SimFleet, tmp_path: Path) -> None:
    settings = make_settings(fleet.urls, prompts={"turns": "regenerate", "max_prompt_tokens": 70})
    build = make_shard(tmp_path / "b-1", settings, [random_prompt(n) for n in range(6)], later_turns=3)
    generate(settings, build)
    rows = completions(build)
    too_long = [row for row in rows if row["reason"] == "too_long"]
    assert {row["reason"] for row in rows} == {None, "too_long"}
    assert too_long and all(row["turn"] > 0 and len(row["prompt_ids"]) > 70 for row in too_long)
    assert len(rows) + read_json(build.progress(SHARD))["not_reached"] == 24


def test_a_lost_earlier_turn_takes_the_later_ones_with_it(fleet: SimFleet, tmp_path: Path) -> None:
    settings = make_settings(fleet.urls, prompts={"turns": "regenerate"}, sampling={"temperature": 0.7})
    build = make_shard(tmp_path / "b-1", settings, [random_prompt(n) for n in range(4)], later_turns=2)
    generate(settings, build)
    build.completions(SHARD).unlink()
    journal = build.journal(SHARD)
    with open_journal(journal) as opened:
        places = {(record["conversation_id"], record["turn"]): offset for offset, record in opened.replay()}
    content = bytearray(journal.read_bytes())
    content[places[conversation_id(0), 0] + 40] ^= 4
    journal.write_bytes(content)
    for _ in range(2):  # also when what was lost has been made again, the stale rows stay out
        before = len(fleet.logs())
        generate(settings, build)
        assert len(completions(build)) == 12
        build.completions(SHARD).unlink()
        if _ == 0:
            assert sum(line["event"] == "received" for line in fleet.logs()[before:]) == 3
    assert fleet.logs()[before:] == []


# Rows of other builds


def test_rows_of_another_build_are_reused_where_they_are_right(fleet: SimFleet, tmp_path: Path) -> None:
    settings, prompts = make_settings(fleet.urls), [random_prompt(n) for n in range(30)]
    old = make_shard(tmp_path / "b-1", settings, prompts)
    generate(settings, old)
    rows = {row["prompt_id"]: row for row in completions(old)}
    longer = make_settings(fleet.urls, sampling={"max_new_tokens": 200})
    appended = [*prompts, random_prompt(900)]
    build = make_shard(tmp_path / "b-2", longer, appended)
    before = len(fleet.logs())

    def find(conversation: str, turn: int, prompt_id: str) -> tuple[dict[str, Any], str] | None:
        row = rows.get(prompt_id)
        return None if row is None or row["finish_reason"] == "length" else (row, "b-1")

    stand_in = StandIn(fleet.urls)
    generate_shard(longer, build, SHARD, reusable=find, join=stand_in.join, pace=FAST)
    assert_right(build, longer, appended, CONFIG)
    cut = sum(row["finish_reason"] == "length" for row in rows.values())
    assert 0 < cut < 30
    assert sum(line["event"] == "received" for line in fleet.logs()[before:]) == cut + 1
    for row in completions(build):
        earlier = rows.get(row["prompt_id"])
        if earlier is not None and earlier["finish_reason"] == "stop":
            assert row == {**earlier, "reused_from": "b-1"}
        else:
            assert row["reused_from"] is None
    assert read_json(build.progress(SHARD))["reused"] == 30 - cut


def test_a_limit_below_a_rows_length_is_not_reused(fleet: SimFleet, tmp_path: Path) -> None:
    settings, prompts = make_settings(fleet.urls), [random_prompt(n) for n in range(20)]
    old = make_shard(tmp_path / "b-1", settings, prompts)
    generate(settings, old)
    rows = {row["prompt_id"]: row for row in completions(old)}
    shorter = make_settings(fleet.urls, sampling={"max_new_tokens": 40})
    build = make_shard(tmp_path / "b-2", shorter, prompts)
    stand_in = StandIn(fleet.urls)
    find = lambda *turn: (rows[turn[-1]], "b-1")  # noqa: E731
    generate_shard(shorter, build, SHARD, reusable=find, join=stand_in.join, pace=FAST)
    assert_right(build, shorter, prompts, CONFIG)
    short = sum(row["completion_tokens"] <= 40 and row["finish_reason"] == "stop" for row in rows.values())
    assert sum(row["reused_from"] is not None for row in completions(build)) == short


def test_a_shard_of_reused_rows_alone_needs_no_server(fleet: SimFleet, tmp_path: Path) -> None:
    settings, prompts = make_settings(fleet.urls), [random_prompt(n) for n in range(10)]
    old = make_shard(tmp_path / "b-1", settings, prompts)
    generate(settings, old)
    rows = {row["prompt_id"]: row for row in completions(old)}
    build = make_shard(tmp_path / "b-2", settings, prompts)

    async def never(*_: object) -> StandIn:
        raise AssertionError("no fleet is needed")

    generate_shard(settings, build, SHARD, reusable=lambda *turn: (rows[turn[-1]], "b-1"), join=never, pace=FAST)
    assert [row["reused_from"] for row in completions(build)] == ["b-1"] * 10


# Nothing but servers' faults


@pytest.mark.parametrize("kind", ["nan", "error_500"])
def test_a_prompt_that_meets_nothing_but_faults_is_left_for_the_next_run(
    fleet: SimFleet, tmp_path: Path, kind: str
) -> None:
    """It is neither failed nor asked for ever; all else there is gets done first."""
    settings, prompts = make_settings(fleet.urls, generate={"patience_s": 0.5}), [random_prompt(n) for n in range(90)]
    build = make_shard(tmp_path / "b-1", settings, prompts)
    poison = prompt_hash(prompts[5])
    set_faults(fleet, {"kind": kind, "prompts": [poison]})
    name = {"nan": "nan", "error_500": "server_error"}[kind]
    with pytest.raises(ShardError, match=rf"1 of 90 prompts .* the last {name}: .*source-5"):
        generate(settings, build, StandIn(fleet.urls), pace=HASTY)
    assert not build.completions(SHARD).exists()
    progress = read_json(build.progress(SHARD))
    assert (progress["done"], progress["failed"], progress["stuck"]) == (89, {}, 1)
    # Alone with it, with no other answer to tell whose fault it is, the next run is done with it after its patience.
    before = len(fleet.logs())
    with pytest.raises(ShardError, match="source-5"):
        generate(settings, build, StandIn(fleet.urls), pace=HASTY)
    asked = Counter(line["prompt"] for line in fleet.logs()[before:] if line["event"] == "received")
    assert set(asked) == {poison} and 30 <= asked[poison] < 100
    set_faults(fleet)
    before = len(fleet.logs())
    generate(settings, build)
    assert_right(build, settings, prompts, CONFIG)
    assert sum(line["event"] == "received" for line in fleet.logs()[before:]) == 1


def test_servers_that_answer_nothing_but_faults_end_the_job_after_its_patience(tmp_path: Path) -> None:
    with SimFleet(1, CONFIG) as servers:
        settings = make_settings(servers.urls, generate={"patience_s": 1})
        prompts = [random_prompt(n) for n in range(120)]
        build = make_shard(tmp_path / "b-1", settings, prompts)
        servers.faults(0, {"kind": "nan", "at": list(range(11, 100_000))})
        words = r"nothing but faults for generate.patience_s, the last nan: .*http"
        with pytest.raises(ShardmillError, match=words) as caught:
            generate(settings, build, StandIn(servers.urls, patience_s=30), pace=HASTY)
        assert not isinstance(caught.value, ShardError)
        assert read_json(build.progress(SHARD))["done"] == 10
