"""Files of a build that are damaged or gone: one sentence that names the file and a way out, never a traceback."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from builds import MadeBuild, good, settings_of
from shardmill.cli import cli, main
from shardmill.errors import DataError
from shardmill.files import read_json, write_json
from shardmill.generate.prompts import ShardPrompts
from shardmill.paths import BuildPaths
from shardmill.plan import Plan, make_plan
from shardmill.reading.parquet import parquet_records
from shardmill.schemas import read_rows
from shardmill.settings import Settings
from shardmill.store.listing import Published
from shardmill.store.publish import publish_shard


@pytest.fixture
def finished(tmp_path: Path) -> tuple[BuildPaths, Settings]:
    settings = settings_of(prompts={"shards": 2}, generate={"pilot_shards": 0})
    made = MadeBuild(tmp_path / "made-0123456789", settings)
    build = made.write([good(number) for number in range(6)])
    for shard in made.names():
        publish_shard(settings, build, shard)
    return build, settings


def planned(finished: tuple[BuildPaths, Settings]) -> Plan:
    build, settings = finished
    return make_plan(settings, build, Published)


def test_a_whole_build_needs_nothing_generated(finished: tuple[BuildPaths, Settings]) -> None:
    assert planned(finished).unfinished == ()


def test_completions_that_are_cut_off_are_refused_with_a_way_out(finished: tuple[BuildPaths, Settings]) -> None:
    path = finished[0].completions("shard-00001-of-00002")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"shard-00001-of-00002\.parquet is cut off .*discard shard-00001"):
        planned(finished)
    with pytest.raises(DataError, match="can't be read as Parquet"):
        list(read_rows(path))


def test_training_rows_that_are_cut_off_are_made_again(finished: tuple[BuildPaths, Settings]) -> None:
    path = finished[0].tokens("shard-00001-of-00002")
    path.write_bytes(path.read_bytes()[:-100])
    plan = planned(finished)
    assert plan.tokenize == plan.publish == ("shard-00001-of-00002",) and plan.generate == ()


def test_lost_facts_are_found_again_without_a_prompt(finished: tuple[BuildPaths, Settings]) -> None:
    finished[0].build_json.unlink()
    plan = planned(finished)
    assert plan.facts and plan.quality and plan.prompts == plan.unfinished == ()


@pytest.mark.parametrize("content", ["garbage", "", "1", "[]"])
def test_a_damaged_build_json_says_that_it_can_be_made_again(
    finished: tuple[BuildPaths, Settings], content: str
) -> None:
    finished[0].build_json.write_text(content)
    with pytest.raises(DataError, match=r"build\.json is damaged .*: delete it, and the next run makes it again from"):
        planned(finished)


def test_a_lost_build_json_and_lost_prompts_are_one_job(finished: tuple[BuildPaths, Settings]) -> None:
    """Shards whose prompts are there can't be answered without the model's facts, which that job finds."""
    build, _ = finished
    for path in (build.build_json, *build.root.glob("completions/*"), build.prompts("shard-00001-of-00002")):
        path.unlink()
    plan = planned(finished)
    assert plan.prompts == plan.generate == plan.shards and not plan.facts


def test_a_damaged_json_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"a')
    with pytest.raises(DataError, match=r"settings\.json is damaged"):
        read_json(path)


def test_a_renamed_build_says_its_name(finished: tuple[BuildPaths, Settings]) -> None:
    build, settings = finished
    write_json(build.settings, settings.as_dict())
    copy = build.root.rename(build.root.with_name("COPY"))
    for command in (["export", "specforge", "--out", str(copy.parent / "out")], ["verify"], ["discard", "shard-00000"]):
        done = CliRunner().invoke(cli, [*command, "--build", str(copy)])
        assert isinstance(done.exception, DataError) and f"rename it to {build.name} " in str(done.exception)
    assert CliRunner().invoke(cli, ["query", "from tokens", "--build", str(copy)]).exit_code == 0


def test_queries_that_are_empty_or_begin_with_a_comment(finished: tuple[BuildPaths, Settings]) -> None:
    build, settings = finished
    write_json(build.settings, settings.as_dict())
    at = ["--build", str(build.root)]
    commented = CliRunner().invoke(cli, ["query", "-- How many?\nselect count(*) as n from tokens", *at])
    assert commented.exit_code == 0 and "6" in commented.output
    empty = CliRunner().invoke(cli, ["query", "", *at])
    assert "The query is empty" in str(empty.exception)


def test_a_query_over_a_cut_file_is_a_problem_of_the_data(finished: tuple[BuildPaths, Settings]) -> None:
    build, settings = finished
    write_json(build.settings, settings.as_dict())
    for path in sorted(build.root.glob("tokens/*"), reverse=True):
        path.write_bytes(path.read_bytes()[:-100])
        done = CliRunner().invoke(cli, ["query", "select count(*) from tokens", "--build", str(build.root)])
        assert isinstance(done.exception, DataError) and done.exception.exit_code == 1
        assert path.name in str(done.exception) and "`shardmill verify`" in str(done.exception)


def test_a_machine_that_refuses_is_not_taken_for_damage(
    finished: tuple[BuildPaths, Settings], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files say nothing against a file, and nobody is told to discard it."""
    build, settings = finished
    write_json(build.settings, settings.as_dict())
    source = next(build.root.glob("completions/*"))
    readers = (
        lambda: list(read_rows(source)),
        lambda: list(parquet_records(source)),
        lambda: ShardPrompts(source),
    )
    for read in readers:
        with no_more_files(), pytest.raises(OSError, match="Too many open files"):
            read()
    # Once before, so that all modules are there.
    assert CliRunner().invoke(cli, ["verify", "--build", str(build.root)]).exit_code == 0
    monkeypatch.setattr(sys, "argv", ["shardmill", "verify", "--build", str(build.root)])
    with no_more_files(), pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1 and f"refuses: {build.settings}: Too many open files" in caplog.text


@contextmanager
def no_more_files() -> Iterator[None]:
    """This process may open none."""
    held = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


def test_a_build_without_its_run_folder_is_still_a_build(finished: tuple[BuildPaths, Settings]) -> None:
    build, _ = finished
    build.settings.unlink()
    done = CliRunner().invoke(cli, ["status", "--build", str(build.root)])
    assert "settings.json" in str(done.exception) and "--configfile" in str(done.exception)
