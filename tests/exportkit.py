"""Builds for the export's tests, and what trainers do with a row, written down anew from facts/peers.md (c)."""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from shardmill.files import write_bytes, write_json
from shardmill.paths import BuildPaths, shard_names
from shardmill.schemas import COMPLETIONS, TOKENS, write_table
from shardmill.settings import resolve
from shardmill.store.manifest import describe_shard

VOCABULARY = 5000


@dataclass(frozen=True)
class Given:
    """One training row of `prompt` + `answer` tokens; the ids follow from its number."""

    prompt: int
    answer: int
    source_id: str | None = None
    turn: int = 0


def tokens_row(number: int, given: Given) -> dict[str, Any]:
    length = given.prompt + given.answer
    return {
        "prompt_id": hashlib.sha256(f"p {number}".encode()).hexdigest(),
        "conversation_id": hashlib.sha256(f"c {given.source_id or number}".encode()).hexdigest(),
        "source_id": given.source_id or f"s{number:06x}x_0",
        "turn": given.turn,
        "input_ids": [(number * 31 + index * 7) % VOCABULARY for index in range(length)],
        "loss_mask": [0] * given.prompt + [1] * given.answer,
        "prompt_len": given.prompt,
        "seq_len": length,
        "finish_reason": "stop",
    }


def make_build(results: Path, rows: Sequence[Given], shards: int = 3, passed: bool | None = True) -> BuildPaths:
    """A finished build with `rows` dealt out to the shards in order. `passed` None: the checks have not run."""
    build = BuildPaths(results / "sample-0123456789")
    dealt = list(enumerate(rows))
    for index, shard in enumerate(shard_names(shards)):
        write_shard(build, shard, [tokens_row(number, given) for number, given in dealt if number % shards == index])
    write_json(build.build_json, {"build": build.name, "model": {"vocab_size": VOCABULARY, "stop_ids": [2]}})
    write_json(build.settings, resolve({"prompts": {"shards": shards}}).as_dict())
    if passed is not None:
        write_json(
            build.quality_report,
            {"passed": passed, "checks": [{"name": "loops", "passed": passed}, {"name": "lengths", "passed": True}]},
        )
    return build


def write_shard(build: BuildPaths, shard: str, rows: Sequence[dict[str, Any]], schema: pa.Schema = TOKENS) -> None:
    write_table(build.tokens(shard), schema, rows)
    write_table(
        build.completions(shard), COMPLETIONS, [{"prompt_id": row["prompt_id"], "status": "ok"} for row in rows]
    )
    settings = resolve({})
    write_bytes(build.manifest(shard), describe_shard(settings.s3, build, shard).to_bytes())


def specforge_takes(record: dict[str, Any], max_length: int, at_least: int, pair: bool) -> bool:
    """Whether SpecForge trains on the row; False where it drops it in silence. Fails where it would raise."""
    ids, mask = record["input_ids"], record["loss_mask"]
    assert type(ids) is list and type(mask) is list and len(ids) == len(mask) > 0
    assert all(type(token) is int for token in ids) and all(type(flag) is int and flag in (0, 1) for flag in mask)
    seen = mask[:max_length]
    return sum(seen) >= at_least and (not pair or any(a and b for a, b in itertools.pairwise(seen)))


def read_slices(folder: Path, split: str = "train") -> list[list[dict[str, Any]]]:
    """The records of each slice, in order."""
    paths = sorted(folder.glob(f"{split}-*.jsonl"))
    assert [path.name for path in paths] == [
        f"{split}-{index:05d}-of-{len(paths):05d}.jsonl" for index in range(len(paths))
    ]
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def read_records(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    return [record for part in read_slices(folder, split) for record in part]


def read_dataset(folder: Path) -> list[dict[str, Any]]:
    """The rows of a save_to_disk folder, read as `datasets` does: by state.json, its Arrow streams in order."""
    state = json.loads((folder / "state.json").read_text())
    tables = []
    for item in state["_data_files"]:
        with pa.memory_map(str(folder / item["filename"])) as stream, pa.ipc.open_stream(stream) as reader:
            tables.append(reader.read_all())
    table = pa.concat_tables(tables)
    int64s = pa.list_(pa.int64())
    assert [(field.name, field.type) for field in table.schema] == [
        ("input_ids", int64s),
        ("loss_mask", int64s),
        ("seq_len", pa.int64()),
    ]
    features = json.loads((folder / "dataset_info.json").read_text())["features"]
    assert json.loads(table.schema.metadata[b"huggingface"])["info"]["features"] == features
    return table.to_pylist()


def read_token_freq(folder: Path) -> dict[int, int]:
    with zipfile.ZipFile(folder / "token_freq.pt") as archive:
        counts: dict[int, int] = pickle.loads(archive.read("token_freq/data.pkl"))
    return counts
