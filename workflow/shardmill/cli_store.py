"""`shardmill verify`, `inventory` and `pull`: what the store holds, whether it is right, and getting it here."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click
import orjson

from shardmill.cli_common import Target, build_options, settings_for, target
from shardmill.errors import SettingsError, ShardmillError, UsageError
from shardmill.files import read_json, write_json
from shardmill.paths import BuildPaths
from shardmill.settings import Settings, resolve
from shardmill.wording import counted

if TYPE_CHECKING:
    from shardmill.store.verify import Verified

_NAMED = 5  # shards


@click.command()
@click.option("--deep", is_flag=True, help="Read every row, and download every object to hash it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--repair", is_flag=True, help="Upload again what is wrong in the store and whole here.")
@build_options
def verify(deep: bool, as_json: bool, repair: bool, root: Path | None, configfiles: tuple[Path, ...]) -> None:
    """Local files and the store against the manifests: missing, extra, wrong, unreadable. Exit code 1 with a list."""
    from shardmill.store.repair import ways_out
    from shardmill.store.verify import verify_build

    subject = target(root, configfiles)
    found = verify_build(subject.settings, subject.build, deep)
    if repair and _repair(subject, found):
        found = verify_build(subject.settings, subject.build, deep)
    if as_json:
        click.echo(
            orjson.dumps(
                {
                    "build": subject.build.name,
                    "shards": found.shards,
                    "here": found.whole,
                    "wrong": found.wrong,
                    "unfinished": found.unfinished,
                    "store": found.store,
                    "problems": [
                        {"where": item.where, "kind": item.kind, "path": item.path, "detail": item.detail}
                        for item in found.problems
                    ],
                },
                option=orjson.OPT_INDENT_2,
            )
        )
    else:
        for problem in found.problems:
            click.echo(str(problem))
        click.echo(_verified(subject.build.name, found))
        for way in ways_out(found):
            click.echo(way, err=True)
    sys.exit(1 if found.problems else 0)


def _repair(subject: Target, found: Verified) -> bool:
    """Whether anything was uploaded again."""
    from shardmill.runlock import acquire
    from shardmill.store.repair import to_upload_again, upload_again

    shards = to_upload_again(found)
    if not shards:
        return False
    with acquire(subject.build.lock):
        for shard in shards:
            upload_again(subject.settings, subject.build, shard)
            click.echo(f"{shard}: uploaded again", err=True)
    return True


def _verified(name: str, found: Verified) -> str:
    """Where every shard stands, in one line."""
    parts = [f"{found.whole} of {counted(found.shards, 'shard')} {_are(found.whole)} whole here"]
    for shards, state in ((found.wrong, "wrong"), (found.unfinished, "not finished here")):
        if shards:
            more = f" and {len(shards) - _NAMED} more" if len(shards) > _NAMED else ""
            parts.append(f"{len(shards)} {_are(len(shards))} {state} ({', '.join(shards[:_NAMED])}{more})")
    if found.store is not None:
        parts.append(f"{found.store} {_are(found.store)} in the store")
    right = "what is finished is right" if found.unfinished else "all right"
    verdict = counted(len(found.problems), "problem") if found.problems else right
    return f"{name}: {', '.join(parts)}: {verdict}."


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


@click.command()
@click.option(
    "--delete",
    "doomed",
    multiple=True,
    metavar="WHAT",
    help="Delete `unnamed` (objects that no manifest names), `uploads` (left-over multipart uploads), or a build by "
    "its folder's name. Can be given several times.",
)
@click.option("--yes", is_flag=True, help="Delete without asking.")
@click.option(
    "--older-than",
    "hours",
    type=click.FloatRange(min=0),
    default=24.0,
    show_default=True,
    help="Hours: younger unnamed objects and uploads are kept, another machine may be at them.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@build_options
def inventory(
    doomed: tuple[str, ...],
    yes: bool,
    hours: float,
    as_json: bool,
    root: Path | None,
    configfiles: tuple[Path, ...],
) -> None:
    """Everything under the bucket and prefix by build and kind, its age and cost, and what is left over."""
    from shardmill.store.client import Store
    from shardmill.store.inventory import as_json as json_of
    from shardmill.store.inventory import at_work, delete, plan_deletion, take_inventory

    settings = _store_settings(root, configfiles)
    store = Store(settings.s3)
    found = take_inventory(settings.s3, store)
    price = settings.cost.usd_per_gb_month
    if as_json:
        click.echo(orjson.dumps(json_of(found, price), option=orjson.OPT_INDENT_2))
    else:
        from shardmill.store.tables import inventory_lines

        for line in inventory_lines(found, price):
            click.echo(line)
    if not doomed:
        return
    deletion = plan_deletion(found, doomed, timedelta(hours=hours))
    if running := at_work(store, found, doomed):
        raise ShardmillError(
            f"A run is at work on {', '.join(running)}, and would go on as if its shards were there: stop it first. "
            f"One that was killed counts as gone after three minutes. Nothing was deleted."
        )
    if not deletion.keys and not deletion.uploads:
        click.echo(f"Nothing to delete: {', '.join(doomed)} has nothing older than {hours:g} h.", err=True)
        return
    what = f"{counted(len(deletion.keys), 'object')} and {counted(len(deletion.uploads), 'unfinished upload')}"
    what += f" of {', '.join(doomed)}"
    if not yes and not click.confirm(f"Delete {what} in s3://{store.bucket}/{settings.s3.prefix}?", err=True):
        raise ShardmillError("Nothing was deleted.")
    delete(store, deletion)
    click.echo(f"Deleted {what}.", err=True)


@click.command()
@click.argument("name", metavar="BUILD")
@click.option(
    "--configfile",
    "configfiles",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Where the store is: laid over config/config.yaml.  [default: as results/latest last ran]",
)
@click.option("--results", type=click.Path(path_type=Path), default=None, help="Folder that the build is put in.")
def pull(name: str, configfiles: tuple[Path, ...], results: Path | None) -> None:
    """Brings BUILD (its folder's name) here from the store, verified. Run again, it goes on where it stopped.

    Exit code 0: the whole build is here. 1: a part of it; the last line says what.
    """
    from shardmill.runlock import acquire
    from shardmill.store.pull import find_build, pull_build

    if "/" in name or name in ("", ".", "..", "latest"):
        raise UsageError(
            f"{name!r} is not a build's name, which is like sample-0123456789: `shardmill inventory` lists."
        )
    settings = _store_settings(None, configfiles)
    build = BuildPaths((results or Path(settings.results)) / name)
    # Looked for first: a mistyped name leaves nothing behind here.
    found = find_build(settings, name)
    bar = click.progressbar(length=1, label="shards", file=sys.stderr, hidden=not sys.stderr.isatty())
    with acquire(build.lock), bar:

        def progress(done: int, shards: int) -> None:
            bar.length = shards
            bar.update(1)

        pulled = pull_build(settings, build, found, progress)
    for problem in pulled.problems:
        click.echo(f"Error: {problem}", err=True)
    _remember(settings, build)
    of = pulled.shards if pulled.shards is not None else "an unknown number of"
    came = (
        f"{len(pulled.complete)} of {of} shards and {counted(pulled.files, 'other file')} of {name} are in {build.root}"
    )
    if pulled.whole:
        click.echo(f"Pulled whole: {came} ({pulled.downloaded / 1e6:.1f} MB downloaded).")
        return
    missing = (
        f"{pulled.published} are published" if pulled.published != pulled.shards else "all have a manifest in the store"
    )
    click.echo(f"Pulled in part: {came}; {missing}, {counted(len(pulled.problems), 'problem')}.")
    sys.exit(1)


def _store_settings(root: Path | None, configfiles: tuple[Path, ...]) -> Settings:
    """Settings that name a store, which outlives its builds."""
    settings = settings_for(root, configfiles)
    if settings.s3.bucket is None:
        raise UsageError("No store is named: give --configfile with a config that sets s3.bucket.")
    return settings


def _remember(settings: Settings, build: BuildPaths) -> None:
    """Leaves the settings that later commands on this build go by, its identity's where they are known."""
    if build.settings.exists() or not build.build_json.exists():
        return
    identity = read_json(build.build_json)["identity"]
    values = replace(settings, name=build.name.rpartition("-")[0]).as_dict()
    values["prompts"] = identity["prompts"]
    values["sampling"] = identity["sampling"]
    values["model"] |= {key: identity["model"][key] for key in ("name", "revision", "thinking", "context")}
    try:
        write_json(build.settings, resolve(values).as_dict())
    except SettingsError as error:
        click.echo(
            f"Commands on {build.root} need --configfile, since its settings don't fit this config. {error}", err=True
        )
