"""What a build still needs, decided by content and existence before anything runs (DESIGN.md, Identity).

Snakemake's triggers compare clocks and its own provenance, which a fresh machine lacks. So the plan is made here: a
file that is there and right is nobody's output in this run, and a rule matches only the shards that the plan gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardmill.errors import DataError
from shardmill.facts import build_facts
from shardmill.files import read_json, sha256_json, write_json
from shardmill.paths import BuildPaths, shard_names
from shardmill.settings import Settings
from shardmill.store.manifest import manifest_matches

if TYPE_CHECKING:
    from shardmill.store.listing import Published


@dataclass(frozen=True, slots=True)
class Plan:
    """Shards by what is to be done with them. A finished shard is in none of the lists."""

    shards: tuple[str, ...]
    pilot: tuple[str, ...]
    prompts: tuple[str, ...]
    facts: bool  # counts, model or rejects are lost, and the prompts step is to find them again without any prompt
    restore: tuple[str, ...]
    generate: tuple[str, ...]
    tokenize: tuple[str, ...]
    publish: tuple[str, ...]
    gate: bool
    pilot_report: bool
    quality: bool
    checks_key: str

    @property
    def unfinished(self) -> tuple[str, ...]:
        touched = {*self.restore, *self.publish}
        return tuple(shard for shard in self.shards if shard in touched)

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Plan:
        values = read_json(path)
        for key, value in values.items():
            values[key] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


def make_plan(settings: Settings, build: BuildPaths, published: Callable[[], Published]) -> Plan:
    """The plan for `build` as it stands on disk and, where it has one, in its store.

    `published` tells what is in the store, and whatever it raises ends the plan: a store that can't be read must not
    look like an empty one.
    """
    shards = tuple(shard_names(settings.prompts.shards))
    here = _Here.of(build, shards)
    stored = published() if settings.s3.used else None
    left = _left(build, shards, here, stored)
    prompts = tuple(shard for shard in left.generate if shard not in here.prompts)
    if prompts and not here.facts:
        prompts = left.generate  # they are one job, and no shard can be answered before it ends
    find_facts = not here.facts and not prompts and (bool(left.tokenize) or stored is None or not stored.has_facts())
    pilot = shards[: settings.generate.pilot_shards]
    key = checks_key(settings)
    gated = not set(left.generate) <= set(pilot)
    gate_open = build.gate_passed(key).exists() and set(left.generate).isdisjoint(pilot)
    pilot_stored = stored is not None and not stored.shards.isdisjoint(pilot)
    pilot_report = bool(pilot) and not build.pilot_report.exists() and not pilot_stored
    last = (build.quality_passed(key), *build.last_files)
    unfinished = bool(left.restore or left.publish)
    return Plan(
        shards=shards,
        pilot=pilot,
        prompts=prompts,
        facts=find_facts,
        restore=left.restore,
        generate=left.generate,
        tokenize=left.tokenize,
        publish=left.publish,
        gate=bool(pilot) and gated and not gate_open,
        pilot_report=pilot_report,
        quality=unfinished or not here.facts or pilot_report or not all(path.exists() for path in last),
        checks_key=key,
    )


@dataclass(frozen=True, slots=True)
class _Here:
    """What lies on this machine: shards with a file of each kind, those that are whole, and whether facts are known."""

    prompts: frozenset[str]
    completions: frozenset[str]
    tokens: frozenset[str]
    whole: frozenset[str]
    facts: bool

    @classmethod
    def of(cls, build: BuildPaths, shards: Sequence[str]) -> _Here:
        prompts, completions, tokens, manifests = (
            _present(build.root / kind) for kind in ("prompts", "completions", "tokens", "manifests")
        )
        made = [shard for shard in shards if shard in completions & tokens & manifests]
        whole = frozenset(shard for shard in made if manifest_matches(build, shard))
        return cls(prompts, completions, tokens, whole, _facts_known(build, prompts))


@dataclass(frozen=True, slots=True)
class _Left:
    """What is to be done with shards that are not finished: each is either restored or published."""

    restore: tuple[str, ...]
    generate: tuple[str, ...]
    tokenize: tuple[str, ...]
    publish: tuple[str, ...]


def _left(build: BuildPaths, shards: Sequence[str], here: _Here, stored: Published | None) -> _Left:
    whole, complete = here.whole, here.whole
    remote, taken_out = frozenset[str](), frozenset[str]()
    if stored is not None:
        # A shard that is whole here is published where it is not in the store, as one that was made without a store,
        # or lost there. Where another one is there, the step that publishes takes that.
        remote, complete = stored.shards, whole & stored.shards - stored.otherwise_here
        taken_out = stored.taken_out & whole
        whole -= taken_out
    left = [shard for shard in shards if shard not in complete]
    restore = tuple(shard for shard in left if shard in remote and shard not in whole)
    own = tuple(shard for shard in left if shard not in remote or shard in whole)
    _refuse_cut_off(build, own, here.completions)
    generate = tuple(shard for shard in own if shard not in here.completions or shard in taken_out)
    made_again = set(generate)
    sound = {shard for shard in own if shard in here.tokens and _ends_as_parquet(build.tokens(shard))}
    tokenize = tuple(shard for shard in own if shard in made_again or shard not in sound)
    return _Left(restore, generate, tokenize, publish=own)


def checks_key(settings: Settings) -> str:
    """Changes when a check, a limit or an override does, so that checks are evaluated again and nothing else is."""
    files = {path.stem: path.read_text() for path in settings.quality.check_files}
    return sha256_json({"checks": files, "quality": asdict(settings.quality)})[:10]


def pattern(shards: tuple[str, ...]) -> str:
    """A wildcard constraint that matches these shards of a build and, when there are none, nothing.

    It is short, since Snakemake goes through its text for each file of each job: with a list of all names, planning
    1,828 shards took twice as long.
    """
    if not shards:
        return "(?!)"
    total = shards[0].rpartition("-")[2]
    return f"shard-{_digits([shard.split('-')[1] for shard in shards])}-of-{total}"


def _digits(numbers: list[str]) -> str:
    """A regular expression for these numbers, all of one length: first digits that have the same rest share it."""
    if not numbers[0]:
        return ""
    rests: dict[str, list[str]] = {}
    for number in numbers:
        rests.setdefault(number[0], []).append(number[1:])
    firsts: dict[str, str] = {}
    for first, rest in rests.items():
        expression = _digits(rest)
        firsts[expression] = firsts.get(expression, "") + first
    ways = [_one_of(first) + rest for rest, first in firsts.items()]
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


def _one_of(digits: str) -> str:
    if len(digits) == 1:
        return digits
    return r"\d" if len(digits) == 10 else f"[{digits}]"


def _facts_known(build: BuildPaths, prompts: Set[str]) -> bool:
    """Whether counts, model and rejects are here. Who deletes prompts/ as a whole does without the rejects."""
    if prompts and not build.rejects.exists():
        return False
    facts = build_facts(build)
    return bool(facts.get("counts") and facts.get("model"))


def _refuse_cut_off(build: BuildPaths, shards: Sequence[str], here: Set[str]) -> None:
    """Completions that are there and cut off are neither finished nor missing, and were paid for."""
    for shard in shards:
        path = build.completions(shard)
        if shard in here and not _ends_as_parquet(path):
            raise DataError(
                f"{path} is cut off or no Parquet file: `shardmill discard {shard} --build {build.root}` takes the "
                f"shard out to be made again."
            )


def _ends_as_parquet(path: Path) -> bool:
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        if size < 12:
            return False
        stream.seek(-4, 2)
        return stream.read() == b"PAR1"


def _present(folder: Path) -> frozenset[str]:
    try:
        return frozenset(path.name.partition(".")[0] for path in folder.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return frozenset()
