"""`shardmill retry` and `discard`: what they take out, what they keep, and that the next run makes just that again."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from builds import Answer, MadeBuild, good, settings_of
from genkit import SHARD, completions, generate, make_settings, make_shard, random_prompt
from s3servers import BUCKET, KEY, SECRET, moto_server, store_settings
from shardmill.cli import cli
from shardmill.errors import StoreError
from shardmill.files import read_json, write_json
from shardmill.journal import finished_rows, open_journal, read_records
from shardmill.paths import BuildPaths, shard_name
from shardmill.redo import discard_shard, find_failed, forget_failed
from shardmill.runlock import acquire
from shardmill.schemas import COMPLETIONS, read_notes, read_rows, write_table
from shardmill.settings import Settings
from shardmill.store import listing
from shardmill.store.publish import publish_shard
from simserver import SimFleet, prompt_hash
from workspace import Workspace


def failed(number: int, reason: str) -> Answer:
    return good(number, status="failed", reason=reason)


def made(tmp_path: Path, answers: list[Answer]) -> BuildPaths:
    build = MadeBuild(tmp_path / "results" / "sample-0123456789", settings_of(), shards=2).write(answers)
    (build.run / "journals").mkdir(parents=True, exist_ok=True)
    return build


def shardmill(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(cli, list(arguments), input=answer, catch_exceptions=True)


def test_retry_takes_out_rows_of_these_reasons_alone(tmp_path: Path) -> None:
    build = made(tmp_path, [good(0), failed(1, "empty"), failed(2, "repetition"), good(3), good(4), failed(5, "empty")])
    first, second = shard_name(0, 2), shard_name(1, 2)
    before = {row["conversation_id"]: row for row in read_rows(build.completions(second))}
    result = shardmill("retry", "empty", "--build", str(build.root))
    assert result.exit_code == 0, result.output
    assert "2 rows in 1 shard" in result.output and "2 empty" in result.output and "snakemake" in result.output
    # Rows 1, 3 and 5 are in the second shard, the failed ones for `empty` all of them.
    for gone in (build.completions(second), build.tokens(second), build.manifest(second)):
        assert not gone.exists()
    for kept in (build.completions(first), build.tokens(first), build.manifest(first)):
        assert kept.exists()
    records = list(finished_rows(build.journal(second)))
    assert len(records) == 1 and records[0]["reason"] is None
    row = before[records[0]["conversation_id"]]
    assert records[0]["output_ids"] == row["output_ids"] and records[0]["prompt_id"] == row["prompt_id"]


def test_a_retried_shard_is_finished_by_a_job_that_asks_nothing_twice(tmp_path: Path) -> None:
    """Through the real generate job: kept rows come out as they were, the failed ones are asked again."""
    prompts = [random_prompt(number) for number in range(12)]
    with SimFleet(1, {"instant": True, "length_mean": 20}) as fleet:
        config = make_settings(fleet.urls)
        build = make_shard(tmp_path / "sample-0123456789", config, prompts)
        generate(config, build)
        whole = completions(build)
        spoilt = [spoil(row) if index % 4 == 0 else row for index, row in enumerate(whole)]
        write_table(build.completions(SHARD), COMPLETIONS, spoilt)
        build.journal(SHARD).unlink()
        asked = fleet.received()
        found = find_failed(config, build, ["empty"])
        assert [(item.shard, item.rows) for item in found] == [(SHARD, {"empty": 3})]
        forget_failed(config, build, found[0])
        generate(config, build)
        again = completions(build)
        assert sum((fleet.received() - asked).values()) == 3
    assert all(row["status"] == "ok" for row in again)
    assert [row for index, row in enumerate(again) if index % 4] == [row for n, row in enumerate(whole) if n % 4]
    assert [row["output_ids"] for row in again] == [row["output_ids"] for row in whole]


@pytest.mark.parametrize("restored", [False, True])
def test_what_a_shards_rows_took_is_still_counted_after_a_retry(tmp_path: Path, restored: bool) -> None:
    """Also of a shard that came from the store, with neither a journal nor a progress file."""
    prompts = [random_prompt(number) for number in range(4)]
    took = {"cut_at_stop": 3, "degenerate": {"repetition": 2}, "faults": {"reset": 4}}
    with SimFleet(1, {"instant": True, "length_mean": 20}) as fleet:
        config = make_settings(fleet.urls)
        build = make_shard(tmp_path / "sample-0123456789", config, prompts)
        generate(config, build)
        rows = completions(build)
        for _ in range(2):
            write_table(build.completions(SHARD), COMPLETIONS, [spoil(rows[0]), *rows[1:]], took)
            if restored:
                build.progress(SHARD).unlink()
            else:
                write_json(build.progress(SHARD), read_json(build.progress(SHARD)) | took)
            forget_failed(config, build, find_failed(config, build, ["empty"])[0])
            generate(config, build)
            assert completions(build)[0]["status"] == "ok"
            assert read_notes(build.completions(SHARD)) == took
            assert read_json(build.progress(SHARD)) | took == read_json(build.progress(SHARD))


def spoil(row: dict[str, Any]) -> dict[str, Any]:
    nothing = {"output_ids": [], "text": None, "finish_reason": None, "prompt_tokens": 0, "completion_tokens": 0}
    return {**row, **nothing, "status": "failed", "reason": "empty"}


def test_retry_of_a_stopped_shard_cleans_its_journal(tmp_path: Path) -> None:
    build = made(tmp_path, [])
    shard = shard_name(0, 2)
    build.completions(shard).unlink()
    rows = [
        {"conversation_id": "a", "turn": 0, "note": {"attempts": 3, "deaths": 0, "useless": {"empty": 3}}},
        {"conversation_id": "a", "turn": 0, "prompt_id": "a", "reason": "empty"},
        {"conversation_id": "b", "turn": 0, "prompt_id": "b", "reason": None},
        {"conversation_id": "c", "turn": 0, "note": {"attempts": 1, "deaths": 0, "useless": {"empty": 1}}},
        {"conversation_id": "d", "turn": 0, "prompt_id": "d", "reason": "too_long"},
        {"effort": {"cut_at_stop": 2, "degenerate": {"empty": 4}, "faults": {}}},
    ]
    with open_journal(build.journal(shard)) as journal:
        for row in rows:
            journal.append(row)
    assert shardmill("retry", "empty", "--build", str(build.root)).exit_code == 0
    assert list(read_records(build.journal(shard))) == rows[2:]


@hypothesis_settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([None, "empty", "repetition"]), min_size=1, max_size=20), st.integers(0, 3))
def test_a_kill_between_any_two_steps_loses_no_row(
    tmp_path_factory: pytest.TempPathFactory, reasons: list[str | None], step: int
) -> None:
    """Every row to be kept is in the completions or the journal, whenever it stops, and a second go ends it."""
    answers = [good(number) if reason is None else failed(number, reason) for number, reason in enumerate(reasons)]
    build = made(tmp_path_factory.mktemp("kill"), answers)
    config = settings_of()
    kept = {
        row["conversation_id"] for name in (shard_name(0, 2), shard_name(1, 2))
        for row in read_rows(build.completions(name)) if row["reason"] != "empty"
    }  # fmt: skip
    found = find_failed(config, build, ["empty"])
    if found:
        with pytest.MonkeyPatch.context() as patch:
            left = iter(range(step))
            unlink = Path.unlink

            def dying(path: Path, missing_ok: bool = False) -> None:
                if path.is_relative_to(build.root) and not path.name.startswith(".") and next(left, None) is None:
                    raise KeyboardInterrupt
                unlink(path, missing_ok)

            patch.setattr(Path, "unlink", dying)
            with contextlib.suppress(KeyboardInterrupt):
                forget_failed(config, build, found[0])
    assert kept <= rows_anywhere(build)
    for item in find_failed(config, build, ["empty"]):
        forget_failed(config, build, item)
    assert find_failed(config, build, ["empty"]) == [] and kept <= rows_anywhere(build)


def rows_anywhere(build: BuildPaths) -> set[str]:
    found = set()
    for shard in (shard_name(0, 2), shard_name(1, 2)):
        if build.completions(shard).exists():
            found |= {row["conversation_id"] for row in read_rows(build.completions(shard))}
        else:
            found |= {record["conversation_id"] for record in finished_rows(build.journal(shard))}
    return found


def test_nothing_failed_is_said_and_nothing_is_touched(tmp_path: Path) -> None:
    build = made(tmp_path, [good(0), failed(1, "empty")])
    result = shardmill("retry", "repetition", "too_long", "--build", str(build.root))
    assert result.exit_code == 0 and "No row" in result.output and "repetition or too_long" in result.output
    assert build.completions(shard_name(1, 2)).exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("retry", "emty"), "emty is not a reason why rows fail: did you mean empty?"),
        (("retry", "timeout"), "timeout is not a reason why rows fail: there are empty, repetition"),
        (("discard", "shard-00002-of-00002"), "is not a shard of sample-0123456789: did you mean shard-0000"),
        (("discard", "shard-0"), "is not a shard of sample-0123456789"),
    ],
)
def test_a_wrong_name_is_one_sentence_and_exit_code_2(
    tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    build = made(tmp_path, [good(0), failed(1, "empty")])
    done = subprocess.run(
        [sys.executable, "-m", "shardmill", *arguments, "--build", str(build.root)], capture_output=True, text=True
    )
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert build.completions(shard_name(1, 2)).exists()


@pytest.mark.parametrize("arguments", [("retry", "empty"), ("discard", shard_name(1, 2))])
def test_while_a_run_is_at_work_both_are_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    build = made(tmp_path, [good(0), failed(1, "empty")])
    with acquire(build.lock, {"pid": 4711, "command": "snakemake --cores 7", "host": "here"}):
        done = subprocess.run(
            [sys.executable, "-m", "shardmill", *arguments, "--build", str(build.root)], capture_output=True, text=True
        )
    assert done.returncode == 2 and "pid 4711" in done.stderr and "Traceback" not in done.stderr
    assert build.completions(shard_name(1, 2)).exists()


def test_discard_takes_a_shard_and_no_other(tmp_path: Path) -> None:
    build = made(tmp_path, [good(number) for number in range(4)])
    bad, other = shard_name(1, 2), shard_name(0, 2)
    result = shardmill("discard", bad, "--build", str(build.root))
    assert result.exit_code == 0, result.output
    assert f"completions/{bad}.parquet" in result.output and "snakemake" in result.output
    assert not any(path.exists() for path in (build.completions(bad), build.tokens(bad), build.manifest(bad)))
    assert build.prompts(bad).exists() and build.completions(other).exists() and build.manifest(other).exists()
    again = shardmill("discard", bad, "--build", str(build.root))
    assert again.exit_code == 0 and "nothing of it was here" in again.output


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, BuildPaths, Settings]]:
    """A build of two shards in a bucket: a plain boto3 client, the build, its settings."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with moto_server() as server:
        config = store_settings(server.url, shards=2)
        build = made(tmp_path, [good(0), failed(1, "empty"), good(2), good(3)])
        write_json(build.settings, config.as_dict())
        for shard in (shard_name(0, 2), shard_name(1, 2)):
            publish_shard(config, build, shard)
        yield server.client(), build, config


