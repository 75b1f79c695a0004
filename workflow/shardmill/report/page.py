"""quality/report.html: one file that needs no network. Text goes through Jinja's autoescape, figures through JSON."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson

from shardmill.catalog import connect
from shardmill.files import read_json, write_text
from shardmill.paths import BuildPaths, shard_names
from shardmill.quality.verdict import format_value
from shardmill.report import figures
from shardmill.report.data import ReportData, read_data
from shardmill.report.samples import decoder, read_samples
from shardmill.settings import Settings
from shardmill.wording import NOTES

_ASSETS = Path(__file__).with_name("assets")


def write_report(build: BuildPaths, settings: Settings) -> None:
    """Writes quality/report.html from quality/report.json, build.json and the build's files."""
    report, facts = read_json(build.quality_report), read_json(build.build_json)
    with connect(build) as connection:
        data = read_data(connection)
    decode = decoder(settings)
    there = [shard for shard in shard_names(settings.prompts.shards) if build.tokens(shard).exists()]
    drawn = _figures(report, data)
    page = _environment().get_template("page.html.j2")
    html = page.render(
        report=report,
        facts=facts,
        settings=settings,
        data=data,
        headline=_headline(report, data, settings),
        checks=sorted(report["checks"], key=_check_order),
        cost=_cost(data, settings),
        reused=_reused(report),
        notes=_notes(facts),
        badge=_badge(report),
        effort=_effort(report),
        samples=read_samples(build, there, decode) if decode is not None else None,
        setting_rows=_setting_rows(settings),
        plots=drawn,
        figures=_json_for_html(drawn),
        style=(_ASSETS / "style.css").read_text(encoding="utf-8"),
        script=(_ASSETS / "page.js").read_text(encoding="utf-8"),
        plotly=_plotly(),
    )
    write_text(build.report_page, html)


def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": lambda number: "–" if number is None else f"{number:,}",
        "decimal": lambda number, digits=1: "–" if number is None else f"{number:,.{digits}f}",
        "value": format_value,
        "duration": _duration,
        "words": lambda name: str(name).replace("_", " "),
    }
    return environment


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    # Inside <script> only this sequence would end it early.
    return script.replace("</script", "<\\/script")


def _json_for_html(value: Any) -> str:
    """JSON that cannot end the <script> element it stands in, whatever texts it holds."""
    return orjson.dumps(value).decode().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _figures(report: dict[str, Any], data: ReportData) -> dict[str, figures.Figure]:
    found = {"flow": figures.flow(report["accounting"], data.rejects, data.failures, _reused(report))}
    for index, (name, lengths) in enumerate((report.get("lengths") or {}).items()):
        found[f"lengths-{name}"] = figures.histogram(lengths, figures.COLOURS[index])
    if data.accept_by_length:
        found["accept-by-length"] = figures.accept_by_length(data.accept_by_length)
    if data.timeline is not None:
        found["rates"] = figures.rates(data.timeline)
        if any(any(values) for values in data.timeline.failures.values()):
            found["failures"] = figures.failures_over_time(data.timeline)
        if data.accept_by_length:
            found["accept-over-time"] = figures.accept_over_time(data.timeline)
    return found


def _reused(report: dict[str, Any]) -> dict[str, int]:
    """Rows by the build that they were taken from. The report may be of an earlier version, which has none."""
    reused: dict[str, int] = report.get("reused_from") or {}
    return reused


def _notes(facts: dict[str, Any]) -> dict[str, int]:
    """How often what was mended in records, or stands out in them."""
    counts = facts.get("counts") or {}
    noted = {**counts.get("notes", {}), "merged_users": counts.get("merged_users", 0)}
    return {what: noted[name] for name, what in NOTES.items() if noted.get(name)}


def _badge(report: dict[str, Any]) -> tuple[str, str]:
    """The verdict: a class of style.css, and the word."""
    if report.get("verdict") == "none":
        return "warn", "no verdict"
    return ("good", "passed") if report["passed"] else ("bad", "not passed")


