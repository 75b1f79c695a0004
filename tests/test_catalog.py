"""catalog.duckdb answers from any folder and after a move; `connect` works on a build in any state."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pytest
from click.testing import CliRunner, Result

from builds import START, MadeBuild, good, settings_of
from shardmill.catalog import connect, write_catalog
from shardmill.cli import cli
from shardmill.errors import DataError, UsageError
from shardmill.paths import BuildPaths
from shardmill.schemas import COMPLETIONS, PROMPTS, REJECTS, TOKENS

VIEWS = ("prompts", "rejects", "completions", "tokens", "manifests")
COUNTS = {"prompts": 6, "rejects": 2, "completions": 6, "tokens": 6, "manifests": 2}


@pytest.fixture
def build(tmp_path: Path) -> BuildPaths:
    paths = MadeBuild(tmp_path / "made-0123456789", settings_of()).write([good(number) for number in range(6)])
    write_catalog(paths)
    return paths


def counts_from(cwd: Path, catalog: str) -> str:
    """Opens `catalog` in a fresh process that was started in `cwd`, as a user's DuckDB is."""
    code = (
        "import duckdb, sys; c = duckdb.connect(sys.argv[1], read_only=True); "
        f"print({{v: c.execute(f'select count(*) from {{v}}').fetchone()[0] for v in {VIEWS!r}}})"
    )
    done = subprocess.run([sys.executable, "-c", code, catalog], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_answers_from_the_builds_folder_and_from_any_other(build: BuildPaths, tmp_path: Path) -> None:
    assert counts_from(build.root, "catalog.duckdb") == str(COUNTS)
    assert counts_from(Path("/"), str(build.catalog)) == str(COUNTS)
    assert counts_from(tmp_path, "made-0123456789/catalog.duckdb") == str(COUNTS)


@pytest.mark.parametrize("name", ["moved", "with [brackets] and 'quotes', commas *"])
def test_answers_after_the_folder_was_moved(build: BuildPaths, tmp_path: Path, name: str) -> None:
    build.root.rename(tmp_path / name)
    assert counts_from(Path("/"), str(tmp_path / name / "catalog.duckdb")) == str(COUNTS)


def test_answers_through_the_latest_link(build: BuildPaths, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(build.root.name)
    assert counts_from(Path("/"), str(tmp_path / "latest" / "catalog.duckdb")) == str(COUNTS)
    assert counts_from(tmp_path / "latest", "catalog.duckdb") == str(COUNTS)


def test_attached_from_the_builds_folder(build: BuildPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(build.root)
    with duckdb.connect() as connection:
        connection.execute("ATTACH 'catalog.duckdb' AS build (READ_ONLY)")
        assert connection.execute("SELECT count(*) FROM build.completions").fetchone() == (6,)


def test_holds_no_absolute_path(build: BuildPaths) -> None:
    assert str(build.root).encode() not in build.catalog.read_bytes()


def test_writing_leaves_nothing_else_behind(build: BuildPaths) -> None:
    left = sorted(path.name for path in build.root.iterdir())
    assert left == ["build.json", "catalog.duckdb", "completions", "manifests", "prompts", "run", "tokens"]


def test_connect_gives_the_files_columns_and_their_shard(build: BuildPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    with connect(build) as connection:
        for view, schema in {"prompts": PROMPTS, "completions": COMPLETIONS, "tokens": TOKENS}.items():
            names = [row[0] for row in connection.execute(f"DESCRIBE {view}").fetchall()]
            assert names == [*schema.names, "shard"]
        assert [row[0] for row in connection.execute("DESCRIBE rejects").fetchall()] == REJECTS.names
        shards = connection.execute("SELECT shard, count(*) FROM tokens GROUP BY 1 ORDER BY 1").fetchall()
        assert shards == [("shard-00000-of-00002", 3), ("shard-00001-of-00002", 3)]
        assert connection.execute("SELECT objects[1].kind FROM manifests").fetchall() == [("tokens",), ("tokens",)]


def test_a_kind_without_files_is_an_empty_view_of_the_same_types(build: BuildPaths, tmp_path: Path) -> None:
    empty = BuildPaths(tmp_path / "nothing-0000000000")
    with connect(build) as full, connect(empty) as none:
        for view in VIEWS:
            described = [row[:2] for row in full.execute(f"DESCRIBE {view}").fetchall()]
            assert [row[:2] for row in none.execute(f"DESCRIBE {view}").fetchall()] == described
            assert none.execute(f"SELECT count(*) FROM {view}").fetchone() == (0,)


def test_catalog_of_a_build_whose_prompts_are_gone(build: BuildPaths) -> None:
    shutil.rmtree(build.root / "prompts")
    write_catalog(build)
    expected = COUNTS | {"prompts": 0, "rejects": 0}
    assert counts_from(Path("/"), str(build.catalog)) == str(expected)


def test_connect_to_some_shards(build: BuildPaths) -> None:
    with connect(build, shards=["shard-00001-of-00002"]) as connection:
        assert connection.execute("SELECT DISTINCT shard FROM completions").fetchall() == [("shard-00001-of-00002",)]
        assert connection.execute("SELECT count(*) FROM manifests").fetchone() == (1,)


# -- shardmill query


def query(build: BuildPaths, sql: str, *options: str) -> Result:
    result = CliRunner().invoke(cli, ["query", sql, "--build", str(build.root), "--format", "csv", *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize(
    "sql",
    [
        "from tokens limit 2",
        "/* all */ select count(*) from completions",
        "describe rejects",
        "explain select 1",
        "with t as (from tokens) from t",
        "pivot completions on status using count(*)",
    ],
)
def test_a_query_reads(build: BuildPaths, sql: str) -> None:
    assert query(build, sql).exit_code == 0


def shown(build: BuildPaths, sql: str, width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = query(build, sql, "--format", "table").stdout.splitlines()
    assert all(len(line) <= width for line in lines)
    return lines


def test_what_does_not_fit_the_terminal_is_shown_row_by_row(build: BuildPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(build, "from completions limit 2", 80, monkeypatch)
    assert len(lines) == 2 * (1 + len(COMPLETIONS.names) + 1)  # a heading, and the view's own column `shard`
    assert [line for line in lines if line.startswith("row")] == ["row 1", "row 2"]
    assert [line.partition(":")[0] for line in lines[1 : 1 + len(COMPLETIONS.names)]] == COMPLETIONS.names
    assert re.fullmatch(r"prompt_id: +[0-9a-f]+…", lines[1])
    assert re.fullmatch(r"shard: +shard-0000\d-of-00002", lines[-1])


def test_what_fits_the_terminal_is_a_table(build: BuildPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    sql = "select repeat('x', 60) as text, 1234567 as number"
    assert shown(build, sql, 69, monkeypatch) == [f"{'text':<60}   number", f"{'x' * 60}  1234567"]
    assert shown(build, sql, 68, monkeypatch) == ["row 1", f"text:   {'x' * 60}", "number: 1234567"]
    assert shown(build, sql, 40, monkeypatch) == ["row 1", f"text:   {'x' * 31}…", "number: 1234567"]


@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("drop view prompts", "DROP"),
        ("create table mine as from tokens", "CREATE"),
        ("copy tokens to '/tmp/never.csv'", "COPY"),
        ("attach '/tmp/never.duckdb'", "ATTACH"),
        ("set threads = 1", "SET"),
    ],
)
def test_a_query_that_writes_is_refused(build: BuildPaths, sql: str, kind: str) -> None:
    with pytest.raises(UsageError, match=f"only reads, and {kind} does not"):
        query(build, sql)
    with pytest.raises(UsageError, match="Give one statement"):
        query(build, f"select 1; {sql}")


def test_an_explanation_does_not_run_what_it_explains(build: BuildPaths) -> None:
    path = next(build.root.glob("completions/*"))
    before = path.read_bytes()
    for sql in (
        f"explain analyze copy (select 1) to '{path}'",
        f"-- why\nEXPLAIN (ANALYZE) copy (select 1) to '{path}'",
        f"explain /* it */ analyze copy (select 1) to '{path}'",
    ):
        with pytest.raises(UsageError, match="EXPLAIN ANALYZE runs"):
            query(build, sql)
    assert path.read_bytes() == before


def test_whatever_a_query_gives_is_json(build: BuildPaths) -> None:
    sql = "select histogram(turn) as turns, 99 * hash(1)::hugeint as many, now() as t from tokens"
    (line,) = query(build, sql, "--format", "json").stdout.splitlines()
    row = json.loads(line)
    assert row["many"] > 2**64 and row["t"].endswith("+00:00") and sum(row["turns"].values()) > 0
    with pytest.raises(UsageError, match="Two columns are called a"):
        query(build, "select 1 as a, 2 as a", "--format", "json")


def test_times_are_utc_on_any_machine(build: BuildPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        told = query(build, "select strftime(min(finished_at), '%H:%M') as t from completions", "--format", "json")
    finally:
        monkeypatch.undo()
        time.tzset()
    assert json.loads(told.stdout) == {"t": START.strftime("%H:%M")}


def test_lost_files_are_not_an_empty_answer(build: BuildPaths) -> None:
    build.rejects.unlink()
    for sql in ("select count(*) from rejects", "select 1 where exists (from Rejects)"):
        with pytest.raises(DataError, match=r"rejects\.parquet is not there"):
            query(build, sql)
    assert query(build, "select 'rejects' -- of rejects").exit_code == 0
    (build.root / "completions" / "shard-00001-of-00002.parquet").unlink()
    partly = query(build, "select count(*) from completions")
    assert partly.stdout.splitlines()[1] == "3"
    assert partly.stderr == "completions: 1 of 2 shards are here.\n"
