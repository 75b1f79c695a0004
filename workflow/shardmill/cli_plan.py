"""`shardmill plan`: what a run would do, why, and what it would cost, before anything is spent."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import orjson

from shardmill.cli_common import build_options, target
from shardmill.estimate import Estimate, Known, estimate
from shardmill.facts import build_facts
from shardmill.journal import finished_rows
from shardmill.paths import BuildPaths
from shardmill.run import Run, plan_run
from shardmill.schemas import count_rows
from shardmill.status.outlook import server_count
from shardmill.wording import counted

_UNKNOWN = "not known yet"


def _positive(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter(f"{value:g} is not a number above 0.")
    return value


@click.command()
@click.option(
    "--mean-tokens", type=float, callback=_positive, help="Mean tokens of an answer, where no finished shard tells."
)
@click.option(
    "--tokens-per-s",
    type=float,
    callback=_positive,
    help="Tokens a second of one server, where no finished shard tells.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@build_options
def plan(
    mean_tokens: float | None,
    tokens_per_s: float | None,
    as_json: bool,
    root: Path | None,
    configfiles: tuple[Path, ...],
) -> None:
    """What a run would restore and generate, the tokens, hours and dollars that it would take."""
    settings = target(root, configfiles).settings
    run = plan_run(settings, Path())
    known = _known(run, mean_tokens, tokens_per_s)
    reusable = _reusable(run)
    summary = _summary(run, known, reusable, estimate(_to_be_asked(known, reusable)))
    if as_json:
        click.echo(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
        return
    for line in _lines(run, summary):
        click.echo(line)


def _known(run: Run, mean_tokens: float | None, tokens_per_s: float | None) -> Known:
    settings, build = run.settings, run.build
    measured = _measured(build, run.plan.shards)
    return Known(
        prompts_to_generate=_prompts_to_generate(run),
        mean_output_tokens=mean_tokens if mean_tokens is not None else measured.get("mean_output_tokens"),
        tokens_per_s_per_server=tokens_per_s if tokens_per_s is not None else measured.get("tokens_per_s"),
        servers=server_count(settings),
        usd_per_gpu_hour=settings.cost.usd_per_gpu_hour,
        usd_per_gb_month=settings.cost.usd_per_gb_month,
        mean_prompt_tokens=measured.get("mean_prompt_tokens"),
        bytes_per_row=measured.get("bytes_per_row"),
    )


def _prompts_to_generate(run: Run) -> int | None:
    """From build.json's counts or the prompt files' footers; None before the dataset was read.

    What a stopped run has had answered of a shard lies in its journal, and is not asked again. What it has reused lies
    there, too, and is counted with all that can be reused.
    """
    if not run.plan.generate:
        return 0
    counts = build_facts(run.build).get("counts")
    files = [run.build.prompts(shard) for shard in run.plan.generate]
    if counts:
        prompts = sum(int(counts["prompts_by_shard"][shard]) for shard in run.plan.generate)
    elif all(file.exists() for file in files):
        prompts = sum(count_rows(file) for file in files)
    else:
        return None
    answered = (row for shard in run.plan.generate for row in finished_rows(run.build.journal(shard)))
    return prompts - sum(row["reused_from"] is None for row in answered)


def _reusable(run: Run) -> int | None:
    """Prompts that older builds have answered already; None where that shows only when they are made."""
    from shardmill.reuse.count import count_reusable

    return count_reusable(run.settings, run.build, run.identity, run.plan.generate)


def _to_be_asked(known: Known, reusable: int | None) -> Known:
    """What a server has to do. An estimate without a count of what is reusable is one for the worst case."""
    if known.prompts_to_generate is None:
        return known
    return replace(known, prompts_to_generate=max(0, known.prompts_to_generate - (reusable or 0)))


def _measured(build: BuildPaths, shards: tuple[str, ...]) -> dict[str, float]:
    """Means over the finished shards of this build; nothing where there is none. Reused rows have no rate.

    Over all of them: at any moment a server is at several shards, and its time would be that of a few, its tokens not.
    """
    done = [shard for shard in shards if build.completions(shard).exists()]
    if not done:
        return {}
    from shardmill.status.rows import RowsCache, by_server, work

    read = RowsCache().read(build, dict.fromkeys(done, (0, 0))).values()
    servers = [work(spans) for spans in by_server(span for rows in read for span in rows.spans).values()]
    asked, tokens = sum(server.rows for server in servers), sum(server.tokens for server in servers)
    busy, ok = sum(server.busy_s for server in servers), sum(rows.ok for rows in read)
    files = [path for shard in done for path in (build.completions(shard), build.tokens(shard)) if path.exists()]
    means = {
        "mean_output_tokens": (tokens, asked),
        "mean_prompt_tokens": (sum(rows.prompt_tokens for rows in read), ok),
        "tokens_per_s": (tokens, busy),
        "bytes_per_row": (sum(path.stat().st_size for path in files), sum(rows.rows for rows in read)),
    }
    return {name: whole / part for name, (whole, part) in means.items() if part}


def _summary(run: Run, known: Known, reusable: int | None, costs: Estimate) -> dict[str, Any]:
    plan, s3 = run.plan, run.settings.s3
    finished = len(plan.shards) - len(plan.unfinished)
    return {
        "build": run.build.name,
        "dataset_sha256": run.digests.dataset,
        "tokenizer_sha256": run.digests.tokenizer,
        "store": f"s3://{s3.bucket}/{s3.prefix}" if s3.bucket else None,
        "shards": {
            "all": len(plan.shards),
            "finished": finished,
            "restore": len(plan.restore),
            "generate": len(plan.generate),
            "tokenize_only": len(set(plan.tokenize) - set(plan.generate)),
            "publish_only": len(set(plan.publish) - set(plan.tokenize)),
        },
        "checks": plan.quality,
        "again": _again(run),
        "reusable": reusable,
        "known": asdict(known),
        "estimate": asdict(costs),
        "missing": list(run.digests.missing),
    }


def _again(run: Run) -> list[str]:
    """What was there once and is to be made again, beside shards. An unfinished build's last files come anyway."""
    plan, build = run.plan, run.build
    again = ["build.json and rejects.parquet"] if plan.facts else []
    if plan.pilot_report and set(plan.pilot).isdisjoint(plan.generate):
        again.append("quality/pilot.json")
    if plan.quality and not plan.unfinished:
        again += [str(path.relative_to(build.root)) for path in build.last_files if not path.exists()]
        if not (build.quality_report.exists() and build.quality_checked(plan.checks_key).exists()):
            again.append("the quality checks")
    return again