def stored(client: Any, build: BuildPaths) -> set[str]:
    """The build's own objects: moto keeps one state a process, in which other tests' builds may lie."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    keys = {item["Key"] for page in pages for item in page.get("Contents", [])}
    return {key for key in keys if f"/{build.name}/" in key}


def test_discard_asks_before_it_takes_a_shard_out_of_the_store(published: tuple[Any, BuildPaths, Settings]) -> None:
    client, build, config = published
    bad, before = shard_name(1, 2), stored(client, build)
    refused = shardmill("discard", bad, "--build", str(build.root), answer="n\n")
    assert refused.exit_code == 1 and "s3://" in refused.output
    assert stored(client, build) == before and build.completions(bad).exists()
    agreed = shardmill("discard", bad, "--build", str(build.root), answer="y\n")
    assert agreed.exit_code == 0 and "not in the store any more" in agreed.output
    assert {key for key in before if bad in key} == before - stored(client, build) and not build.manifest(bad).exists()
    assert listing.published(config, build).shards == {shard_name(0, 2)}


def test_a_damaged_manifest_in_the_store_can_be_discarded(published: tuple[Any, BuildPaths, Settings]) -> None:
    client, build, config = published
    bad = shard_name(1, 2)
    key = next(key for key in stored(client, build) if key.endswith(f"manifests/{bad}.json"))
    client.put_object(Bucket=BUCKET, Key=key, Body=b"{")
    assert shardmill("discard", bad, "--yes", "--build", str(build.root)).exit_code == 0
    assert listing.published(config, build).shards == {shard_name(0, 2)}


def test_a_manifest_cannot_take_another_builds_objects_with_it(published: tuple[Any, BuildPaths, Settings]) -> None:
    client, build, _ = published
    bad = shard_name(1, 2)
    client.put_object(Bucket=BUCKET, Key="another/treasure", Body=b"kept")
    key = next(key for key in stored(client, build) if key.endswith(f"manifests/{bad}.json"))
    manifest = json.loads(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    manifest["objects"][0]["key"] = "another/treasure"
    client.put_object(Bucket=BUCKET, Key=key, Body=json.dumps(manifest).encode())
    shardmill("discard", bad, "--yes", "--build", str(build.root))
    assert client.get_object(Bucket=BUCKET, Key="another/treasure")["Body"].read() == b"kept"


def test_retry_takes_its_shard_out_of_the_store(published: tuple[Any, BuildPaths, Settings]) -> None:
    _, build, config = published
    assert shardmill("retry", "empty", "--build", str(build.root), answer="n\n").exit_code == 1
    assert listing.published(config, build).shards == {shard_name(0, 2), shard_name(1, 2)}
    assert shardmill("retry", "empty", "--yes", "--build", str(build.root)).exit_code == 0
    assert listing.published(config, build).shards == {shard_name(0, 2)}
    assert len(list(finished_rows(build.journal(shard_name(1, 2))))) == 1


def test_a_store_that_cannot_be_reached_costs_nothing(published: tuple[Any, BuildPaths, Settings]) -> None:
    """Nothing has gone from here when the store could not be told."""
    _, build, config = published
    lost = replace(config, s3=replace(config.s3, bucket="no-such-bucket"))
    with pytest.raises(StoreError):
        discard_shard(lost, build, shard_name(1, 2))
    with pytest.raises(StoreError):
        forget_failed(lost, build, find_failed(lost, build, ["empty"])[0])
    for path in (build.completions, build.tokens, build.manifest):
        assert path(shard_name(1, 2)).exists()


def test_retry_and_discard_in_a_real_build(tmp_path: Path) -> None:
    """What was taken out comes back by the next run, and nothing else is made again."""
    config = {"prompts": {"limit": 12, "shards": 3}, "quality": {"override": ["all"]}}
    with SimFleet(1, {"instant": True, "length_mean": 20}) as fleet:
        workspace = Workspace(tmp_path, {**config, "servers": {"engine": "sglang", "endpoints": fleet.urls}})
        workspace.build()
        build = BuildPaths(workspace.results)
        shards = [shard_name(index, 3) for index in range(3)]
        before = {shard: list(read_rows(build.completions(shard))) for shard in shards}
        spoilt = [spoil(before[shards[1]][0]), *before[shards[1]][1:]]
        write_table(build.completions(shards[1]), COMPLETIONS, spoilt)
        said = workspace.shardmill("retry", "empty").stdout
        assert "1 row in 1 shard" in said
        workspace.shardmill("discard", shards[2])
        assert workspace.plan()["generate"] == 2
        asked = fleet.received()
        workspace.build()
        # The fleet itself may ask for a sign of life on a slow machine.
        prompts = {prompt_hash(row["prompt_ids"]) for rows in before.values() for row in rows}
        again = {prompt: count for prompt, count in (fleet.received() - asked).items() if prompt in prompts}
        assert sum(again.values()) == 1 + len(before[shards[2]])
        after = {shard: list(read_rows(build.completions(shard))) for shard in shards}
    assert after[shards[0]] == before[shards[0]] and after[shards[1]][1:] == before[shards[1]][1:]
    assert all(row["status"] == "ok" for rows in after.values() for row in rows)
    assert {row["conversation_id"] for row in after[shards[2]]} == {row["conversation_id"] for row in before[shards[2]]}
    assert pq.read_table(build.tokens(shards[1])).num_rows == len(before[shards[1]])
