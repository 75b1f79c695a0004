"""What the README shows is true: its queries run, its links lead somewhere, its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import pytest

from builds import MadeBuild, good, settings_of
from shardmill.catalog import connect, write_catalog
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


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_a_link_of_the_readme_leads_somewhere(link: str) -> None:
    assert (REPO / link).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:`| {4})make ([a-z-]+)", README))))
def test_a_make_target_of_the_readme_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (REPO / "Makefile").read_text(), re.MULTILINE)
