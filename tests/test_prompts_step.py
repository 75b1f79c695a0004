"""The prompts step as a whole: one result for any number of workers and any order, and every record accounted for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from readkit import prompts_step
from shardmill import workers
from shardmill.errors import DataError
from shardmill.files import read_json
from shardmill.paths import BuildPaths, shard_names
from shardmill.rendering.render import Rendered, Renderer


def made(folder: Path, records: list[dict[str, Any]], processes: int = 1, **prompts: Any) -> BuildPaths:
    """The prompts of `records`, written as JSON Lines, in a build of 4 shards."""
    folder.mkdir(parents=True)
    dataset = folder / "data.jsonl"
    dataset.write_text("".join(json.dumps(record) + "\n" for record in records))
    return prompts_step(folder / "build", [str(dataset)], processes, prompts=prompts)


def shards(build: BuildPaths) -> dict[str, bytes]:
    return {name: build.prompts(name).read_bytes() for name in shard_names(4)}


def records(count: int) -> list[dict[str, Any]]:
    rng = random.Random(7)
    words = ["river", "Straße", "数学", "def f(x):", "why", "🦆", "  spaced ", "<|im_end|>"]
    return [
        {
            "id": f"id{number}",
            "conversations": [
                turn
                for part in range(rng.randint(1, 3))
                for turn in (
                    {"from": "human", "value": f"{number}.{part} " + " ".join(rng.choices(words, k=6))},
                    {"from": "gpt", "value": f"answer {number}.{part}"},
                )
            ],
        }
        for number in range(count)
    ]


@pytest.mark.parametrize("turns", ["user_only", "regenerate", "final"])
def test_shards_are_the_same_bytes_for_any_workers_and_order(
    tmp_path: Path, turns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_WORTH_IT", 50)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    given = records(400)
    one = made(tmp_path / "one", given, turns=turns)
    two = made(tmp_path / "two", given, processes=2, turns=turns)
    shuffled = made(tmp_path / "shuffled", random.Random(1).sample(given, len(given)), turns=turns)
    assert shards(one) == shards(two) == shards(shuffled)
    counts = read_json(one.build_json)["counts"]
    assert counts["conversations"] == 400
    assert counts["prompts"] == sum(pq.read_metadata(one.prompts(name)).num_rows for name in shard_names(4))
    assert counts["prompts"] == sum(counts["prompts_by_shard"].values())
    assert read_json(one.build_json)["model"]["think_close_ids"] == []  # no token of this tokenizer


def test_appended_records_move_no_old_one(tmp_path: Path) -> None:
    given = records(200)
    before, after = made(tmp_path / "before", given[:150]), made(tmp_path / "after", given)
    for name in shard_names(4):
        old = pq.read_table(before.prompts(name)).to_pylist()
        new = pq.read_table(after.prompts(name)).to_pylist()
        assert [row for row in new if row["conversation_id"] in {row["conversation_id"] for row in old}] == old


def test_limit_takes_the_first_conversations_that_make_a_prompt(tmp_path: Path) -> None:
    given = records(20)
    given[1]["conversations"][0]["value"] = "long " * 5000
    given[2]["conversations"] = []
    build = made(tmp_path / "limited", given, limit=5)
    counts = read_json(build.build_json)["counts"]
    assert (counts["records"], counts["conversations"], counts["rejected"], counts["beyond_limit"]) == (20, 5, 2, 13)
    ids = {row["source_id"] for name in shard_names(4) for row in pq.read_table(build.prompts(name)).to_pylist()}
    assert ids == {"id0", "id3", "id4", "id5", "id6"}
    reasons = pq.read_table(build.rejects).to_pylist()
    assert [(row["record"], row["reason"]) for row in reasons] == [
        (2, "prompt_too_long"),
        (3, "empty_conversation"),
    ]
    assert "over prompts.max_prompt_tokens (4096)" in reasons[0]["detail"]


def test_what_is_beyond_the_limit_is_not_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[object] = []
    render = Renderer.render

    def counted(renderer: Renderer, chat: Any, tools: Any) -> Rendered:
        rendered.append(chat)
        return render(renderer, chat, tools)

    monkeypatch.setattr(Renderer, "render", counted)
    build = made(tmp_path / "limited", records(200), limit=5)
    assert read_json(build.build_json)["counts"]["beyond_limit"] == 195 and len(rendered) <= 10


def test_a_dataset_without_a_prompt_is_one_sentence_with_its_reasons(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="makes no prompt: 2 records, rejected as 1 empty_conversation, 1 no_user_turn"):
        made(
            tmp_path / "none",
            [{"conversations": []}, {"conversations": [{"from": "gpt", "value": "I speak first and alone."}]}],
        )
