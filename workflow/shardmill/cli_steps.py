"""`shardmill step …`: a command for each rule, which reads the build's settings and calls one function."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from shardmill import halt, runlock
from shardmill.errors import BadObject, DamagedFile, Refused, ShardError, ShardmillError, StoreError
from shardmill.files import read_json
from shardmill.lean import without
from shardmill.paths import BuildPaths
from shardmill.settings import Settings, frozen
from shardmill.store.patience import be_patient


@dataclass(frozen=True, slots=True)
class Job:
    build: BuildPaths
    settings: Settings
    run: dict[str, Any] | None  # who holds the build's lock; None for a step by hand


class _Steps(click.Group):
    """A step that fails halts its run, unless it is its own shard's trouble alone."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except ShardError as error:
            if isinstance(context.obj, Job):
                halt.note(context.obj.build, str(error))
            raise
        except Exception as error:
            if isinstance(context.obj, Job):
                halt.ask(context.obj.build, context.obj.run, str(error))
            raise


@click.group(cls=_Steps)
@click.option("--build", "root", type=click.Path(path_type=Path), required=True, help="The build's folder.")
@click.option("--log", "log", type=click.Path(path_type=Path), default=None, help="Where the job's log goes.")
@click.pass_context
def step(context: click.Context, root: Path, log: Path | None) -> None:
    """Steps of the workflow, as its rules call them."""
    build = BuildPaths(root)
    _log_to(log)
    without("pandas")
    if not build.settings.exists():
        raise ShardmillError(f"{build.settings} is missing: start this step by a run of snakemake, not by hand.")
    settings = frozen(build.settings)
    be_patient(settings.generate.patience_s)
    context.obj = Job(build, settings, runlock.holder(build.lock))


@step.command()
@click.option("--threads", type=int, default=1)
@click.pass_obj
def prompts(job: Job, threads: int) -> None:
    """Dataset to prompts."""
    from shardmill.plan import Plan
    from shardmill.prompts import make_prompts

    make_prompts(job.settings, job.build, Plan.load(job.build.plan).prompts, workers=threads)
    _publish_early(job, [job.build.build_json, job.build.rejects])


@step.command()
@click.argument("shard")
@click.pass_obj
def generate(job: Job, shard: str) -> None:
    """Prompts of a shard to completions, unless another machine on the same build has published them meanwhile."""
    if job.settings.prompts.turns != "regenerate":  # which renders later turns here, by transformers
        without("numpy")
    from shardmill.descriptors import allow_many
    from shardmill.fleet.client import Fleet
    from shardmill.generate.job import generate_shard
    from shardmill.generate.pace import pace
    from shardmill.generate.space import Space
    from shardmill.reuse.lookup import open_lookup
    from shardmill.store.claims import claim_or_published

    allow_many()
    # Before the claim, so that another machine can take the shard meanwhile.
    Space(job.build.root, job.settings.generate.patience_s, pace().space_s).wait()
    claim = claim_or_published(job.settings, job.build, shard)
    if claim is None:
        _restore(job, shard)
        return
    # What was made of earlier answers must not stand beside these: after a stop it would be published with them.
    for made in (job.build.manifest(shard), job.build.tokens(shard)):
        made.unlink(missing_ok=True)
    with claim, open_lookup(job.settings, job.build, shard) as lookup:
        generate_shard(job.settings, job.build, shard, join=partial(Fleet.join, run=job.run), reusable=lookup)


@step.command()
@click.argument("shard")
@click.pass_obj
def tokenize(job: Job, shard: str) -> None:
    """Completions of a shard to training rows."""
    without("numpy")
    from shardmill.tokens import tokenize_shard

    tokenize_shard(job.build, shard)


@step.command()
@click.argument("shard")
@click.pass_obj
def publish(job: Job, shard: str) -> None:
    """Checks a shard, uploads it, and writes its manifest."""
    from shardmill.quality.run import check_shard
    from shardmill.quality.verdict import render_verdict
    from shardmill.store.publish import publish_shard

    report = check_shard(job.build, job.settings, shard)
    if not report["passed"]:
        raise ShardmillError(f"Shard {shard} fails its checks and is not published.\n{render_verdict(report)}")
    publish_shard(job.settings, job.build, shard)


@step.command()
@click.argument("shard")
@click.pass_obj
def restore(job: Job, shard: str) -> None:
    """A finished shard from S3 to this machine."""
    without("numpy")
    _restore(job, shard)


@step.command("check-pilot")
@click.pass_obj
def check_pilot(job: Job) -> None:
    """Checks the pilot shards and writes quality/pilot.json."""
    from shardmill.plan import Plan
    from shardmill.quality.run import check_pilot

    check_pilot(job.build, job.settings, list(Plan.load(job.build.plan).pilot))
    _publish_early(job, [job.build.pilot_report])


@step.command("check-build")
@click.pass_obj
def check_build(job: Job) -> None:
    """Checks the whole build and writes quality/report.json."""
    from shardmill.quality.run import check_build
    from shardmill.store.restore import restore_facts

    restore_facts(job.settings, job.build)
    check_build(job.build, job.settings)


@step.command()
@click.pass_obj
def report(job: Job) -> None:
    """The report page, the catalog and the dataset card."""
    without("numpy")
    from shardmill.catalog import write_catalog
    from shardmill.plan import Plan
    from shardmill.report import write_card, write_report
    from shardmill.store.publish import publish_files

    build = job.build
    write_catalog(build)
    write_report(build, job.settings)
    write_card(build, job.settings)
    made = [build.build_json, build.quality_report, build.report_page, build.catalog, build.card]
    early = [path for path in (build.rejects, build.pilot_report) if path.exists()]
    try:
        publish_files(job.settings, build, [*made, *early])
    except Refused as error:
        if Plan.load(build.plan).publish:
            raise
        # A machine that only takes what others have made needs no right to write.
        logging.getLogger(__name__).warning("The report stays on this machine. %s", error)


@step.command()
@click.argument("report", type=click.Path(path_type=Path))
@click.pass_obj
def verdict(job: Job, report: Path) -> None:
    """Fails, with a table, when a report says that its checks did not pass."""
    from shardmill.quality.verdict import render_verdict

    checked = read_json(report)
    click.echo(render_verdict(checked), err=True)
    if not checked["passed"]:
        raise ShardmillError(
            f"The checks in {report} did not pass. Mend what they name, or go on knowingly with quality.override."
        )


def _restore(job: Job, shard: str) -> None:
    """A shard that is missing or wrong in the store is its own trouble, and the others go on."""
    from shardmill.store.restore import restore_shard

    try:
        restore_shard(job.settings, job.build, shard)
    except (BadObject, DamagedFile) as error:
        raise ShardError(str(error)) from None


def _publish_early(job: Job, paths: list[Path]) -> None:
    """Uploads what the report's step uploads as well: a store that is away at this moment holds nothing up."""
    from shardmill.store.publish import publish_files

    try:
        publish_files(job.settings, job.build, paths)
    except StoreError as error:
        names = ", ".join(path.name for path in paths)
        logging.getLogger(__name__).warning("%s goes up with the report. %s", names, error)


def _log_to(log: Path | None) -> None:
    """Notes and warnings of a job go to its log file and, short, to the screen."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    screen = logging.StreamHandler(sys.stderr)
    screen.setFormatter(logging.Formatter("%(message)s"))
    root.addHandler(screen)
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(log, mode="w", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        root.addHandler(file)
