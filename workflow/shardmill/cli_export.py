"""`shardmill export specforge|speculators`: a build's rows in a trainer's form."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
import orjson

from shardmill.cli_common import build_options, target
from shardmill.errors import DataError, UsageError
from shardmill.export.rules import Longer, Rules
from shardmill.export.splits import Ids, parse_splits
from shardmill.wording import counted

if TYPE_CHECKING:
    from shardmill.export.run import Format

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group()
def export() -> None:
    """Training rows in the form that a trainer reads. The build must be finished and have passed its checks."""


def _options(min_supervised: int) -> Callable[[Command], Command]:
    """The options that both trainers have, in the order of the help text."""
    options = [
        click.option("--out", type=click.Path(path_type=Path), required=True, help="A new or empty folder."),
        click.option(
            "--max-length", type=click.IntRange(min=2), help="The trainer's window, in tokens.  [default: none]"
        ),
        click.option(
            "--longer",
            type=click.Choice(get_args(Longer)),
            help="What becomes of rows beyond --max-length. `keep` leaves the cut to the trainer.  [default: cut]",
        ),
        click.option(
            "--min-supervised",
            type=click.IntRange(min=1),
            default=min_supervised,
            show_default=True,
            help="Drop rows with fewer supervised tokens within the window.",
        ),
        click.option(
            "--split",
            "split_texts",
            multiple=True,
            metavar="NAME=SHARE",
            help="Set a share of the conversations aside, like validation=0.05; the rest is `train`. Can be given "
            "several times.",
        ),
        click.option(
            "--split-ids",
            type=click.Choice(get_args(Ids)),
            default="stem",
            show_default=True,
            help="Whether abc_0 and abc_5 are parts of one conversation (stem) or two conversations (whole).",
        ),
        click.option("--partial", is_flag=True, help="Export what is finished of a build that isn't, or that failed."),
        click.option("--json", "as_json", is_flag=True, help="The account as one JSON object."),
    ]

    def add(command: Command) -> Command:
        command = build_options(command)
        for option in reversed(options):
            command = option(command)
        return command

    return add


@export.command()
@_options(min_supervised=2)
@click.option(
    "--memory-gb",
    type=click.FloatRange(min=0, min_open=True),
    default=16,
    show_default=True,
    help="What SpecForge's loader may take for one slice, in 10^9 bytes.",
)
def specforge(memory_gb: float, min_supervised: int, **common: Any) -> None:
    """Pre-tokenized JSONL for SpecForge, in slices that fit the trainer's memory.

    Rows that its DFlash family would drop in silence (fewer than two supervised tokens in a row) are dropped here,
    with a count. For EAGLE-3, --min-supervised 1 keeps those with one.
    """
    from shardmill.export.specforge import SpecForge

    def open_format(folder: Path, splits: Sequence[str]) -> Format:
        return SpecForge(folder, splits, memory_gb)

    _export("SpecForge", open_format, min_supervised, pair=min_supervised > 1, **common)


@export.command()
@_options(min_supervised=1)
def speculators(min_supervised: int, **common: Any) -> None:
    """A dataset folder for speculators' trainer, as save_to_disk leaves it, with its token_freq.pt."""
    from shardmill.export.speculators import Speculators

    _export("speculators", Speculators, min_supervised, pair=False, **common)


def _export(
    trainer: str,
    open_format: Callable[[Path, Sequence[str]], Format],
    min_supervised: int,
    pair: bool,
    out: Path,
    max_length: int | None,
    longer: Longer | None,
    split_texts: tuple[str, ...],
    split_ids: Ids,
    partial: bool,
    as_json: bool,
    root: Path | None,
    configfiles: tuple[Path, ...],
) -> None:
    from shardmill.export.folder import left_over
    from shardmill.export.run import export_build
    from shardmill.export.source import open_source

    if longer is not None and max_length is None:
        raise UsageError("--longer says what becomes of rows beyond --max-length: give that, too.")
    rules = Rules(max_length, longer or "cut", min_supervised, pair)
    splits = parse_splits(split_texts, split_ids)
    subject = target(root, configfiles)
    source = open_source(subject.build, subject.settings.prompts.shards)
    if source.lacking:
        state = f"{source.build.name} is not a finished build: {'; '.join(source.lacking)}."
        if not partial:
            raise DataError(f"{state} Run `snakemake`, or give --partial to export what is there.")
        click.echo(f"Warning: {state}", err=True)
    for folder in left_over(out):
        click.echo(f"Warning: {folder} is of another export to {out}; delete it if that was killed.", err=True)
    # Where nobody watches it, a bar is a stray word.
    hidden = not sys.stderr.isatty()
    with click.progressbar(length=len(source.finished), label="shards", file=sys.stderr, hidden=hidden) as bar:
        account = export_build(source, trainer, rules, splits, out, open_format, lambda: bar.update(1))
    if as_json:
        click.echo(orjson.dumps(account.as_dict(), option=orjson.OPT_INDENT_2))
        return
    click.echo(f"{account.build} for {trainer}, {counted(len(account.files), 'file')} in {out}: {account.summary()}")
    click.echo(account.advice)
