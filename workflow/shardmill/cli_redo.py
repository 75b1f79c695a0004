"""`shardmill retry` and `discard`: parts of a build that the next run is to make again."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from shardmill.cli_common import Target, build_options, target
from shardmill.errors import UsageError
from shardmill.generate.reasons import MEANING, FailReason
from shardmill.paths import shard_names
from shardmill.runlock import acquire
from shardmill.store.manifest import refuse_renamed
from shardmill.wording import counted

_NEXT = "`snakemake` makes it again"

_yes = click.option("--yes", is_flag=True, help="Take shards out of the store without asking.")


@click.command(epilog="Reasons: " + "; ".join(f"{reason}: {MEANING[reason]}" for reason in FailReason))
@click.argument("reasons", nargs=-1, required=True, metavar="REASON...")
@_yes
@build_options
def retry(reasons: tuple[str, ...], yes: bool, root: Path | None, configfiles: tuple[Path, ...]) -> None:
    """Set the rows that failed for REASON to be done again. The other rows of their shards are kept.

    It looks at the shards that are on this machine. `shardmill status` shows the reasons that there are.
    """
    from shardmill.redo import find_failed, forget_failed

    for reason in reasons:
        _known(reason, [str(known) for known in FailReason], "a reason why rows fail")
    subject = target(root, configfiles)
    refuse_renamed(subject.build)
    with acquire(subject.build.lock):
        found = find_failed(subject.settings, subject.build, reasons)
        if not found:
            click.echo(f"No row of {subject.build.name} here failed for {_or(reasons)}: nothing is to be done again.")
            return
        rows: Counter[str] = Counter()
        for failed in found:
            rows.update(failed.rows)
        finished = sum(1 for failed in found if failed.finished)
        if finished and not yes:
            _ask(subject, f"{counted(finished, 'shard')} with failed rows")
        for failed in found:
            forget_failed(subject.settings, subject.build, failed)
    counts = ", ".join(f"{count} {reason}" for reason, count in rows.most_common())
    click.echo(
        f"{counted(rows.total(), 'row')} in {counted(len(found), 'shard')} of {subject.build.name} "
        f"{'is' if rows.total() == 1 else 'are'} to be done again ({counts}); all other rows are kept. "
        f"`snakemake` does it."
    )


@click.command()
@click.argument("shards", nargs=-1, required=True, metavar="SHARD...")
@_yes
@build_options
def discard(shards: tuple[str, ...], yes: bool, root: Path | None, configfiles: tuple[Path, ...]) -> None:
    """Take bad shards out, here and in the store, so that servers make them again from their prompts.

    SHARD is a name such as shard-00042-of-01828. All its answers go, those that are in order too. Answers that older
    builds have to its prompts are not taken over again.
    """
    from shardmill.redo import discard_shard

    subject = target(root, configfiles)
    refuse_renamed(subject.build)
    for shard in shards:
        _known(shard, shard_names(subject.settings.prompts.shards), f"a shard of {subject.build.name}")
    with acquire(subject.build.lock):
        if not yes:
            _ask(subject, ", ".join(shards))
        for shard in dict.fromkeys(shards):
            gone = discard_shard(subject.settings, subject.build, shard)
            what = f"{', '.join(gone)} {'is' if len(gone) == 1 else 'are'} gone" if gone else "nothing of it was here"
            store = " It is not in the store any more." if subject.settings.s3.used else ""
            click.echo(f"{shard}: {what}.{store} {_NEXT}.")
    if subject.settings.s3.bucket is not None and subject.settings.s3.offline:
        click.echo("s3.offline is set: what is in the store has stayed, and a run without it restores it.", err=True)


def _known(name: str, names: Sequence[str], what: str) -> None:
    if name in names:
        return
    close = difflib.get_close_matches(name, names, n=1)
    few = names if len(names) <= 12 else [names[0], "…", names[-1]]
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(few)}."
    raise UsageError(f"{name} is not {what}: {hint}")


def _ask(subject: Target, what: str) -> None:
    """Only where something is deleted that other machines see."""
    s3 = subject.settings.s3
    if s3.used:
        place = f"s3://{s3.bucket}/{s3.root(subject.build.name)}"
        click.confirm(f"Take {what} out of {place}?", abort=True, err=True)


def _or(names: Sequence[str]) -> str:
    return " or ".join(names)
