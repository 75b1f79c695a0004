"""Keeps pandas out of a job: pyarrow looks for it at its first array, and its import costs more than most jobs' work.

It is installed because Snakemake needs it; nothing in this package uses it. pyarrow and duckdb do without.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _NoPandas(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is kept out of this process (shardmill.lean)", name=fullname)
        return None


def without_pandas() -> None:
    """For the rest of this process. No effect on a pandas that is imported already."""
    sys.meta_path.insert(0, _NoPandas())
