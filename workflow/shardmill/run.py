"""One run of the workflow: which build it makes, what is left to do, and the lock that it holds while it does it."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from shardmill import __version__, halt, runlock
from shardmill.config_schema import typed
from shardmill.courier import Courier, start_courier
from shardmill.digests import UNKNOWN, InputDigests, input_digests
from shardmill.errors import DataError, ShardmillError, UsageError
from shardmill.facts import build_facts
from shardmill.files import write_json
from shardmill.identity import build_id, build_identity
from shardmill.order import places
from shardmill.paths import BuildPaths
from shardmill.plan import Plan, make_plan
from shardmill.runlock import RunLock, acquire, myself
from shardmill.settings import Settings, layered, overlay, resolve

if TYPE_CHECKING:
    from shardmill.store.listing import Published

# What a finished run suggests: columns that fit a terminal.
FIRST_QUERY = "select finish_reason, completion_tokens, left(text, 40) as answer from completions limit 5"
# Troubles of single shards that a run's last lines repeat.
_REPEATED = 5
_VERSIONS = ("snakemake", "pyarrow", "duckdb", "transformers", "tokenizers", "boto3")


class ConfigSettings(Protocol):
    """What is used of Snakemake's own (snakemake.settings.types.ConfigSettings)."""

    overwrite_config: Mapping[str, Any]
    config: Mapping[str, Any]


@dataclass
class Run:
    """What the Snakefile works with. `start` is called once, by a run that is not a dry one."""

    settings: Settings
    build: BuildPaths
    identity: dict[str, Any]
    digests: InputDigests
    plan: Plan
    # Who held the build's lock when the plan was made, or held it last.
    seen: tuple[bool, bytes]
    _lock: RunLock | None = None
    _courier: Courier | None = None

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """The order in which this machine takes the shards."""
        return places(self.settings, self.build)

    def start(self) -> None:
        """Takes the build's lock, and writes down what this run goes by before its first job."""
        try:
            self._start()
        except ShardmillError as error:
            _stop(error)

    def _start(self) -> None:
        if self.digests.missing and (self.plan.prompts or self.plan.facts or self.digests.tokenizer == UNKNOWN):
            raise DataError(self.digests.missing[0])
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        build = self.build
        before = runlock.last_holder(build.lock)
        self._lock = acquire(build.lock, myself(command))
        if self.seen[0] or before != self.seen[1]:
            raise UsageError(f"Another run on {build.name} has ended since this one was planned: run again.")
        if not self.plan.facts:
            build.facts_found.unlink(missing_ok=True)
        for stale in self._stale_verdicts():
            stale.unlink(missing_ok=True)
        write_json(build.settings, self.settings.as_dict())
        self.plan.save(build.plan)
        _write_build_json(build, self.identity)
        _point_latest(build)
        halt.watch(build)
        self._courier = start_courier(self.settings, build)

    def _send_last_words(self) -> None:
        if self._courier is not None:
            self._courier.stop()

    def _stale_verdicts(self) -> list[Path]:
        """Verdicts about shards that this run makes again: it may be killed before it judges them anew."""
        stale = list(self.build.run.glob("quality-*")) if self.plan.unfinished else []
        if not set(self.plan.pilot).isdisjoint(self.plan.generate):
            stale += [*self.build.run.glob("gate-*"), *self.build.run.glob("pilot-*")]
        return stale

    def succeeded(self) -> None:
        self._send_last_words()
        # Rows of older builds are copied by now, and the next run looks for them anew.
        shutil.rmtree(self.build.reuse, ignore_errors=True)
        if not self.build.quality_passed(self.plan.checks_key).exists():
            sys.stderr.write(f"What was asked for is done; build {self.build.name} as a whole is not complete yet.\n")
            return
        sys.stderr.write(
            f"Build {self.build.name} is complete.\n"
            f"  report   {self.build.report_page}\n"
            f"  rows     {self.build.root / 'tokens'}\n"
            f"  catalog  {self.build.catalog}\n"
            f"  query    shardmill query --build {shlex.quote(str(self.build.root))} '{FIRST_QUERY}'\n"
        )

    def failed(self) -> None:
        self._send_last_words()
        why = halt.reason(self.build)
        if why is not None:
            sys.stderr.write(f"No more jobs were started: {why}\n")
        troubles = halt.noted(self.build)
        for trouble in troubles[:_REPEATED]:
            sys.stderr.write(f"{trouble}\n")
        if len(troubles) > _REPEATED:
            sys.stderr.write(f"… and {len(troubles) - _REPEATED} more like these.\n")
        sys.stderr.write(
            f"Build {self.build.name} stopped; what is finished is kept, and the next run goes on from there. "
            f"Its logs are in {self.build.logs}.\n"
        )


