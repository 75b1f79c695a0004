"""Dataset to prompts: read, render once, and write each shard; every record that makes no prompt is counted and kept.

The shards are the same bytes for any number of workers and any order of the records: a conversation's shard and its
place there follow from its content alone.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from shardmill.errors import DataError
from shardmill.files import read_json, write_json
from shardmill.identity import prompt_id, sampling_identity, shard_of
from shardmill.paths import BuildPaths, shard_names
from shardmill.reading import Conversation, Reader, Reject, RejectReason, dataset_files
from shardmill.rendering.files import tokenizer_folder
from shardmill.rendering.render import Rendered, Renderer, RenderError
from shardmill.schemas import PROMPTS, REJECTS, write_table
from shardmill.settings import Settings
from shardmill.spool import ShardSpool
from shardmill.turns import Chat, NoPrompt, asked_turns
from shardmill.workers import ordered_map

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RenderTask:
    """What a rendering worker needs, small enough to be sent to it."""

    folder: Path
    chat_template: Path | None
    thinking: bool
    turns: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A conversation ready to be asked: the messages of each turn, and the first turn's prompt."""

    turns: list[list[Chat]]
    ids: list[int]
    merged_users: bool


@dataclass(frozen=True, slots=True)
class Unfit:
    reason: RejectReason
    detail: str


def make_prompts(settings: Settings, build: BuildPaths, shards: Sequence[str], workers: int = 1) -> dict[str, Any]:
    """Writes prompts/<shard>.parquet for `shards` and rejects.parquet, and the counts into build.json; returns them.

    Raises DataError for a dataset that can't be read (`dataset.bad_records: fail`) or that makes no prompt at all.
    """
    base = Path()
    files = dataset_files(list(settings.dataset.path), base)
    template = Path(settings.model.chat_template) if settings.model.chat_template else None
    task = RenderTask(tokenizer_folder(settings.model), template, settings.model.thinking, settings.prompts.turns)
    renderer = Renderer(task.folder, task.chat_template, task.thinking)
    stop_ids = sorted({*renderer.stop_ids, *settings.sampling.stop_token_ids})
    sampling = sampling_identity(settings, stop_ids)

    with tempfile.TemporaryDirectory(dir=build.run, prefix="prompts-") as scratch, ExitStack() as stack:
        reader = Reader(
            files,
            Path(scratch),
            bad_records=settings.dataset.bad_records,
            rejoin=settings.prompts.rejoin,
            dedupe=settings.prompts.dedupe,
            base=base,
        )
        spool = stack.enter_context(ShardSpool(Path(scratch), PROMPTS, settings.prompts.shards))
        rejects: list[Reject] = []
        counts = _Counts(settings)
        wanted = {shard_names(settings.prompts.shards).index(shard) for shard in shards}
        for conversation, ready in _rendered(reader, task, renderer, rejects, counts, workers):
            if counts.full:  # what workers were ahead with
                counts.beyond_limit += 1
                continue
            verdict = _room(ready, settings)
            if isinstance(verdict, Unfit):
                rejects.append(_reject(conversation, verdict))
                continue
            index = shard_of(conversation.conversation_id, settings.prompts.shards)
            counts.add(index, verdict)
            if index in wanted:
                spool.add(index, _rows(conversation, verdict, settings, sampling))
        summary = counts.summary(reader, rejects)
        _refuse_empty(settings, summary)
        for index, rows in spool.shards(sorted(wanted)):
            write_table(build.prompts(shard_names(settings.prompts.shards)[index]), PROMPTS, rows)
        write_table(build.rejects, REJECTS, (_reject_row(reject) for reject in _in_order(rejects)))
    _write_facts(build, renderer, stop_ids, summary)
    _log.info(
        "%d records: %d conversations, %d prompts; %d joined, %d duplicates, %d rejected, %d beyond the limit",
        *(
            summary[key]
            for key in ("records", "conversations", "prompts", "joined", "duplicates", "rejected", "beyond_limit")
        ),
    )
    return summary


class _Counts:
    """The accounting from conversations to prompts, kept while they stream by."""

    def __init__(self, settings: Settings) -> None:
        self._limit = settings.prompts.limit
        self._by_shard = Counter(dict.fromkeys(range(settings.prompts.shards), 0))
        self._shards = settings.prompts.shards
        self.conversations = 0
        self.beyond_limit = 0
        self.merged_users = 0

    @property
    def full(self) -> bool:
        return self._limit is not None and self.conversations >= self._limit

    def add(self, index: int, ready: Ready) -> None:
        self.conversations += 1
        self.merged_users += ready.merged_users
        self._by_shard[index] += len(ready.turns)

    def summary(self, reader: Reader, rejects: Sequence[Reject]) -> dict[str, Any]:
        names = shard_names(self._shards)
        read = reader.counts
        return {
            "records": read.records,
            "joined": read.joined,
            "rejected": len(rejects),
            "duplicates": read.duplicates,
            "beyond_limit": self.beyond_limit,
            "conversations": self.conversations,
            "prompts": self._by_shard.total(),
            "rejected_by_reason": dict(sorted(Counter(str(reject.reason) for reject in rejects).items())),
            "merged_users": self.merged_users,
            "notes": dict(sorted(read.notes.items())),
            "roles": dict(sorted(read.roles.items())),
            "prompts_by_shard": {names[index]: count for index, count in sorted(self._by_shard.items())},
        }


