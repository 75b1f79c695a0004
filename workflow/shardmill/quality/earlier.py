"""Checks of the prompts' texts on a machine without prompts, as one is that has restored its shards.

Their last result over all prompts is carried on, from this machine or from the report in the store, and held against
the limits of today. What can't be judged at all is said.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from shardmill.errors import DamagedFile
from shardmill.files import read_json, write_json
from shardmill.paths import BuildPaths

log = logging.getLogger(__name__)


def shards_without_prompts(build: BuildPaths) -> int:
    """Of the shards with completions on this machine."""
    answered, asked = (
        {path.name for path in (build.root / kind).glob("shard-*.parquet")} for kind in ("completions", "prompts")
    )
    return len(answered - asked)


def keep_result(build: BuildPaths, report: Mapping[str, Any]) -> None:
    """Keeps a report over all prompts for a time when they are gone."""
    write_json(build.judged, dict(report))


def earlier_results(build: BuildPaths) -> dict[str, dict[str, Any]]:
    """The kept report's results that have a value, by check, each with the time at which it was judged."""
    try:
        report = read_json(build.judged)
        return {
            check["name"]: {"judged_at": report["checked_at"], **check}
            for check in report["checks"]
            if check["value"] is not None
        }
    except FileNotFoundError:
        return {}
    except (DamagedFile, KeyError, TypeError) as error:
        log.warning("The report of an earlier check can't be read, and nothing is taken from it. %s", error)
        return {}
