"""The pool keeps a fleet full (benchmarks/makespan.py has the whole run)."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import makespan

SHARDS = 42


@pytest.fixture(scope="module")
def prompts() -> list[int]:
    drawn = makespan.lengths(SHARDS * makespan.ROWS, random.Random(3))
    assert abs(sum(drawn) / len(drawn) - 1814) < 2 and max(drawn) == 8192
    return drawn


def test_pool_is_within_a_percent_of_ideal_and_one_shard_per_gpu_is_not(prompts: list[int]) -> None:
    pool = makespan.pooled(prompts, SHARDS, cores=7, turnaround_s=0.02, job_start_s=3.0)
    alone = makespan.shard_per_gpu(prompts, SHARDS, turnaround_s=0.02, job_start_s=3.0)
    assert pool.of_ideal >= 0.99
    assert alone.of_ideal < 0.97
    assert pool.makespan_s < alone.makespan_s


def test_the_simulation_makes_no_token_that_was_not_asked_for(prompts: list[int]) -> None:
    result = makespan.pooled(prompts, SHARDS, cores=7, turnaround_s=0.0, job_start_s=0.0)
    assert result.tokens == sum(prompts)
    assert result.makespan_s > sum(prompts) / makespan.FULL_RATE
    assert result.made_between <= sum(prompts)
