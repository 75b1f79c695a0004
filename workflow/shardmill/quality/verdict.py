"""A report as a table for the screen: what failed, by how much, on which rows, and what to change."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from shardmill.wording import counted

_WIDTH = 110
_OF = {"pilot": "the pilot", "shard": "the shard", "build": "the build"}


def render_verdict(report: dict[str, Any]) -> str:
    """Text of several lines. Failed checks come with their examples and advice, the others are only counted."""
    checks = report["checks"]
    bad = [check for check in checks if not check["passed"]]
    accounting = report.get("accounting")
    lines = [_headline(report, bad)]
    if accounting is not None and not accounting["balanced"]:
        lines.append("The accounting does not balance: " + _accounts(accounting) + ".")
    if bad:
        ranked = sorted(bad, key=_rank)
        name, value, limit = (
            max(len(text) for text in column)
            for column in zip(
                ("check", "value", "limit"),
                *((check["name"], _number(check, "value"), _limit(check)) for check in ranked),
                strict=True,
            )
        )
        lines += ["", f"{'check':<{name}}  {'value':>{value}}  {'limit':>{limit}}  "]
        for check in ranked:
            verdict = _verdict(check)
            lines.append(
                f"{check['name']:<{name}}  {_number(check, 'value'):>{value}}  {_limit(check):>{limit}}  {verdict}"
            )
        for check in ranked:
            lines += ["", f"{check['name']}: {check['title']}"]
            lines += [
                _wrapped(f"{example['prompt_id'] or '-':.12}  {example['what']}", "  e.g. ")
                for example in check["examples"]
            ]
            if check["advice"]:
                lines.append(_wrapped(check["advice"], "  → "))
    if without := report.get("shards_without_prompts"):
        lines += ["", _wrapped(_without_prompts(without, checks), "")]
    if report.get("off"):
        lines += ["", f"Turned off by quality.limits: {', '.join(report['off'])}."]
    return "\n".join(lines)


def _without_prompts(shards: int, checks: list[dict[str, Any]]) -> str:
    """What became of the checks that need prompts where those of `shards` are missing (quality/earlier.py)."""
    carried = [f"{check['name']} (of {check['judged_at']})" for check in checks if check.get("judged_at")]
    not_judged = [check["name"] for check in checks if "judged_at" in check and check["judged_at"] is None]
    said = f"The prompts of {counted(shards, 'shard')} are not on this machine"
    if carried:
        said += f"; carried over from when they were: {', '.join(carried)}"
    if not_judged:
        said += f"; not judged over all rows: {', '.join(not_judged)}"
    return f"{said}."


def _headline(report: dict[str, Any], bad: list[dict[str, Any]]) -> str:
    what = f"{_OF[report['scope']]} of {report['build']} ({report['rows']:,} rows)"
    if report.get("verdict") == "none":  # a report of an earlier version says passed or not, and no more
        return f"Checks of {what}: no verdict: {report['note']}."
    return f"Checks of {what}: {', '.join(_counted(report['checks'], bad))}."


def _counted(checks: list[dict[str, Any]], bad: list[dict[str, Any]]) -> Iterator[str]:
    """What had nothing to judge has not passed, and is counted apart (the report marks it the same way)."""
    reported = sum(check["limit"] is None for check in checks)
    without_rows = sum(check["value"] is None for check in checks if check["limit"] is not None)
    stopping = sum(_verdict(check) == "FAILED" for check in bad)
    others = len(bad) - stopping
    yield f"{len(checks) - len(bad) - reported - without_rows} passed"
    if stopping:
        yield f"{stopping} FAILED"
    if others:
        yield f"{others} of no consequence (warnings or overridden)"
    if without_rows:
        yield f"{without_rows} had no rows to judge"
    if reported:
        yield f"{reported} only reported"


def _verdict(check: dict[str, Any]) -> str:
    if check["overridden"]:
        return "overridden"
    return "FAILED" if check["severity"] == "error" else "warning"


def _rank(check: dict[str, Any]) -> tuple[int, str]:
    return ("FAILED", "overridden", "warning").index(_verdict(check)), check["name"]


def _limit(check: dict[str, Any]) -> str:
    return f"{'≤' if check['direction'] == 'max' else '≥'} {_number(check, 'limit')}"


def _number(check: dict[str, Any], key: str) -> str:
    return format_value(check[key], check["unit"])


def format_value(value: float | None, unit: str) -> str:
    """A value as a person reads it: shares as percentages, whole numbers with separators, else three digits."""
    if value is None:
        return "–"
    if unit == "share":
        return f"{100 * value:.1f}%"
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"


def _accounts(accounting: dict[str, Any]) -> str:
    first = " + ".join(
        f"{accounting[name]} {name.replace('_', ' ')}"
        for name in ("conversations", "joined", "rejected", "duplicates", "beyond_limit")
    )
    second = " + ".join(f"{accounting[name]} {name.replace('_', ' ')}" for name in ("ok", "failed", "not_reached"))
    return f"{accounting['records']} records against {first}; {accounting['prompts']} prompts against {second}"


def _wrapped(text: str, lead: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_long_words=True)
