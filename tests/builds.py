"""Small builds for tests: files of a build written directly under the fixed schemas, with answers that a test chooses.

Token ids are one a word over a closed toy vocabulary, so that a test can say what an answer is and mean its ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from shardmill.files import write_json
from shardmill.paths import BuildPaths, shard_name
from shardmill.schemas import COMPLETIONS, PROMPTS, REJECTS, TOKENS, write_table
from shardmill.settings import Settings, resolve

STOP = 2
THINK, CLOSE = 3, 4
VOCABULARY = 5000
START = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one prompt. `output_ids` None: a stop-terminated word-for-id encoding of `text`."""

    text: str | None
    question: str = "Tell me about rivers and mountains please."
    output_ids: list[int] | None = None
    finish_reason: str | None = "stop"
    status: str = "ok"
    reason: str | None = None
    accept_length: float | None = 3.0
    server: str = "127.0.0.1:30000"
    turn: int = 0
    conversation: str | None = None
    reused_from: str | None = None


def long_answer(number: int, words: int = 60) -> str:
    """Running text without repetition, another one for each number."""
    return " ".join(f"word{(number * 37 + index * 7) % 4001}" for index in range(words))


def good(number: int, **changes: Any) -> Answer:
    return Answer(**{"text": long_answer(number), "question": f"Question {number}: what is it about?", **changes})


def disaster(number: int) -> Answer:
    """The seed's: an empty think block and "OK."."""
    return Answer(text="<think>\n\n</think>\n\nOK.", question=f"Question {number}: what is it about?")


def thinking(number: int, closed: bool = True) -> Answer:
    """An answer after thinking; the template opened `<think>` in the prompt."""
    thought = long_answer(number + 1000, 40)
    if closed:
        return good(number, text=f"{thought}\n</think>\n\n{long_answer(number)}")
    return good(number, text=thought, finish_reason="length")


def ids_of(text: str) -> list[int]:
    return [_word(word) for word in text.split()]


def _word(word: str) -> int:
    special = {"<think>": THINK, "</think>": CLOSE}
    return special.get(word) or 10 + int(hashlib.sha256(word.encode()).hexdigest()[:8], 16) % (VOCABULARY - 10)


@dataclass
class MadeBuild:
    """A build under `root` with `answers` dealt out to `shards` shards in order."""

    root: Path
    settings: Settings
    shards: int = 2
    rejects: int = 2
    counts: dict[str, Any] = field(default_factory=dict)
    effort: dict[str, Any] | None = None  # as each shard's file has it

    @property
    def paths(self) -> BuildPaths:
        return BuildPaths(self.root)

    def names(self) -> list[str]:
        return [shard_name(index, self.shards) for index in range(self.shards)]

    def write(self, answers: Sequence[Answer], tokens: bool = True) -> BuildPaths:
        paths, by_shard = self.paths, {}
        for index, name in enumerate(self.names()):
            rows = [_rows(number, answer) for number, answer in enumerate(answers) if number % self.shards == index]
            write_table(paths.prompts(name), PROMPTS, (row["prompt"] for row in rows))
            write_table(
                paths.completions(name),
                COMPLETIONS,
                (row["completion"] for row in rows if row["completion"]["reason"] != "not_reached"),
                self.effort,
            )
            if tokens:
                ok = (row["completion"] for row in rows if row["completion"]["status"] == "ok")
                write_table(paths.tokens(name), TOKENS, map(training_row, ok))
            by_shard[name] = len(rows)
            write_json(
                paths.manifest(name),
                {
                    "build": paths.name,
                    "shard": name,
                    "rows": {"prompts": len(rows), "ok": len(rows), "failed": 0},
                    "objects": [
                        {
                            "kind": "tokens",
                            "path": f"tokens/{name}.parquet",
                            "key": None,
                            "size": 1000,
                            "sha256": "0" * 64,
                            "rows": len(rows),
                        }
                    ],
                    "created_at": "2026-11-29T12:00:00+00:00",
                },
            )
        write_table(paths.rejects, REJECTS, (_reject(number) for number in range(self.rejects)))
        self._write_facts(len(answers), by_shard, len({_conversation(n, a) for n, a in enumerate(answers)}))
        return paths

    def _write_facts(self, prompts: int, by_shard: dict[str, int], conversations: int) -> None:
        self.counts = {
            "records": conversations + self.rejects + 3,
            "joined": 1,
            "rejected": self.rejects,
            "duplicates": 2,
            "beyond_limit": 0,
            "conversations": conversations,
            "prompts": prompts,
            "rejected_by_reason": {"no_user_turn": self.rejects} if self.rejects else {},
            "merged_users": 0,
            "notes": {"consecutive_user": 4, "lone_surrogates": 2, "nan_values": 0},
            "prompts_by_shard": by_shard,
        }
        write_json(
            self.paths.build_json,
            {
                "build": self.paths.name,
                "id": self.paths.name.rpartition("-")[2],
                "identity": {"format": 1},
                "versions": {"shardmill": "0.1.0", "python": "3.11"},
                "created_at": START.isoformat(),
                "model": {"vocab_size": VOCABULARY, "stop_ids": [STOP], "think_close_ids": [CLOSE]},
                "counts": self.counts,
            },
        )
        write_json(self.paths.settings, self.settings.as_dict())


