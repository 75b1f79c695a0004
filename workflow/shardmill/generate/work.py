"""The state of a shard's work: what is done and where it lies in the journal, and what has happened to the rest."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardmill.effort import Effort
from shardmill.generate.asked import History, Prompt
from shardmill.generate.audit import Degenerate
from shardmill.generate.progress import Tally
from shardmill.generate.prompts import Key, ShardPrompts
from shardmill.generate.rows import Completion, record, record_key, reused
from shardmill.journal import Journal

_log = logging.getLogger(__name__)

# By conversation_id, turn and prompt_id: a row of completions of another build that this build's limits would not have
# made otherwise, and that build's folder name. None where none has it.
Reusable = Callable[[str, int, str], tuple[Mapping[str, Any], str] | None]


def nothing_reusable(conversation_id: str, turn: int, prompt_id: str) -> None:
    return None


@dataclass(slots=True)
class Work:
    """`open` reads it out of the journal; `keep` and `note` write to both."""

    prompts: ShardPrompts
    journal: Journal
    tally: Tally
    done: dict[Key, int]  # place in the journal
    failed: set[Key]
    histories: dict[Key, History]
    reusable: Reusable

    @classmethod
    def open(cls, prompts: ShardPrompts, journal: Journal, tally: Tally, reusable: Reusable) -> Work:
        work = cls(prompts, journal, tally, {}, set(), {}, reusable)
        strangers = 0
        for offset, entry in journal.replay():
            if "effort" in entry:
                tally.earlier(Effort.of(entry["effort"]))
                continue
            key = record_key(entry)
            if "note" in entry:
                work.histories[key] = _history(entry["note"])
            elif not work._belongs(key, entry["prompt_id"]):
                strangers += 1
            elif key not in work.done:
                work.done[key] = offset
                work.failed.update([key] if entry["reason"] is not None else [])
                tally.restored(entry)
                work.histories.pop(key, None)
        work._report(strangers)
        work._reuse()
        return work

    def _belongs(self, key: Key, prompt_id: str) -> bool:
        """Whether a journal row answers a prompt of this shard as it is now.

        A later turn stands on its earlier ones: when one of those was lost to a flipped byte, both are done again.
        """
        if key not in self.prompts:
            return False
        known = self.prompts.prompt_id(key)
        if known is not None:
            return known == prompt_id
        before = (key[0], key[1] - 1)
        return before in self.done and before not in self.failed

    def _report(self, strangers: int) -> None:
        damage, path = self.journal.damage, self.journal.path
        if damage.torn:
            _log.warning("%s: a torn last line of %d bytes was cut off; its prompt is done again", path, damage.torn)
        if damage.bad:
            _log.warning(
                "%s: %d records fail their checksum, the first at byte %d; their prompts are done again",
                path,
                damage.bad,
                damage.first_bad,
            )
        if strangers:
            _log.warning("%s: %d rows answer prompts that are not there any more, and are left out", path, strangers)

    def keep(self, key: Key, prompt: Prompt, completion: Completion, rendered_here: bool) -> None:
        entry = record(key, prompt.prompt_id, completion, prompt.ids, rendered_here)
        self.done[key] = self.journal.append(entry)
        self.histories.pop(key, None)
        if completion.reason is not None:
            self.failed.add(key)
            self.tally.fail(completion.reason)

    def reuse(self, key: Key, prompt: Prompt, rendered_here: bool) -> bool:
        """Keeps another build's answer to this prompt, where there is one that is right here too."""
        found = self.reusable(*key, prompt.prompt_id)
        completion = reused(*found, prompt.max_new_tokens) if found is not None else None
        if completion is None:
            return False
        self.keep(key, prompt, completion, rendered_here)
        self.tally.reuse(completion)
        return True

    def _reuse(self) -> None:
        """All prompts that are known before anything is asked, so that a shard with nothing else needs no server."""
        for key in self.prompts:
            turn = None if key in self.done else self.prompts.turn(key)
            if turn is not None and turn.prompt is not None:
                self.reuse(key, turn.prompt, rendered_here=False)

    def note(self, key: Key, history: History) -> None:
        """What has counted against a prompt that is not done, so that a restart doesn't forget it."""
        useless = {kind.value: number for kind, number in history.useless.items()}
        note = {"attempts": history.attempts, "deaths": history.deaths, "useless": useless}
        self.journal.append({"conversation_id": key[0], "turn": key[1], "note": note})

    def todo(self) -> deque[list[Key]]:
        """Conversations with a turn to ask. Turns that a failed one keeps from being asked are counted."""
        todo: deque[list[Key]] = deque()
        for keys in self.prompts.conversations().values():
            failed = next((index for index, key in enumerate(keys) if key in self.failed), None)
            if failed is not None:
                self.tally.not_reached += len(keys) - failed - 1
            elif not all(key in self.done for key in keys):
                todo.append(keys)
        return todo


def _history(note: dict[str, Any]) -> History:
    useless = Counter({Degenerate(kind): number for kind, number in note["useless"].items()})
    return History(attempts=note["attempts"], deaths=note["deaths"], useless=useless)
