"""One of seven servers dies in the middle of a build, through Snakemake (benchmarks/server_death.py has the speed)."""

from __future__ import annotations

import sys
from pathlib import Path

from shardmill.schemas import read_rows
from simserver import SimFleet, prompt_hash

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import server_death

PROMPTS, SLOTS = 320, 3


def test_the_other_six_stay_full_and_every_prompt_is_answered_once(tmp_path: Path) -> None:
    with SimFleet(server_death.SERVERS, server_death.simulated(SLOTS, answer_s=0.4)) as fleet:
        workspace = server_death.make_workspace(tmp_path, fleet, PROMPTS, shards=2)
        result = server_death.measure(workspace, fleet, PROMPTS, SLOTS)
        rows = [row for path in workspace.results.glob("completions/*") for row in read_rows(path)]
        assert len({row["conversation_id"] for row in rows}) == len(rows) == PROMPTS
        assert {row["status"] for row in rows} == {"ok"}
        answered = fleet.answered()
        assert all(answered[prompt_hash(row["prompt_ids"])] >= 1 for row in rows)
        # No more again than what the dead server had, and no server waits for it.
        assert result.asked_again <= SLOTS + 2
        assert result.after.full > 0.85
