"""Completions of a shard to training rows: the ok rows, validated, with a loss mask over what the model produced."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from shardmill.errors import DataError
from shardmill.facts import build_facts
from shardmill.paths import BuildPaths
from shardmill.schemas import COMPLETIONS, TOKENS, read_rows, write_table

_log = logging.getLogger(__name__)


def tokenize_shard(build: BuildPaths, shard: str) -> int:
    """Writes tokens/<shard>.parquet and returns its rows, in the order of the completions.

    Raises DataError, naming file and row, when a completion is not what an audited answer must be.
    """
    source = build.completions(shard)
    model = build_facts(build).get("model")
    if model is None:
        raise DataError(
            f"{build.build_json} does not name the model's vocabulary and stop ids: run the prompts step again."
        )
    stop_ids, vocabulary = frozenset(model["stop_ids"]), int(model["vocab_size"])
    rows = write_table(
        build.tokens(shard), TOKENS, _training_rows(_source_rows(build, shard), stop_ids, vocabulary, str(source))
    )
    _log.info("%s: %d training rows", shard, rows)
    return rows


def _source_rows(build: BuildPaths, shard: str) -> Iterator[dict[str, Any]]:
    return read_rows(build.completions(shard), columns=[name for name in COMPLETIONS.names if name != "text"])


def _training_rows(
    completions: Iterator[dict[str, Any]], stop_ids: frozenset[int], vocabulary: int, source: str
) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(completions, start=1):
        if row["status"] != "ok":
            continue
        fault = row_fault(row, stop_ids, vocabulary)
        if fault is not None:
            raise DataError(
                f"{source}, row {number} (prompt {row['prompt_id']}): {fault}. "
                f"The file was changed after it was made; `shardmill discard` its shard and run again."
            )
        yield training_row(row)


def training_row(row: dict[str, Any]) -> dict[str, Any]:
    """`input_ids` = prompt ids + output ids; `loss_mask` is 0 over the prompt and 1 over every id of the answer."""
    prompt, output = row["prompt_ids"], row["output_ids"]
    return {
        "prompt_id": row["prompt_id"],
        "conversation_id": row["conversation_id"],
        "source_id": row["source_id"],
        "turn": row["turn"],
        "input_ids": prompt + output,
        "loss_mask": [0] * len(prompt) + [1] * len(output),
        "prompt_len": len(prompt),
        "seq_len": len(prompt) + len(output),
        "finish_reason": row["finish_reason"],
        "accept_length": row["accept_length"],
        "reused_from": row["reused_from"],
    }


def row_fault(row: dict[str, Any], stop_ids: frozenset[int], vocabulary: int) -> str | None:
    """What is wrong with an ok completion, in words, or None."""
    prompt, output = row["prompt_ids"], row["output_ids"]
    if not prompt:
        return "it has no prompt ids"
    if not output:
        return "it is ok but has no output ids"
    if len(prompt) != row["prompt_tokens"] or len(output) != row["completion_tokens"]:
        return "its token counts disagree with its ids"
    if min(prompt) < 0 or min(output) < 0 or max(max(prompt), max(output)) >= vocabulary:
        return f"it has an id outside the vocabulary of {vocabulary}"
    stops = [position for position, token in enumerate(output) if token in stop_ids]
    if row["finish_reason"] == "stop" and stops != [len(output) - 1]:
        return "it stopped by itself, but its only stop id is not its last id"
    if row["finish_reason"] == "length" and stops:
        return "it was cut by length, but holds a stop id"
    if row["finish_reason"] not in ("stop", "length"):
        return f"its finish_reason is {row['finish_reason']!r}"
    return None
