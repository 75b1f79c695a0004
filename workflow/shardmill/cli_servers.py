"""`shardmill servers`: the servers of a build by hand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click
import orjson

from shardmill.cli_common import build_options, settings_for
from shardmill.errors import UsageError
from shardmill.wording import counted


@click.group()
def servers() -> None:
    """Start, stop and look at the model servers of a build."""


@servers.command()
@build_options
def up(root: Path | None, configfiles: tuple[Path, ...]) -> None:
    """Start the servers and wait until they are ready. They live until `servers down`."""
    from shardmill.fleet import command, show

    settings = settings_for(root, configfiles)
    if not settings.servers.launch:
        raise UsageError("The config gives endpoints: their servers were started elsewhere, there is nothing to start.")
    said: set[str] = set()

    def progress(state: dict[str, Any]) -> None:
        for server in state["servers"]:
            line = f"{server['name']}: {server['state']}{', ' + server['why'] if server['why'] else ''}"
            if line not in said:
                said.add(line)
                click.echo(line, err=True)

    state = asyncio.run(command.up(settings, progress))
    show.show(state, show.console())
    if any(server["state"] != "ready" for server in state["servers"]):
        raise SystemExit(1)


@servers.command()
@build_options
def down(root: Path | None, configfiles: tuple[Path, ...]) -> None:
    """Stop the servers, also those that a killed run has left."""
    from shardmill.fleet import command

    count = asyncio.run(command.down(settings_for(root, configfiles)))
    click.echo(f"{counted(count, 'server')} stopped." if count else "No server was running.")


@servers.command()
@build_options
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def status(root: Path | None, configfiles: tuple[Path, ...], as_json: bool) -> None:
    """Show each server: state, restarts, load, what limits it, speed, memory. Exit code 1 when none is ready."""
    from shardmill.fleet import command, show

    settings = settings_for(root, configfiles)
    state = asyncio.run(command.look(settings))
    if as_json:
        click.echo(orjson.dumps(state, option=orjson.OPT_INDENT_2).decode())
    elif state is None:
        click.echo("No server is running. A build starts its own; `shardmill servers up` starts them to stay.")
    else:
        show.show(state, show.console())
    if state is None or not any(server["state"] == "ready" for server in state["servers"]):
        raise SystemExit(1)