def _lines(run: Run, summary: dict[str, Any]) -> list[str]:
    shards, known, costs = summary["shards"], summary["known"], summary["estimate"]
    hours = "GPU-hours" if run.settings.servers.engine == "sglang" else "CPU-hours"
    pilot = len([shard for shard in run.plan.pilot if shard in run.plan.generate])
    lines = [
        f"build      {run.build.root}" + ("" if run.build.root.exists() else "   (new)"),
        f"dataset    {summary['dataset_sha256']}",
        f"tokenizer  {summary['tokenizer_sha256']}",
        f"store      {summary['store'] or 'none: shards stay on this machine (s3.bucket)'}",
        "",
        f"shards     {shards['all']:>9,}",
        f"finished   {shards['finished']:>9,}   here, and right by their manifests: left alone",
        f"restore    {shards['restore']:>9,}   finished in S3",
        f"generate   {shards['generate']:>9,}   no completions here or in S3"
        + (f"; {pilot} of them the pilot, first" if run.plan.gate and pilot else ""),
        f"tokenize   {shards['tokenize_only']:>9,}   completions are here, training rows are not",
        f"publish    {shards['publish_only']:>9,}   no manifest yet, or not the right one",
        "",
        f"prompts    {_number(known['prompts_to_generate'])}   without an answer in this build",
        f"reusable   {_number(summary['reusable'])}   of them answered in older builds, right under these settings"
        + (" (later turns show as they come)" if run.settings.prompts.turns == "regenerate" else ""),
        f"tokens     {_number(costs['tokens'])}   {_at(known['mean_output_tokens'], 'an answer', '--mean-tokens')}",
        f"{hours:<11}{_number(costs['server_hours'], 1)}   "
        + _at(known["tokens_per_s_per_server"], "tokens a second each", "--tokens-per-s"),
        f"hours      {_number(costs['hours'], 1)}   {_servers(known['servers'])}",
        f"dollars    {_number(costs['usd'], 2)}"
        + ("" if known["usd_per_gpu_hour"] else "   set cost.usd_per_gpu_hour"),
        f"megabytes  {_number(None if costs['bytes'] is None else costs['bytes'] / 1e6, 1)}   on disk and in the bucket"
        + ("" if costs["usd_per_month"] is None else f", ${costs['usd_per_month']:.2f} a month"),
    ]
    if summary["again"]:
        lines.insert(lines.index("", 5), f"again      {', '.join(summary['again'])}: a run makes these again")
    return lines + [f"\nmissing    {sentence}" for sentence in summary["missing"]]


def _at(value: float | None, what: str, option: str) -> str:
    return f"the first finished shards tell, or {option}" if value is None else f"at {value:,.0f} {what}"


def _servers(count: int | None) -> str:
    return "the servers are not counted before they are there" if count is None else f"on {counted(count, 'server')}"


def _number(value: float | None, digits: int = 0) -> str:
    return f"{_UNKNOWN:>9}" if value is None else f"{value:>9,.{digits}f}"
