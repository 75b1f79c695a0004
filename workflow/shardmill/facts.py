"""build.json: what a build is, and what its steps learned of its model and its prompts."""

from __future__ import annotations

from typing import Any

from shardmill.files import read_json
from shardmill.paths import BuildPaths


def build_facts(build: BuildPaths) -> dict[str, Any]:
    """build.json, or nothing where the build has none yet. Its model and counts are null until the prompts are made.

    Raises DamagedFile.
    """
    try:
        return read_json(build.build_json)
    except FileNotFoundError:
        return {}
