"""The `shardmill` command. Subcommands are imported when they are called, so that a build's job starts fast."""

from __future__ import annotations

import importlib
import logging
import sys

import click

from shardmill import __version__
from shardmill.errors import NO_SPACE, ShardmillError, is_machines

# Command -> module and attribute of its click command.
_COMMANDS = {
    "discard": "shardmill.cli_redo:discard",
    "doctor": "shardmill.cli_doctor:doctor",
    "export": "shardmill.cli_export:export",
    "inventory": "shardmill.cli_store:inventory",
    "monitor": "shardmill.cli_monitor:monitor",
    "plan": "shardmill.cli_plan:plan",
    "pull": "shardmill.cli_store:pull",
    "query": "shardmill.cli_query:query",
    "retry": "shardmill.cli_redo:retry",
    "servers": "shardmill.cli_servers:servers",
    "status": "shardmill.cli_status:status",
    "step": "shardmill.cli_steps:step",
    "verify": "shardmill.cli_store:verify",
}
_HIDDEN = {"step"}


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS.keys() - _HIDDEN)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """What is not a build step. The build itself is `snakemake --cores 7`.

    Commands act on --build (default: results/latest) with the settings that it last ran with, or on --configfile.
    Exit codes: 0 well, 1 a problem was found, 2 used wrongly.
    """


def main() -> None:
    try:
        cli(standalone_mode=True)
    except ShardmillError as error:
        _say(f"Error: {error}")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader (head, less) has seen enough.
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if not is_machines(error):
            raise
        _say(f"Error: {_machines_sentence(error)}")
        sys.exit(1)


def _machines_sentence(error: OSError) -> str:
    if error.errno in NO_SPACE:
        where = f" for {error.filename}" if error.filename else ""
        return f"No space is left on the disk{where}: free some, and run again; what is finished is kept."
    what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    return f"This machine refuses: {what}. Mend that, and run again; what is finished is kept."


def _say(sentence: str) -> None:
    """To stderr; in a job of a build also to its log file, by the handlers that it has set up."""
    log = logging.getLogger()
    if log.handlers:
        log.error("%s", sentence)
    else:
        click.echo(sentence, err=True)
