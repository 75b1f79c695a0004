"""What the README shows is true: its queries run, its links lead somewhere, its commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import duckdb
import pytest
from click.testing import CliRunner

from builds import MadeBuild, good, long_answer, settings_of
from shardmill.catalog import connect, write_catalog
from shardmill.cli import cli
from shardmill.digests import input_digests
from shardmill.files import write_json
from shardmill.plan import make_plan
from shardmill.run import Run
from shardmill.store.listing import Published
from workspace import REPO

README = (REPO / "README.md").read_text()
QUERIES = [
    query.strip()
    for block in re.findall(r"```sql\n(.*?)```", README, re.DOTALL)
    for query in block.split(";")
    if query.strip()
]


def test_there_are_five_queries() -> None:
    assert len(QUERIES) == 5


@pytest.mark.parametrize("query", QUERIES, ids=[query.splitlines()[0].strip("- ?") for query in QUERIES])
def test_a_query_of_the_readme_works(query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = MadeBuild(tmp_path / "made-0123456789", settings_of()).write([good(number) for number in range(20)])
    with connect(build) as connection:
        here = connection.execute(query).fetchall()
    write_catalog(build)
    monkeypatch.chdir("/")
    with duckdb.connect(str(build.catalog), read_only=True) as catalog:
        assert catalog.execute(query).fetchall() == here


def test_the_query_that_a_finished_run_suggests_fits_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = settings_of()
    long = [good(number, text=long_answer(number, 90)) for number in range(20)]
    build = MadeBuild(tmp_path / "made-0123456789", chosen).write(long)
    plan = make_plan(chosen, build, Published)
    write_json(build.quality_passed(plan.checks_key), {})
    Run(chosen, build, {}, input_digests(chosen, REPO), plan, (False, b"")).succeeded()
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  query ")]
    _, command, *arguments = shlex.split(said)
    (shown,) = re.findall(r"^  query    (.*)$", README, re.MULTILINE)
    assert command == "shardmill" and shlex.split(shown)[-1] == arguments[-1]

    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(cli, arguments)
    head, *rows = result.stdout.splitlines()
    assert head.split() == ["finish_reason", "completion_tokens", "answer"]
    assert len(rows) == 5 and all(len(row) <= 80 for row in rows)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_a_link_of_the_readme_leads_somewhere(link: str) -> None:
    assert (REPO / link).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:`| {4})make ([a-z-]+)", README))))
def test_a_make_target_of_the_readme_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (REPO / "Makefile").read_text(), re.MULTILINE)
