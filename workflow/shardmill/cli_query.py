"""`shardmill query SQL`: DuckDB over a build's files, finished or not, from any folder."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import orjson

from shardmill.catalog import SHARDED
from shardmill.cli_common import Target, build_options, target
from shardmill.errors import DataError, UsageError
from shardmill.wording import counted

if TYPE_CHECKING:
    import duckdb
    from rich.console import Console
    from rich.table import Table

_WIDEST = 60
_NO_LIMIT = 1_000_000
# Kinds of statements, as DuckDB names them. A PIVOT is several.
_READING = {"SELECT", "EXPLAIN", "MULTI"}
_EXECUTED = re.compile(r"\s*explain\s*\(?\s*analyze\b", re.IGNORECASE)
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
    try:
        with connect(subject.build) as connection:
            _refuse_writing(connection, sql)
            for view in _views(sql):
                _say_what_is_missing(subject, view)
            answer = connection.execute(sql)
            names = [column[0] for column in answer.description or []]
            rows = answer.fetchall()
    except duckdb.Error as error:
        # DuckDB names the file where reading it is what fails; of damage inside one it has no more than a bare word.
        if str(subject.build.root.absolute()) in str(error) or type(error) is duckdb.Error:
            raise DataError(
                f"A file of the build can't be read ({error}): `shardmill verify` says what is wrong with it."
            ) from None
        raise UsageError(f"DuckDB refuses the query: {error}") from None
    if form == "json":
        _refuse_twins(names)
        for row in rows:
            click.echo(_json_line(names, row))
    elif form == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerow(names)
        writer.writerows(rows)
    else:
        _show(names, rows)
        click.echo(counted(len(rows), "row"), err=True)


def _refuse_twins(names: list[str]) -> None:
    twins = sorted({name for name in names if names.count(name) > 1})
    if twins:
        raise UsageError(f"Two columns are called {twins[0]}, and an object of JSON has a name once: give one an AS.")


def _json_line(names: list[str], row: tuple[Any, ...]) -> bytes:
    """What JSON has no form of becomes a text. orjson knows no integer beyond 64 bits."""
    values = dict(zip(names, row, strict=True))
    try:
        return orjson.dumps(values, default=str, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return json.dumps(values, default=str, ensure_ascii=False).encode()


def _refuse_writing(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise UsageError(
            "Give one statement of SQL." if statements else "The query is empty: give one statement of SQL."
        )
    kind = statements[0].type.name
    if kind == "EXPLAIN" and _EXECUTED.match(_ASIDE.sub(" ", sql)):
        raise UsageError("`shardmill query` only reads, and EXPLAIN ANALYZE runs what it explains: leave ANALYZE out.")
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


def _show(names: list[str], rows: list[tuple[Any, ...]]) -> None:
    """As a table where that fits the terminal; where not, each row as lines of `column: value`."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    table = _table(names, rows)
    wanted = Measurement.get(console, console.options.update(max_width=_NO_LIMIT), table).maximum
    if wanted <= console.width:
        console.print(table)
    else:
        _list(console, names, rows)


def _table(names: list[str], rows: list[tuple[Any, ...]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(names):
        numbers = all(isinstance(row[index], int | float) or row[index] is None for row in rows)
        table.add_column(Text(name), justify="right" if numbers and rows else "left")
    for row in rows:
        table.add_row(*(Text(_shortened(_line(value))) for value in row))
    return table


def _list(console: Console, names: list[str], rows: list[tuple[Any, ...]]) -> None:
    from rich.text import Text

    labels = [f"{_shortened(name)}: " for name in names]
    longest = max(map(len, labels))
    for number, row in enumerate(rows, start=1):
        console.print(Text(f"row {number}", style="bold"))
        for label, value in zip(labels, row, strict=True):
            # No line is wider than the terminal's, so that more than this is never shown of a value.
            text = f"{label:<{longest}}{_line(value)[: console.width]}".rstrip()
            console.print(Text(text), no_wrap=True, overflow="ellipsis")


def _line(value: Any) -> str:
    text = "" if value is None else str(value)
    return " ".join(text.split()) if "\n" in text else text


def _shortened(line: str) -> str:
    return line if len(line) <= _WIDEST else line[: _WIDEST - 1] + "…"