def _effort(report: dict[str, Any]) -> str | None:
    """What was asked again, and what was cut, in a sentence; None where the build's files don't tell."""
    effort = report.get("effort")
    if effort is None:
        return None
    again = [f"{count:,} {kind.replace('_', ' ')}" for kind, count in effort["faults"].items()]
    useless = [f"{count:,} {kind.replace('_', ' ')}" for kind, count in effort["degenerate"].items()]
    return (
        f"Server faults, all tried again: {', '.join(again) or 'none'}. Answers of no use, asked again: "
        f"{', '.join(useless) or 'none'}. Answers cut at their stop token: {effort['cut_at_stop']:,}."
    )


def _headline(report: dict[str, Any], data: ReportData, settings: Settings) -> list[tuple[str, str, str]]:
    """Label, value and a line of explanation."""
    totals, accounting, cost = data.totals, report["accounting"], _cost(data, settings)
    answered = totals["ok"] / accounting["prompts"] if accounting["prompts"] else None
    rate = sum(server["tokens"] for server in data.servers) / max(_longest(data), 1e-9) if data.servers else None
    found = [
        ("Training rows", f"{totals['ok']:,}", f"in {totals['shards']:,} shards"),
        (
            "Supervised tokens",
            _short_count(totals["tokens"]),
            f"and {_short_count(totals['prompt_tokens'])} of prompts",
        ),
        ("Prompts answered", format_value(answered, "share"), f"{accounting['failed']:,} failed"),
        ("Mean answer", format_value(totals["mean_tokens"], "tokens"), "tokens"),
        (
            "Cut by length",
            format_value(totals["truncated"], "share"),
            f"at {settings.sampling.max_new_tokens:,} new tokens",
        ),
    ]
    if totals["accept_length"] is not None:
        found.append(("Accept length", f"{totals['accept_length']:.2f}", "tokens a step"))
    if rate is not None:
        found.append(
            (
                "Tokens a second",
                format_value(round(rate), ""),
                f"over {len(data.servers)} servers" if len(data.servers) > 1 else "one server",
            )
        )
    if totals["reused"]:
        found.append(("Reused rows", f"{totals['reused']:,}", "from earlier builds"))
    if cost["usd"] is not None:
        found.append(("Cost", f"${cost['usd']:,.2f}", f"{cost['hours']:,.1f} GPU-hours"))
    return found


def _longest(data: ReportData) -> float:
    return float(max(server["active_s"] for server in data.servers))


def _cost(data: ReportData, settings: Settings) -> dict[str, float | None]:
    """GPU-hours are the servers' active hours: one GPU serves one server (DESIGN.md, Words)."""
    hours = sum(server["active_s"] for server in data.servers) / 3600
    price, storage = settings.cost.usd_per_gpu_hour, settings.cost.usd_per_gb_month
    return {
        "hours": hours,
        "usd": None if price is None else hours * price,
        "usd_per_million": None
        if price is None or not data.totals["tokens"]
        else hours * price / data.totals["tokens"] * 1e6,
        "gigabytes": data.stored_bytes / 1e9,
        "usd_per_month": None if storage is None else data.stored_bytes / 1e9 * storage,
    }


def _setting_rows(settings: Settings) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in settings.as_dict().items():
        items = value.items() if isinstance(value, dict) else [("", value)]
        rows += [(f"{name}.{key}" if key else name, orjson.dumps(item).decode()) for key, item in items]
    return rows


def _check_order(check: dict[str, Any]) -> tuple[bool, bool, bool, str]:
    return check["passed"], check["severity"] != "error", check["limit"] is None, check["name"]


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return str(timedelta(seconds=round(seconds))) if seconds < 86400 else f"{seconds / 3600:,.1f} h"


def _short_count(number: int) -> str:
    for bound, letter in ((10**9, "B"), (10**6, "M"), (10**4, "K")):
        if number >= bound:
            return f"{number / (1000 if letter == 'K' else bound):,.{2 if letter == 'B' else 1}f} {letter}"
    return f"{number:,}"