def _rendered(
    reader: Reader, task: RenderTask, renderer: Renderer, rejects: list[Reject], counts: _Counts, workers: int
) -> Iterator[tuple[Conversation, Ready | Unfit]]:
    """Conversations in file order with what rendering made of them; what the reader rejects goes to `rejects`."""

    def conversations() -> Iterator[Conversation]:
        for item in reader.conversations():
            if isinstance(item, Reject):
                rejects.append(item)
            elif counts.full:
                counts.beyond_limit += 1
            else:
                yield item

    yield from ordered_map(_RenderFirstTurn(task, renderer), conversations(), min(workers, os.cpu_count() or 1))


class _RenderFirstTurn:
    """Renders a conversation's first turn. Sent to workers as its task alone; each worker loads the tokenizer once."""

    def __init__(self, task: RenderTask, renderer: Renderer | None = None) -> None:
        self._task = task
        self._renderer = renderer

    def __reduce__(self) -> tuple[type[_RenderFirstTurn], tuple[RenderTask]]:
        return _RenderFirstTurn, (self._task,)

    def __call__(self, conversation: Conversation) -> Ready | Unfit:
        task = self._task
        if self._renderer is None:
            self._renderer = Renderer(task.folder, task.chat_template, task.thinking)
        try:
            turns = asked_turns([message.as_template() for message in conversation.messages], task.turns)
            rendered: Rendered = self._renderer.render(turns[0], conversation.tools)
        except NoPrompt as error:
            reason, detail = error.args
            return Unfit(RejectReason(reason), detail)
        except RenderError as error:
            return Unfit(RejectReason(error.reason), error.detail)
        return Ready(turns, rendered.ids, rendered.merged_users)


def _room(ready: Ready | Unfit, settings: Settings) -> Ready | Unfit:
    if isinstance(ready, Unfit):
        return ready
    length, most, context = len(ready.ids), settings.prompts.max_prompt_tokens, settings.model.context
    if length > most:
        return Unfit(RejectReason.PROMPT_TOO_LONG, f"{length} tokens, over prompts.max_prompt_tokens ({most})")
    if length >= context:
        return Unfit(RejectReason.NO_ROOM, f"{length} tokens leave no room in model.context ({context})")
    return ready


def _rows(conversation: Conversation, ready: Ready, settings: Settings, sampling: bytes) -> list[dict[str, Any]]:
    """A row a turn; what a later turn asks is known, its ids are not before the answers that precede it."""
    rows: list[dict[str, Any]] = []
    for turn, messages in enumerate(ready.turns):
        first = turn == 0
        rows.append(
            {
                "prompt_id": prompt_id(ready.ids, sampling) if first else None,
                "conversation_id": conversation.conversation_id,
                "source_id": conversation.source_id,
                "turn": turn,
                "prompt_ids": ready.ids if first else None,
                "prompt_tokens": len(ready.ids) if first else None,
                "max_new_tokens": room(len(ready.ids), settings) if first else None,
                "messages": orjson.dumps(messages).decode(),
                "tools": conversation.tools,
            }
        )
    return rows


def room(prompt_tokens: int, settings: Settings) -> int:
    """`sampling.max_new_tokens`, capped to what the context leaves after the prompt."""
    return min(settings.sampling.max_new_tokens, settings.model.context - prompt_tokens)


def _reject(conversation: Conversation, unfit: Unfit) -> Reject:
    excerpt = next((message.content for message in conversation.messages if message.role == "user"), "")
    return Reject(conversation.place, conversation.source_id, unfit.reason, unfit.detail, excerpt[:200])


def _in_order(rejects: Sequence[Reject]) -> list[Reject]:
    return sorted(rejects, key=lambda reject: (reject.place.file, reject.place.record))


def _reject_row(reject: Reject) -> dict[str, Any]:
    return {
        "source_file": reject.place.file,
        "record": reject.place.record,
        "byte_offset": reject.place.byte_offset,
        "source_id": reject.source_id,
        "reason": str(reject.reason),
        "detail": reject.detail,
        "excerpt": reject.excerpt,
    }


def _refuse_empty(settings: Settings, summary: dict[str, Any]) -> None:
    if summary["prompts"]:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in summary["rejected_by_reason"].items())
    raise DataError(
        f"The dataset {', '.join(settings.dataset.path)} makes no prompt: {summary['records']} records"
        + (f", rejected as {reasons}." if reasons else ".")
    )


def _write_facts(build: BuildPaths, renderer: Renderer, stop_ids: list[int], summary: dict[str, Any]) -> None:
    facts = read_json(build.build_json)
    facts["model"] = {
        "vocab_size": renderer.vocab_size,
        "stop_ids": stop_ids,
        "think_close_ids": renderer.think_close_ids,
    }
    facts["counts"] = summary
    write_json(build.build_json, facts)