def settings_of(**sections: dict[str, Any]) -> Settings:
    """Settings of a small build; `quality={"limits": …}` and the like lie over them."""
    base: dict[str, Any] = {"sampling": {"max_new_tokens": 8192}, "prompts": {"shards": 2}}
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return resolve(base)


def training_row(completion: dict[str, Any]) -> dict[str, Any]:
    prompt, output = completion["prompt_ids"], completion["output_ids"]
    kept = {name: completion[name] for name in TOKENS.names if name in completion}
    return {
        **kept,
        "input_ids": prompt + output,
        "loss_mask": [0] * len(prompt) + [1] * len(output),
        "prompt_len": len(prompt),
        "seq_len": len(prompt) + len(output),
    }


def _conversation(number: int, answer: Answer) -> str:
    return hashlib.sha256((answer.conversation or f"conversation {number}").encode()).hexdigest()


def _rows(number: int, answer: Answer) -> dict[str, dict[str, Any]]:
    conversation = _conversation(number, answer)
    prompt_ids = ids_of(f"user: {answer.question} assistant:")
    output = _output(answer)
    key = {
        "prompt_id": hashlib.sha256(json.dumps(prompt_ids).encode()).hexdigest(),
        "conversation_id": conversation,
        "source_id": f"source-{number}",
        "turn": answer.turn,
    }
    prompt = {
        **key,
        "prompt_ids": prompt_ids,
        "prompt_tokens": len(prompt_ids),
        "max_new_tokens": 8192,
        "messages": json.dumps([{"role": "user", "content": answer.question}], ensure_ascii=False),
        "tools": None,
    }
    ok = answer.status == "ok"
    completion = {
        **key,
        "status": answer.status,
        "reason": answer.reason,
        "prompt_ids": prompt_ids,
        "output_ids": output,
        "text": answer.text if ok else None,
        "finish_reason": answer.finish_reason if ok else None,
        "prompt_tokens": len(prompt_ids) if ok else 0,
        "completion_tokens": len(output),
        "accept_length": answer.accept_length if ok else None,
        "attempts": 1,
        # As of a real build: a failed row is nobody's.
        "server": answer.server if ok else None,
        "latency_s": 1.5 if ok else None,
        "finished_at": START + timedelta(seconds=7 * number),
        "reused_from": answer.reused_from,
    }
    return {"prompt": prompt, "completion": completion}


def _output(answer: Answer) -> list[int]:
    if answer.status != "ok":
        return []
    if answer.output_ids is not None:
        return answer.output_ids
    return ids_of(answer.text or "") + ([STOP] if answer.finish_reason == "stop" else [])


def _reject(number: int) -> dict[str, Any]:
    return {
        "source_file": "conversations.json",
        "record": number + 1,
        "byte_offset": number * 100,
        "source_id": f"bad-{number}",
        "reason": "no_user_turn",
        "detail": "the conversation has no user turn",
        "excerpt": "<script>alert('no')</script> & <b>bold</b>",
    }
