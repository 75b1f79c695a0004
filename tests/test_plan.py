"""`shardmill plan` counts what is left to ask and what it will take, by what finished shards took."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from builds import MadeBuild, good
from shardmill.cli import cli
from shardmill.journal import open_journal
from shardmill.paths import BuildPaths, shard_names
from shardmill.plan import pattern
from shardmill.run import find_build
from shardmill.schemas import read_rows
from shardmill.settings import load
from shardmill.store.publish import publish_shard
from workspace import REPO

OVERLAY = """
servers: {engine: sglang, endpoints: ["http://127.0.0.1:1", "http://127.0.0.1:2"]}
cost: {usd_per_gpu_hour: 3.6}
"""


@given(total=st.integers(1, 300), dice=st.randoms(use_true_random=False))
def test_a_pattern_matches_its_shards_and_no_others(total: int, dice: Random) -> None:
    names = shard_names(total)
    chosen = dice.sample(names, dice.randrange(total + 1))
    expression = re.compile(pattern(tuple(chosen)))
    assert [name for name in names if expression.fullmatch(name)] == sorted(chosen)
    assert not any(expression.fullmatch(name) for name in ("", "shard-", names[-1] + "0", "xshard-00000-of-00001"))


def test_a_pattern_of_all_shards_is_short() -> None:
    assert pattern(tuple(shard_names(1000))) == r"shard-00\d\d\d-of-01000"
    assert len(pattern(tuple(shard_names(1828)[::2]))) < 100


def plan(*options: str) -> str:
    result = CliRunner().invoke(cli, ["plan", "--configfile", "mine.yaml", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildPaths:
    """Of the sample's eight shards six are answered, one is begun and one waits: 12 prompts each."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").symlink_to(REPO / "config")
    (tmp_path / "mine.yaml").write_text(OVERLAY)
    settings = load(Path("mine.yaml"))
    made = MadeBuild(find_build(settings, Path()).root, settings, shards=8)
    build = made.write([good(number, server=f"http://127.0.0.1:{number % 2 + 1}") for number in range(96)])
    for shard in made.names()[6:]:
        for path in (build.completions(shard), build.tokens(shard), build.manifest(shard)):
            path.unlink()
    with open_journal(build.journal(made.names()[6])) as journal:
        for number in range(5):
            row = {"conversation_id": f"c{number}", "turn": 0, "prompt_id": f"p{number}", "reason": None}
            journal.append({**row, "reused_from": None})
        # Such a row is among those that older builds have, which are counted by themselves.
        journal.append({**row, "conversation_id": "c9", "reused_from": "sample-0123456789"})
        # What counted against a prompt that is not done.
        journal.append({"conversation_id": "c5", "turn": 0, "note": {"attempts": 1, "deaths": 0, "useless": {}}})
    return build


def test_what_is_left_costs_what_the_finished_shards_took(build: BuildPaths) -> None:
    told: dict[str, Any] = json.loads(plan("--json"))
    known, costs = told["known"], told["estimate"]
    assert (told["shards"]["generate"], known["prompts_to_generate"], known["servers"]) == (2, 24 - 5, 2)
    rows = [row for path in build.root.glob("completions/*.parquet") for row in read_rows(path)]
    mean = sum(row["completion_tokens"] for row in rows) / len(rows)
    assert known["mean_output_tokens"] == pytest.approx(mean)
    assert costs["tokens"] == pytest.approx(19 * mean)
    assert costs["hours"] == pytest.approx(costs["server_hours"] / 2)
    assert costs["usd"] == pytest.approx(costs["server_hours"] * 3.6)
    assert "prompts           19   without an answer in this build" in plan()


def test_lost_files_are_told(build: BuildPaths) -> None:
    assert json.loads(plan("--json"))["again"] == ["quality/pilot.json"]
    build.build_json.unlink()
    assert "again      build.json and rejects.parquet, quality/pilot.json: a run makes these again" in plan()


def test_lost_reports_of_a_finished_build_are_told(build: BuildPaths) -> None:
    settings = load(Path("mine.yaml"))
    made = MadeBuild(build.root, settings, shards=8)
    made.write([good(number) for number in range(96)])
    for shard in made.names():
        publish_shard(settings, build, shard)
    told = json.loads(plan("--json"))
    assert told["shards"]["finished"] == 8
    assert told["again"][1:-1] == ["quality/report.json", "quality/report.html", "catalog.duckdb", "README.md"]
    assert told["again"][-1] == "the quality checks"


def test_what_is_not_known_yet_says_who_tells(build: BuildPaths) -> None:
    for path in build.root.glob("completions/*.parquet"):
        path.unlink()
    text = plan()
    assert "tokens     not known yet   the first finished shards tell, or --mean-tokens" in text
    assert "GPU-hours  not known yet   the first finished shards tell, or --tokens-per-s" in text
    given = json.loads(plan("--json", "--mean-tokens", "1000", "--tokens-per-s", "500"))
    assert given["estimate"]["tokens"] == 91_000
    assert given["estimate"]["server_hours"] == pytest.approx(91_000 / 500 / 3600)


@pytest.mark.parametrize("value", ["0", "-5", "nan", "inf"])
def test_a_mean_that_is_none_is_refused(value: str, build: BuildPaths) -> None:
    result = CliRunner().invoke(cli, ["plan", "--configfile", "mine.yaml", "--mean-tokens", value])
    assert result.exit_code == 2 and "is not a number above 0" in result.output
