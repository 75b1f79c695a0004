"""`shardmill query SQL`: DuckDB over a build's files, finished or not, from any folder."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import orjson

from shardmill.catalog import SHARDED
from shardmill.cli_common import Target, build_options, target
from shardmill.errors import DataError, UsageError

if TYPE_CHECKING:
    import duckdb

_WIDEST = 60
# Kinds of statements, as DuckDB names them. A PIVOT is several.
_READING = {"SELECT", "EXPLAIN", "MULTI"}
_ASIDE = re.compile(r"--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'", re.DOTALL)


# SQL may begin with a comment, which looks like an option.
@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("sql")
@click.option("--format", "form", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
@build_options
def query(sql: str, form: str, root: Path | None, configfiles: tuple[Path, ...]) -> None:
    """Runs SQL over the views prompts, rejects, completions, tokens and manifests of a build.

    Example: shardmill query "select reason, count(*) from rejects group by reason"
    """
    import duckdb

    from shardmill.catalog import connect

    subject = target(root, configfiles)
    with connect(subject.build) as connection:
        try:
            _refuse_writing(connection, sql)
            for view in _views(sql):
                _say_what_is_missing(subject, view)
            answer = connection.execute(sql)
            names = [column[0] for column in answer.description or []]
            rows = answer.fetchall()
        except duckdb.Error as error:
            raise UsageError(f"DuckDB refuses the query: {error}") from None
    if form == "json":
        for row in rows:
            click.echo(orjson.dumps(dict(zip(names, row, strict=True)), default=str))
    elif form == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerow(names)
        writer.writerows(rows)
    else:
        _table(names, rows)


def _refuse_writing(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise UsageError(
            "Give one statement of SQL." if statements else "The query is empty: give one statement of SQL."
        )
    kind = statements[0].type.name
    if kind not in _READING:
        raise UsageError(
            f"`shardmill query` only reads, and {kind} does not: give a SELECT (--format csv or json for a file), or "
            f"work in a database of your own that attaches catalog.duckdb."
        )


def _views(sql: str) -> list[str]:
    """Those that the query names."""
    bare = _ASIDE.sub(" ", sql).lower()
    return [view for view in (*SHARDED, "rejects", "manifests") if re.search(rf"\b{view}\b", bare)]


def _say_what_is_missing(subject: Target, view: str) -> None:
    """An empty answer must not pass for a count: lost rejects are an error, shards that are not here are said."""
    build = subject.build
    if view == "rejects":
        if not build.rejects.exists():
            raise DataError(
                f"{build.rejects} is not there: the prompts step makes it, and `snakemake` makes a lost one again."
            )
        return
    all_shards = subject.settings.prompts.shards
    here = sum(1 for _ in (build.root / view).glob("shard-*.*"))
    if here < all_shards:
        click.echo(f"{view}: {here:,} of {all_shards:,} shards are here.", err=True)


def _table(names: list[str], rows: list[tuple[Any, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(names):
        numbers = all(isinstance(row[index], int | float) or row[index] is None for row in rows)
        table.add_column(name, justify="right" if numbers and rows else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    Console().print(table)
    click.echo(f"{len(rows)} row{'' if len(rows) == 1 else 's'}", err=True)


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    line = " ".join(text.split()) if "\n" in text else text
    return line if len(line) <= _WIDEST else line[: _WIDEST - 1] + "…"
