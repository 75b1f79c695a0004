"""A check is a .sql file: comments that say what its value means, and a query that gives it.

workflow/checks/README.md is the guide for writing one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from shardmill.errors import DataError
from shardmill.settings import Quality

SCOPES = ("pilot", "shard", "build")

_HEADER = re.compile(r"--\s*(\w+):\s*(.*)")
_EXAMPLES = re.compile(r"^--\s*examples:.*$", re.MULTILINE)
_KEYS = {"title", "unit", "limit", "direction", "severity", "scope", "needs", "reused", "advice"}


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `limit` None: the value is reported and not judged."""

    name: str
    title: str
    unit: str
    limit: float | None
    direction: str  # max: the value may not be above the limit; min: not below
    severity: str  # error | warning
    scopes: tuple[str, ...]
    needs_prompts: bool  # it reads the prompts' texts, which a machine that has restored its shards lacks
    reused_apart: bool  # rows that were asked here are judged by themselves, too, beside those of other builds
    advice: str
    query: str
    examples: str | None
    path: Path

    def passes(self, value: float | None, limit: float | None) -> bool:
        """Without a value (no row that it is about) or a limit there is nothing to fail."""
        if value is None or limit is None:
            return True
        return value <= limit if self.direction == "max" else value >= limit


@dataclass(frozen=True, slots=True)
class CheckSet:
    """The checks to run under a build's settings, and the names of those that its settings turn off."""

    checks: tuple[Check, ...]
    off: tuple[str, ...]

    def of_scope(self, scope: str) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if scope in check.scopes)


def load_checks(quality: Quality) -> CheckSet:
    """Shipped checks and those of `quality.checks_dir` (which win by name), with `quality.limits` laid over theirs."""
    found = {path.stem: path for path in quality.check_files}
    off = tuple(sorted(name for name, limit in quality.limits.items() if limit is None and name in found))
    checks = [read_check(path) for name, path in sorted(found.items()) if name not in off]
    return CheckSet(tuple(_with_limit(check, quality.limits) for check in checks), off)


def read_check(path: Path) -> Check:
    """Raises DataError, naming the file, for a header that is incomplete or says what is not known."""
    text = path.read_text(encoding="utf-8")
    query, *examples = _EXAMPLES.split(text, maxsplit=1)
    header = _header(query, path)

    def refuse(what: str) -> DataError:
        return DataError(f"The check {path} {what}; see workflow/checks/README.md.")

    for key in ("title", "unit"):
        if not header.get(key):
            raise refuse(f"has no line `-- {key}: …`")
    direction, severity = header.get("direction", "max"), header.get("severity", "error")
    if direction not in ("max", "min"):
        raise refuse(f"has direction {direction!r}, which must be max or min")
    if severity not in ("error", "warning"):
        raise refuse(f"has severity {severity!r}, which must be error or warning")
    scopes = tuple(part.strip() for part in header.get("scope", ", ".join(SCOPES)).split(","))
    if not set(scopes) <= set(SCOPES):
        raise refuse(f"has scope {header['scope']!r}, which must name some of {', '.join(SCOPES)}")
    if header.get("needs", "prompts") != "prompts":
        raise refuse(f"needs {header['needs']!r}, which must be prompts")
    if header.get("reused", "apart") != "apart":
        raise refuse(f"has reused {header['reused']!r}, which must be apart")
    try:
        limit = float(header["limit"]) if header.get("limit") else None
    except ValueError:
        raise refuse(f"has limit {header['limit']!r}, which must be a number") from None
    return Check(
        name=path.stem,
        title=header["title"],
        unit=header["unit"],
        limit=limit,
        direction=direction,
        severity=severity,
        scopes=scopes,
        needs_prompts="needs" in header,
        reused_apart="reused" in header,
        advice=header.get("advice", ""),
        query=query,
        examples=examples[0] if examples else None,
        path=path,
    )


def _header(query: str, path: Path) -> dict[str, str]:
    """The `-- key: value` lines before the SQL. A comment line without a key goes on with the one before."""
    header: dict[str, str] = {}
    last = None
    for line in query.splitlines():
        if line.strip() and not line.startswith("--"):
            break
        match = _HEADER.fullmatch(line.strip())
        if match:
            last, value = match.group(1), match.group(2)
            if last not in _KEYS:
                raise DataError(
                    f"The check {path} has an unknown header {last!r}; known are {', '.join(sorted(_KEYS))}."
                )
            header[last] = value.strip()
        elif line.startswith("--") and last is not None:
            header[last] = f"{header[last]} {line.lstrip('- ').strip()}".strip()
    return header


def _with_limit(check: Check, limits: dict[str, float | None]) -> Check:
    return replace(check, limit=limits[check.name]) if check.name in limits else check
