"""Keeps packages out of a job that pyarrow and duckdb look for, and whose import costs more than most jobs' work.

pandas is installed because Snakemake needs it; nothing in this package uses it. numpy is used by what reads, renders
and checks. pyarrow and duckdb do without both.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Without(MetaPathFinder):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self._packages:
            raise ModuleNotFoundError(f"{fullname} is kept out of this process (shardmill.lean)", name=fullname)
        return None


def without(*packages: str) -> None:
    """For the rest of this process. No effect on a package that is imported already."""
    sys.meta_path.insert(0, _Without(packages))
