"""Identity by content, through Snakemake itself: each change rebuilds what it should, and `-n` says so beforehand."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardmill.files import read_json
from shardmill.paths import shard_name
from simserver import SimFleet
from workspace import Workspace

SHARDS = 4
FIRST = "shard-00000-of-00004"
LAST = "shard-00003-of-00004"
AFTER = {"check_build": 1, "report": 1, "verdict": 1}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A complete build of the sample on a simulated server, and the server still there."""
    with SimFleet(1, {"instant": True}) as fleet:
        workspace = Workspace(
            tmp_path_factory.mktemp("finished"),
            {
                "prompts": {"shards": SHARDS},
                "servers": {"engine": "sglang", "endpoints": fleet.urls},
                "quality": {"override": ["all"]},
            },
        )
        jobs = workspace.build()
        assert jobs["generate"] == jobs["tokenize"] == jobs["publish"] == SHARDS
        assert jobs["make_prompts"] == jobs["check_pilot"] == jobs["gate"] == jobs["verdict"] == 1
        assert workspace.plan() == {}
        yield workspace


@pytest.fixture
def copy(finished: Workspace, tmp_path: Path) -> Workspace:
    """The finished tree copied file by file, so that every mtime is new and in no order."""
    target = tmp_path / "copy"
    shutil.copytree(finished.root, target, symlinks=True, copy_function=shutil.copyfile)
    workspace = Workspace.__new__(Workspace)
    workspace.root, workspace.overlay = target, dict(finished.overlay)
    return workspace


def test_snakemakes_own_report_holds_the_builds_page(finished: Workspace) -> None:
    finished.snakemake("--report=report.zip", cores=1)
    page = (finished.results / "quality" / "report.html").read_bytes()
    with zipfile.ZipFile(finished.root / "report.zip") as archive:
        assert page in [archive.read(name) for name in archive.namelist() if name.endswith(".html")]
    (finished.root / "report.zip").unlink()


def remove(workspace: Workspace, *kinds: str, shard: str = LAST) -> None:
    for kind in kinds:
        if kind == CUT:
            path = workspace.results / "tokens" / f"{shard}.parquet"
            path.write_bytes(path.read_bytes()[:-100])
            continue
        suffix = "json" if kind == "manifests" else "parquet"
        (workspace.results / kind / f"{shard}.{suffix}").unlink()


def touch_dataset(workspace: Workspace) -> None:
    os.utime(workspace.root / "config/sample/conversations.json")


def edit_comment(workspace: Workspace) -> None:
    rule = workspace.root / "workflow/rules/generate.smk"
    rule.write_text(rule.read_text().replace("rule generate:", "# A remark.\nrule generate:"))


def move_servers(workspace: Workspace) -> None:
    workspace.configure({"servers": {"endpoints": ["http://127.0.0.1:9"]}, "generate": {"concurrency": 7}})


NOTHING: list[Callable[[Workspace], None]] = [
    lambda workspace: None,
    touch_dataset,
    lambda workspace: shutil.rmtree(workspace.root / ".snakemake"),
    lambda workspace: shutil.rmtree(workspace.results / "prompts"),
    edit_comment,
    move_servers,
]


@pytest.mark.parametrize(
    "change",
    NOTHING,
    ids=["copied", "dataset touched", "no .snakemake", "no prompts", "comment edited", "servers moved"],
)
def test_nothing_is_made_again(copy: Workspace, change: Callable[[Workspace], None]) -> None:
    change(copy)
    assert copy.plan() == {}
    assert copy.build() == {}


ALL = ("completions", "tokens", "manifests")
CUT = "tokens cut off"


@pytest.mark.parametrize(
    ("lost", "made"),
    [
        (
            [[CUT], ["manifests"], ALL],
            {"generate": 1, "tokenize": 2, "publish": 3, **AFTER},
        ),
        (
            [["prompts", "tokens"], ["completions"], ["prompts", *ALL]],
            {"make_prompts": 1, "generate": 2, "tokenize": 3, "publish": 3, **AFTER},
        ),
    ],
    ids=["prompts are here", "some prompts are gone"],
)
def test_a_shard_that_lost_a_part_costs_that_part(copy: Workspace, lost: list[list[str]], made: dict[str, int]) -> None:
    """Each shard but the pilot loses something else. Training rows come back the same from the same completions."""
    before = {path: path.read_bytes() for path in sorted(copy.results.glob("*/shard-*"))}
    for index, kinds in enumerate(lost, 1):
        remove(copy, *kinds, shard=shard_name(index, SHARDS))
    assert copy.plan() == made
    assert copy.build() == made
    assert copy.plan() == {}
    answered_anew = {shard_name(index, SHARDS) for index, kinds in enumerate(lost, 1) if "completions" in kinds}
    for path, content in before.items():
        if path.stem == FIRST or (path.parent.name in ("completions", "tokens") and path.stem not in answered_anew):
            assert path.read_bytes() == content, path


def test_a_lost_pilot_passes_the_gate_before_others_go_on(copy: Workspace) -> None:
    for shard in (FIRST, LAST):
        remove(copy, "completions", "tokens", "manifests", shard=shard)
    made = copy.plan()
    assert made == {"generate": 2, "tokenize": 2, "publish": 2, "check_pilot": 1, "gate": 1, **AFTER}
    assert copy.build() == made


def test_another_limit_is_judged_again_and_nothing_generated(copy: Workspace) -> None:
    copy.configure({"quality": {"override": []}})
    made = copy.plan()
    assert made == AFTER
    copy.configure({"quality": {"override": ["all"]}})
    assert copy.plan() == {}


def test_another_temperature_is_another_build_next_to_the_old_one(copy: Workspace) -> None:
    old = copy.results
    copy.configure({"sampling": {"temperature": 0.6}})
    made = copy.plan()
    assert made["generate"] == SHARDS and made["make_prompts"] == 1
    assert copy.build() == made
    assert copy.results != old and old.exists()
    copy.configure({"sampling": {"temperature": 0.7}})
    assert copy.plan() == {}


def test_a_dry_run_changes_nothing(copy: Workspace) -> None:
    remove(copy, "completions")
    before = sorted((path, path.stat().st_mtime_ns) for path in copy.results.rglob("*"))
    copy.plan()
    assert sorted((path, path.stat().st_mtime_ns) for path in copy.results.rglob("*")) == before


def test_what_a_build_knows_of_itself_is_found_again_and_nothing_is_asked(copy: Workspace) -> None:
    build = copy.results
    rejects, facts = (build / "prompts/rejects.parquet").read_bytes(), read_json(build / "build.json")
    for name in ("build.json", "prompts/rejects.parquet", "quality/pilot.json", "catalog.duckdb", "README.md"):
        (build / name).unlink()
    made = copy.plan()
    assert made == {"find_facts": 1, "check_pilot": 1, **AFTER}
    assert copy.build() == made
    assert copy.plan() == {}
    assert (build / "prompts/rejects.parquet").read_bytes() == rejects
    found = read_json(build / "build.json")
    assert all(found[key] == facts[key] for key in ("identity", "counts", "model"))
    assert (build / "quality/pilot.json").exists() and (build / "catalog.duckdb").exists()
