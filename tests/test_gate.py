"""A bad run is stopped early, through Snakemake itself: at the gate, or within a few shards when it turns bad later."""

from __future__ import annotations

import json
import time
from pathlib import Path

from shardmill.files import read_json
from simserver import SimFleet
from workspace import Workspace

GOOD = {"styles": {"random": 1.0}, "length_mean": 60.0, "length_min": 40, "length_cap": 90, "mamba_slots": None}
# The seed's disaster: an empty think block and "OK." to everything.
BAD = GOOD | {"styles": {"empty_think": 1.0}}
SHARDS = 4


def workspace(root: Path, fleet: SimFleet, shards: int = SHARDS) -> Workspace:
    """Conversations in `shards` shards, about 20 rows each, answered by `fleet`."""
    conversations = [
        {
            "id": f"c{number}",
            "conversations": [
                {"from": "human", "value": f"Question {number}: what is the story of river number {number}, and why?"},
                {"from": "gpt", "value": "It is long."},
            ],
        }
        for number in range(20 * shards)
    ]
    root.mkdir()
    space = Workspace(
        root,
        {
            "dataset": {"path": "data.json"},
            "prompts": {"shards": shards},
            "servers": {"engine": "sglang", "endpoints": fleet.urls},
            # Random ids are no language.
            "quality": {"limits": {"other_script": None}},
        },
    )
    (root / "data.json").write_text(json.dumps(conversations))
    return space


def published(space: Workspace) -> set[str]:
    return {path.stem for path in (space.root / "results").glob("*/manifests/*.json")}


def generated(space: Workspace) -> set[str]:
    return {path.stem for path in (space.root / "results").glob("*/completions/*.parquet")}


def test_the_seeds_disaster_is_stopped_after_the_pilot(tmp_path: Path) -> None:
    with SimFleet(1, BAD | {"instant": True}) as fleet:
        space = workspace(tmp_path / "run", fleet)
        done = space.snakemake(expect=1)
        said = done.stdout + done.stderr
        for part in ("nearly_empty", "equal_answers", "100.0%", "FAILED", "e.g.", "→"):
            assert part in said
        assert "Traceback" not in said
        assert generated(space) == {f"shard-00000-of-{SHARDS:05d}"}
        report = read_json(space.results / "quality" / "pilot.json")
        assert not report["passed"]
        examples = next(check for check in report["checks"] if check["name"] == "nearly_empty")["examples"]
        assert len(examples) == 3

        # Going on knowingly: the override names what may fail, and the report says so.
        space.configure({"quality": {"limits": {"other_script": None}, "override": ["nearly_empty", "equal_answers"]}})
        space.snakemake()
        assert len(published(space)) == SHARDS
        report = read_json(space.results / "quality" / "report.json")
        assert report["passed"]
        overridden = {check["name"] for check in report["checks"] if check["overridden"]}
        assert overridden == {"nearly_empty", "equal_answers"}


def test_a_run_that_turns_bad_in_the_middle_is_stopped_within_a_few_shards(tmp_path: Path) -> None:
    with SimFleet(1, GOOD | {"max_running_requests": 12}) as fleet:
        space = workspace(tmp_path / "run", fleet, shards=12)
        run = space.start(cores=2)
        try:
            deadline = time.monotonic() + 240
            while len(published(space)) < 3:
                assert run.poll() is None and time.monotonic() < deadline, space.log.read_text()
                time.sleep(0.05)
            good = len(published(space))
            fleet.kill(0)
            fleet.configs[0].update(BAD)
            fleet.start(0)
            assert run.wait(timeout=240) == 1
        finally:
            run.kill()
        said = space.log.read_text()
        assert "fails its checks and is not published" in said
        assert "equal_answers" in said or "nearly_empty" in said
        # What was at work when the server turned, and what two cores began before the first bad shard was found out.
        assert len(published(space)) <= good + 3
        assert len(generated(space)) - len(published(space)) <= 4
        assert len(generated(space)) < 12


def test_limits_can_change_and_are_judged_again_without_generating(tmp_path: Path) -> None:
    with SimFleet(1, BAD | {"instant": True}) as fleet:
        space = workspace(tmp_path / "run", fleet)
        space.snakemake(expect=1)
        space.configure({"quality": {"limits": {"other_script": None, "nearly_empty": 1.0, "equal_answers": None}}})
        jobs = space.plan()
        assert jobs["generate"] == SHARDS - 1
        assert jobs["gate"] == 1
