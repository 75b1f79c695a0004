"""What a build still needs, decided by content and existence before anything runs (DESIGN.md, Identity).

Snakemake's triggers compare clocks and its own provenance, which a fresh machine lacks. So the plan is made here: a
file that is there and right is nobody's output in this run, and a rule matches only the shards that the plan gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardmill.errors import DataError
from shardmill.facts import build_facts
from shardmill.files import read_json, sha256_json, write_json
from shardmill.paths import BuildPaths, shard_names
from shardmill.settings import CHECKS, Settings
from shardmill.store.manifest import manifest_matches, uses_store

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
    here = {kind: _present(build.root / kind) for kind in ("prompts", "completions", "tokens", "manifests")}
    whole = {shard for shard in shards if _finished(build, shard, here)}
    remote, taken_out = frozenset[str](), frozenset[str]()
    complete = set[str](whole)
    if uses_store(settings.s3):
        stored = published()
        # A shard that is whole here is published where it is not in the store, as one that was made without a store,
        # or lost there. Where another one is there, the step that publishes takes that.
        remote, complete = stored.shards, whole & stored.shards - stored.otherwise_here
        taken_out = stored.taken_out & whole
        whole -= taken_out
    left = [shard for shard in shards if shard not in complete]
    restore = [shard for shard in left if shard in remote and shard not in whole]
    own = [shard for shard in left if shard not in remote or shard in whole]
    _refuse_damage(build, own, here)
    generate = [shard for shard in own if shard not in here["completions"] or shard in taken_out]
    made_again = set(generate)
    tokenize = [shard for shard in own if shard in made_again or shard not in here["tokens"]]
    facts_lost = not _facts_known(build, here["prompts"])
    prompts = [shard for shard in generate if shard not in here["prompts"]]
    if prompts and facts_lost:
        prompts = generate  # they are one job, and no shard can be answered before it ends
    # A store has the facts of a build that is finished there.
    find_facts = facts_lost and not prompts and (bool(tokenize) or not uses_store(settings.s3))
    pilot = shards[: settings.generate.pilot_shards]
    key = checks_key(settings)
    gate_open = build.gate_passed(key).exists()
    gated = [shard for shard in generate if shard not in pilot]
    gate = bool(pilot) and bool(gated) and (not gate_open or not made_again.isdisjoint(pilot))
    pilot_report = bool(pilot) and not build.pilot_report.exists() and remote.isdisjoint(pilot)
    last = (build.quality_passed(key), *build.last_files)
    quality = bool(left) or facts_lost or pilot_report or not all(path.exists() for path in last)
    return Plan(
        shards=shards,
        pilot=pilot,
        prompts=tuple(prompts),
        facts=find_facts,
        restore=tuple(restore),
        generate=tuple(generate),
        tokenize=tuple(tokenize),
        publish=tuple(own),
        gate=gate,
        pilot_report=pilot_report,
        quality=quality,
        checks_key=key,
    )


def checks_key(settings: Settings) -> str:
    """Changes when a check, a limit or an override does, so that checks are evaluated again and nothing else is."""
    folders = [CHECKS, *([Path(settings.quality.checks_dir)] if settings.quality.checks_dir else [])]
    files = {f"{index}/{path.name}": path.read_text() for index, folder in enumerate(folders) for path in _sql(folder)}
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


def _facts_known(build: BuildPaths, prompts: set[str]) -> bool:
    """Whether counts, model and rejects are here. Who deletes prompts/ as a whole does without the rejects."""
    if prompts and not build.rejects.exists():
        return False
    facts = build_facts(build)
    return bool(facts.get("counts") and facts.get("model"))


def _finished(build: BuildPaths, shard: str, here: dict[str, set[str]]) -> bool:
    """Whether the shard lies here with a manifest that fits, in the store or not."""
    if any(shard not in here[kind] for kind in ("completions", "tokens", "manifests")):
        return False
    return manifest_matches(build, shard)


def _refuse_damage(build: BuildPaths, shards: list[str], here: dict[str, set[str]]) -> None:
    """A file that is there and cut off is neither finished nor missing, and no step can go on from it."""
    ways = {
        "completions": "`shardmill discard {shard} --build {root}` takes the shard out to be made again",
        "tokens": "delete it, and the next run makes it again from the completions",
    }
    for kind, way in ways.items():
        for shard in shards:
            path = build.root / kind / f"{shard}.parquet"
            if shard in here[kind] and not _ends_as_parquet(path):
                way_out = way.format(shard=shard, root=build.root)
                raise DataError(f"{path} is cut off or no Parquet file: {way_out}.")


def _ends_as_parquet(path: Path) -> bool:
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        if size < 12:
            return False
        stream.seek(-4, 2)
        return stream.read() == b"PAR1"


def _present(folder: Path) -> set[str]:
    try:
        return {path.name.partition(".")[0] for path in folder.iterdir() if not path.name.startswith(".")}
    except FileNotFoundError:
        return set()


def _sql(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.sql"))
