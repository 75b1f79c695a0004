"""Rows of completions: what the journal keeps of one, and the shard's Parquet file made of them at its end.

Beside rows the journal has notes, of what counted against a prompt before it was done, and one entry at most of what
the rows of a file took that `retry` took apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from shardmill.effort import Effort
from shardmill.errors import ShardmillError
from shardmill.generate.prompts import Key, ShardPrompts
from shardmill.generate.reasons import FailReason
from shardmill.journal import Journal
from shardmill.schemas import COMPLETIONS, write_table

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one prompt. A failed one has a reason, no ids and no finish."""

    reason: FailReason | None
    output_ids: list[int]
    finish: str | None  # 'stop' | 'length'
    accept_length: float | None
    attempts: int  # audited answers
    server: str | None
    latency_s: float | None  # of the request that was kept
    reused_from: str | None = None  # the folder's name of the build that has asked this already
    finished_ms: int | None = None  # Unix time of a reused row; None: now
    cut: bool = False  # what the server gave after its end was taken away


def record(
    key: Key, prompt_id: str, completion: Completion, prompt_ids: list[int], rendered_here: bool
) -> dict[str, Any]:
    """A row as the journal keeps it. Ids of prompts are kept only where the prompts file hasn't got them."""
    return {
        "conversation_id": key[0],
        "turn": key[1],
        "prompt_id": prompt_id,
        "prompt_ids": prompt_ids if rendered_here else None,
        "reason": completion.reason,
        "output_ids": completion.output_ids,
        "finish_reason": completion.finish,
        "accept_length": completion.accept_length,
        "attempts": completion.attempts,
        "server": completion.server,
        "latency_s": completion.latency_s,
        "finished_ms": time.time_ns() // 1_000_000 if completion.finished_ms is None else completion.finished_ms,
        "reused_from": completion.reused_from,
        "cut": completion.cut,
    }


def record_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of completions back as the journal keeps it. Ids of later turns' prompts are in no prompts file.

    Whether it was cut at its stop the row doesn't say: `effort_record` does, for all rows of its file.
    """
    return {
        "conversation_id": row["conversation_id"],
        "turn": row["turn"],
        "prompt_id": row["prompt_id"],
        "prompt_ids": row["prompt_ids"] if row["turn"] else None,
        "reason": row["reason"],
        "output_ids": row["output_ids"],
        "finish_reason": row["finish_reason"],
        "accept_length": row["accept_length"],
        "attempts": row["attempts"],
        "server": row["server"],
        "latency_s": row["latency_s"],
        "finished_ms": _unix_ms(row["finished_at"]),
        "reused_from": row["reused_from"],
        "cut": False,
    }


def effort_record(effort: Effort) -> dict[str, Any]:
    return {"effort": effort.as_dict()}


def reused(row: Mapping[str, Any], source: str, max_new_tokens: int) -> Completion | None:
    """A row of completions of the build `source`, as this build's answer to the same prompt; None where it can't be.

    Whether an answer that was cut would be cut here too is for who found it to know: it depends on the other build's
    limits. What can't be an answer here at all is refused: failed rows, and those longer than this build allows.
    """
    if row["status"] != "ok" or not 0 < len(row["output_ids"]) == row["completion_tokens"] <= max_new_tokens:
        return None
    return Completion(
        reason=None,
        output_ids=list(row["output_ids"]),
        finish=row["finish_reason"],
        accept_length=row["accept_length"],
        attempts=row["attempts"],
        server=row["server"],
        latency_s=row["latency_s"],
        reused_from=row["reused_from"] or source,
        finished_ms=_unix_ms(row["finished_at"]),
    )


def _unix_ms(when: datetime) -> int:
    return (when - _EPOCH) // timedelta(milliseconds=1)


def record_key(record: Mapping[str, Any]) -> Key:
    return record["conversation_id"], record["turn"]


def write_completions(
    path: Path,
    prompts: ShardPrompts,
    done: dict[Key, int],
    journal: Journal,
    decode: Callable[[list[int]], str],
    stop_ids: frozenset[int],
    effort: Effort,
) -> int:
    """Compacts the journal into completions/<shard>.parquet, in the order of (conversation_id, turn); returns its rows.

    `done` gives each row's place in the journal. Turns after a failed one have none, and no row. `effort` goes into
    the file's footer.
    """
    try:
        return write_table(path, COMPLETIONS, _rows(prompts, done, journal, decode, stop_ids), effort.as_dict())
    except OSError as error:
        raise ShardmillError(
            f"{path} cannot be written ({error.strerror}). The rows are safe in {journal.path}: "
            f"mend that, and run again."
        ) from error


def _rows(
    prompts: ShardPrompts,
    done: dict[Key, int],
    journal: Journal,
    decode: Callable[[list[int]], str],
    stop_ids: frozenset[int],
) -> Iterator[dict[str, Any]]:
    for key in prompts:
        if key in done:
            yield _row(prompts, key, journal.read(done[key]), decode, stop_ids)


def _row(
    prompts: ShardPrompts,
    key: Key,
    record: dict[str, Any],
    decode: Callable[[list[int]], str],
    stop_ids: frozenset[int],
) -> dict[str, Any]:
    turn = prompts.turn(key)
    prompt_ids = record["prompt_ids"] if turn.prompt is None else turn.prompt.ids
    output_ids: list[int] = record["output_ids"]
    ok = record["reason"] is None
    return {
        "prompt_id": record["prompt_id"],
        "conversation_id": key[0],
        "source_id": turn.source_id,
        "turn": key[1],
        "status": "ok" if ok else "failed",
        "reason": record["reason"],
        "prompt_ids": prompt_ids,
        "output_ids": output_ids,
        "text": decode(spoken(output_ids, stop_ids)) if ok else None,
        "finish_reason": record["finish_reason"],
        "prompt_tokens": len(prompt_ids) if ok else 0,
        "completion_tokens": len(output_ids),
        "accept_length": record["accept_length"],
        "attempts": record["attempts"],
        "server": record["server"],
        "latency_s": record["latency_s"],
        "finished_at": _EPOCH + timedelta(milliseconds=record["finished_ms"]),
        "reused_from": record["reused_from"],
    }


def spoken(output_ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    """An answer's ids without its final stop id."""
    return output_ids[:-1] if output_ids and output_ids[-1] in stop_ids else output_ids
