"""`shardmill query SQL`: DuckDB over a build's files, finished or not, from any folder."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import click
import orjson

from shardmill.cli_common import build_options, target
from shardmill.errors import UsageError

_WIDEST = 60


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

    with connect(target(root, configfiles).build) as connection:
        try:
            answer = connection.execute(sql)
        except duckdb.Error as error:
            raise UsageError(f"DuckDB refuses the query: {error}") from None
        if answer is None:
            raise UsageError("The query is empty: give one statement of SQL.")
        names = [column[0] for column in answer.description or []]
        rows = answer.fetchall()
    if form == "json":
        for row in rows:
            click.echo(orjson.dumps(dict(zip(names, row, strict=True)), default=str))
    elif form == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerow(names)
        writer.writerows(rows)
    else:
        _table(names, rows)


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
