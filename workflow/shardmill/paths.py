"""Where everything of a build lies. No other module joins these names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_SHARD = re.compile(r"shard-(\d{5,})-of-(\d{5,})")
_BUILD = re.compile(r".+-[0-9a-f]{10}")


def shard_name(index: int, count: int) -> str:
    """`shard-00042-of-01828`."""
    return f"shard-{index:05d}-of-{count:05d}"


def shard_names(count: int) -> list[str]:
    return [shard_name(index, count) for index in range(count)]


def shard_index(name: str) -> int:
    match = _SHARD.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not a shard's name")
    return int(match.group(1))


def is_build_name(name: str) -> bool:
    """Whether a folder may be a build's: `<name>-<id>`, the id being 10 hex digits."""
    return _BUILD.fullmatch(name) is not None


@dataclass(frozen=True)
class BuildPaths:
    """The files of one build. What DESIGN.md lists is fixed; `run/` and `logs/` are this program's own."""

    root: Path

    @property
    def name(self) -> str:
        """The folder's name, `<name>-<id>`."""
        return self.root.name

    @property
    def build_json(self) -> Path:
        return self.root / "build.json"

    def prompts(self, shard: str) -> Path:
        return self.root / "prompts" / f"{shard}.parquet"

    @property
    def rejects(self) -> Path:
        return self.root / "prompts" / "rejects.parquet"

    def completions(self, shard: str) -> Path:
        return self.root / "completions" / f"{shard}.parquet"

    def tokens(self, shard: str) -> Path:
        return self.root / "tokens" / f"{shard}.parquet"

    def manifest(self, shard: str) -> Path:
        return self.root / "manifests" / f"{shard}.json"

    @property
    def facts_found(self) -> Path:
        """There while a run that looks for lost counts, model and rejects needs them."""
        return self.run / "facts.found"

    @property
    def pilot_report(self) -> Path:
        return self.root / "quality" / "pilot.json"

    @property
    def quality_report(self) -> Path:
        return self.root / "quality" / "report.json"

    @property
    def judged(self) -> Path:
        """The last report of the build that was made over all prompts (quality/earlier.py)."""
        return self.run / "judged.json"

    @property
    def report_page(self) -> Path:
        return self.root / "quality" / "report.html"

    @property
    def card(self) -> Path:
        """The dataset card, so that the folder can be uploaded to a hub as it is."""
        return self.root / "README.md"

    @property
    def catalog(self) -> Path:
        return self.root / "catalog.duckdb"

    @property
    def last_files(self) -> tuple[Path, ...]:
        """What is made of a build as a whole, once all its shards are finished."""
        return (self.quality_report, self.report_page, self.catalog, self.card)

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def run(self) -> Path:
        """State of the run at work or the last one: lock, settings, plan, progress, journals."""
        return self.root / "run"

    @property
    def lock(self) -> Path:
        return self.run / "lock"

    @property
    def halt(self) -> Path:
        """Why the run at work or the last one starts no more jobs (halt.py)."""
        return self.run / "halt.json"

    @property
    def troubles(self) -> Path:
        """Why shards of the run at work or the last one failed by themselves, a line each (halt.py)."""
        return self.run / "troubles.txt"

    @property
    def halt_reserve(self) -> Path:
        """Blanks whose place on the disk `halt` takes when there is no other."""
        return self.run / "halt.reserve"

    @property
    def settings(self) -> Path:
        """The settings that the build last ran with, resolved, as JSON."""
        return self.run / "settings.json"

    @property
    def owner(self) -> Path:
        """A random id of this folder: what claims in the store are held by."""
        return self.run / "owner"

    @property
    def plan(self) -> Path:
        """The plan of the run at work, frozen for processes that parse the workflow again."""
        return self.run / "plan.json"

    def gate_passed(self, key: str) -> Path:
        """There when the pilot passed the checks of `plan.checks_key`."""
        return self.run / f"gate-{key}.passed"

    def pilot_checked(self, key: str) -> Path:
        return self.run / f"pilot-{key}.checked"

    def quality_checked(self, key: str) -> Path:
        return self.run / f"quality-{key}.checked"

    def quality_passed(self, key: str) -> Path:
        """There when the whole build passed the checks of `plan.checks_key`."""
        return self.run / f"quality-{key}.passed"

    @property
    def reuse(self) -> Path:
        """What the run found in older builds: an index of their rows, and files fetched for it."""
        return self.run / "reuse"

    def discarded(self, shard: str) -> Path:
        """There while a discarded shard is not finished anew (store/discarded.py)."""
        return self.run / "discarded" / shard

    def journal(self, shard: str) -> Path:
        return self.run / "journals" / f"{shard}.jsonl"

    @property
    def couriered(self) -> Path:
        """As old as the last sending of logs to the store (courier.py)."""
        return self.run / "couriered"

    @property
    def elsewhere(self) -> Path:
        """What other machines on this build last sent of their progress (status/elsewhere.py)."""
        return self.run / "elsewhere.json"

    @property
    def uploads(self) -> Path:
        """What each upload to the store took (store/uploads.py)."""
        return self.run / "uploads"

    def upload(self, shard: str) -> Path:
        return self.uploads / f"{shard}.json"

    def progress(self, shard: str) -> Path:
        return self.run / "progress" / f"{shard}.json"
