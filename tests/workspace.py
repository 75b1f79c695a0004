"""A folder to run the workflow in as a user would: its own copy of the workflow's files, configs and results."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from prefork import Forked, Prefork

REPO = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


class Workspace:
    """The workflow in `root`, with `config` laid over the default config as `overlay.yaml`."""

    def __init__(self, root: Path, config: Mapping[str, Any] | None = None) -> None:
        self.root = root
        for part in ("Snakefile", "profiles", "config"):
            source = REPO / part
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, root / part)
        shutil.copytree(REPO / "workflow" / "rules", root / "workflow" / "rules")
        self.overlay: dict[str, Any] = {}
        self.configure(config or {})

    def configure(self, config: Mapping[str, Any]) -> None:
        """Lays `config` over what was configured so far, a level deep."""
        for key, value in config.items():
            if isinstance(value, Mapping):
                self.overlay[key] = {**self.overlay.get(key, {}), **value}
            else:
                self.overlay[key] = value
        (self.root / "overlay.yaml").write_text(yaml.safe_dump(self.overlay, allow_unicode=True))

    def command(self, *arguments: str, cores: int = 4) -> list[str]:
        return [str(BIN / "snakemake"), "--cores", str(cores), "--configfile", "overlay.yaml", *arguments]

    def snakemake(self, *arguments: str, cores: int = 4, expect: int = 0) -> subprocess.CompletedProcess[str]:
        done = _prefork().run(self.command(*arguments, cores=cores), cwd=self.root, env=self.environment())
        assert done.returncode == expect, f"exit code {done.returncode}, not {expect}:\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, cores: int = 4, environment: Mapping[str, str] | None = None) -> Forked:
        """A run in a process group of its own. It says what it says in `log`."""
        self.log.unlink(missing_ok=True)
        return _prefork().start(
            self.command(cores=cores), self.root, environment or self.environment(), self.log, self.log
        )

    @property
    def log(self) -> Path:
        return self.root / "run.log"

    def plan(self) -> dict[str, int]:
        """Jobs by rule as `snakemake -n` lists them, `all` left out."""
        return job_counts(self.snakemake("-n").stdout)

    def build(self) -> dict[str, int]:
        """Runs what is to be done; jobs by rule that were run."""
        done = self.snakemake()
        return job_counts(done.stdout + done.stderr)

    def shardmill(self, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(BIN / "shardmill"), *arguments], cwd=self.root, env=self.environment(), capture_output=True, text=True
        )
        assert done.returncode == expect, f"exit code {done.returncode}, not {expect}:\n{done.stdout}\n{done.stderr}"
        return done

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "NO_COLOR": "1"}

    @property
    def results(self) -> Path:
        """The folder of the build that ran last."""
        return (self.root / "results" / "latest").resolve()


@functools.cache
def _prefork() -> Prefork:
    """One for the whole session. It ends with it."""
    return Prefork()


def job_counts(output: str) -> dict[str, int]:
    """The first table "Job stats" of Snakemake's output."""
    table = re.search(r"^job\s+count\n-+\s+-+\n(.*?)\n\n", output, re.MULTILINE | re.DOTALL)
    if table is None:
        assert "Nothing to be done" in output, output
        return {}
    counts = {}
    for line in table.group(1).splitlines():
        name, count = line.split()
        if name not in ("all", "total"):
            counts[name] = int(count)
    return counts
