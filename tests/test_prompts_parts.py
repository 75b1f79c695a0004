"""The parts under the prompts step: an ordered map over processes, rows spooled by shard, and shares of shards."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill import workers
from shardmill.identity import prompt_id, shard_of
from shardmill.schemas import PROMPTS
from shardmill.spool import ShardSpool


class Double:
    def __call__(self, number: int) -> int:
        return 2 * number


def test_ordered_map_keeps_order_over_processes() -> None:
    count = workers._WORTH_IT + 1000
    for processes in (1, 2):
        assert list(workers.ordered_map(Double(), range(count), processes)) == [(n, 2 * n) for n in range(count)]


def test_ordered_map_reads_no_further_than_it_must() -> None:
    taken = 0

    def endless() -> object:
        nonlocal taken
        while True:
            taken += 1
            yield taken

    stream = workers.ordered_map(Double(), endless(), 1)  # type: ignore[arg-type]
    assert [next(stream) for _ in range(3)] == [(1, 2), (2, 4), (3, 6)]
    assert taken <= 4


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 99), st.text("abc", min_size=1, max_size=4)), max_size=600), st.integers(1, 100)
)
def test_spooled_rows_come_back_by_shard_in_order(rows: list[tuple[int, str]], shards: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, ShardSpool(Path(folder), PROMPTS, shards) as spool:
        for turn, (shard, conversation) in enumerate(rows):
            spool.add(shard % shards, [{"conversation_id": conversation, "turn": turn, "prompt_ids": [turn]}])
        back = {shard: [(row["conversation_id"], row["turn"]) for row in kept] for shard, kept in read(spool, shards)}
    expected: dict[int, list[tuple[str, int]]] = {index: [] for index in range(shards)}
    for turn, (shard, conversation) in enumerate(rows):
        expected[shard % shards].append((conversation, turn))
    assert back == {shard: sorted(kept) for shard, kept in expected.items()}


def read(spool: ShardSpool, shards: int) -> list[tuple[int, list[dict[str, Any]]]]:
    return list(spool.shards(range(shards)))


def test_shards_are_even_and_follow_from_content_alone() -> None:
    import hashlib

    ids = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(8000)]
    shares = Counter(shard_of(conversation_id, 8) for conversation_id in ids)
    assert sorted(shares) == list(range(8))
    assert min(shares.values()) > 850


def test_prompt_ids_differ_by_ids_and_by_sampling() -> None:
    names = {prompt_id(ids, sampling) for ids in ([1], [1, 2], [258], [0], []) for sampling in (b"a", b"b")}
    assert len(names) == 10
    assert prompt_id([1, 2], b"a") == prompt_id([1, 2], b"a")