def open_run(config: Mapping[str, Any], given: ConfigSettings, frozen: bool) -> Run:
    """Reads the settings, finds the build that they name, and plans it.

    `config` is all of it; `given` what --configfile and --config laid over config/config.yaml, --config as texts.
    `frozen`: this process parses the workflow again for a job of a run that is at work, and takes that run's plan.
    Ends the process with one sentence where the config is wrong or the dataset is missing.
    """
    try:
        over = overlay(given.overwrite_config, typed(given.config))
        return plan_run(resolve(layered(config, over)), Path(), frozen)
    except ShardmillError as error:
        _stop(error)


def find_build(settings: Settings, base: Path) -> BuildPaths:
    """The build that settings name, whether anything of it is there or not."""
    return _identify(settings, base)[0]


def plan_run(settings: Settings, base: Path, frozen: bool = False) -> Run:
    """The build that settings name and what is left to do for it. Reads, and changes nothing."""
    build, identity, digests = _identify(settings, base)
    seen = runlock.holder(build.lock) is not None, runlock.last_holder(build.lock)
    if frozen:
        plan = Plan.load(build.plan)
    else:
        plan = make_plan(settings, build, lambda: _published(settings, build))
    return Run(settings, build, identity, digests, plan, seen)


def asks_for_report(arguments: Sequence[str]) -> bool:
    """Whether these are of `snakemake --report`, which runs nothing and holds what the rules of its targets made.

    The build's own page is a target then, and at no other time. Snakemake itself doesn't tell a workflow.
    """
    options = {argument.partition("=")[0] for argument in arguments}
    return "--report" in options and "--report-after-run" not in options


def _identify(settings: Settings, base: Path) -> tuple[BuildPaths, dict[str, Any], InputDigests]:
    digests = input_digests(settings, base)
    identity = build_identity(settings, digests.dataset, digests.tokenizer, digests.chat_template)
    return BuildPaths(Path(settings.results) / f"{settings.name}-{build_id(identity)}"), identity, digests


def _published(settings: Settings, build: BuildPaths) -> Published:
    from shardmill.store.listing import published

    return published(settings, build)


def _write_build_json(build: BuildPaths, identity: dict[str, Any]) -> None:
    known = build_facts(build)
    versions = {"shardmill": __version__, "python": platform.python_version()}
    versions |= {name: version(name) for name in _VERSIONS}
    write_json(
        build.build_json,
        {
            "build": build.name,
            "id": build.name.rpartition("-")[2],
            "identity": identity,
            "versions": versions,
            "created_at": known.get("created_at") or datetime.now(UTC).isoformat(timespec="seconds"),
            "model": known.get("model"),
            "counts": known.get("counts"),
        },
    )


def _point_latest(build: BuildPaths) -> None:
    latest = build.root.parent / "latest"
    temporary = latest.with_name(f".latest.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(build.name)
    temporary.replace(latest)


def _stop(error: ShardmillError) -> NoReturn:
    sys.stderr.write(f"Error: {error}\n")
    raise SystemExit(1)
