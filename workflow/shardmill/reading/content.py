"""The order of turns, and what a conversation's id is made of."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, cast

import orjson

from shardmill.reading.dialect import Turn
from shardmill.reading.reasons import RejectReason, Unreadable
from shardmill.reading.records import Message
from shardmill.reading.text import is_blank

_ROLE, _TEXT, _FIRST = itemgetter(0), itemgetter(1), itemgetter(0)


def in_order(turns: Sequence[Turn], system: str | None, later_part: bool) -> tuple[list[Turn], Mapping[str, int]]:
    """The turns of a whole conversation as they are delivered, and what was noted on the way (wording.NOTES).

    - a system field stands before the turns, or joins a first system turn that says something else
    - blank system and user turns go; a conversation that had no other user turn is a reject
    - assistant and tool turns before the first user turn go: nobody asked for them, or a part before holds them
      (`later_part`: the id's suffix says so)
    - everything else stays as it is: two users or assistants in a row, a user at the end, system in the middle

    Raises Unreadable (empty_user, no_user_turn).
    """
    if system is None and _is_plain(turns):
        return list(turns), {"ends_with_user": 1} if len(turns) % 2 else {}
    notes: Counter[str] = Counter()
    kept: list[Turn] = []
    users = asked = 0
    previous = ""
    for turn in turns:
        role, text = turn[0], turn[1] or ""
        blank = not text[:1].isalnum() and is_blank(text)
        if role == "user":
            users += 1
            if blank:
                continue
            if previous == "user":
                notes["consecutive_user"] = 1
            asked += 1
        elif role == "system":
            if blank:
                continue
            if asked:
                notes["system_in_the_middle"] = 1
        elif not asked:
            notes["leading_assistant_turns"] += 1
            if later_part:
                notes["repeated_leading_turns"] = 1
            continue
        elif role == "assistant":
            if blank and len(turn) == 2:
                notes["blank_assistant_turns"] += 1
            if previous == "assistant":
                notes["consecutive_assistant"] = 1
        kept.append(turn)
        previous = role or ""
    if not asked:
        if users:
            raise Unreadable(RejectReason.EMPTY_USER, "every user turn is null, empty or blank")
        raise Unreadable(RejectReason.NO_USER_TURN, f"none of its {len(turns)} turns is a user's")
    if asked < users:
        notes["blank_user_turns"] = users - asked
    if system is not None:
        _put_system(kept, system, notes)
    if kept[-1][0] == "user":
        notes["ends_with_user"] = 1
    return kept, notes


def _is_plain(turns: Sequence[Turn]) -> bool:
    """User and assistant by turns, a user first, no text blank: most conversations, and nothing to do about them."""
    roles = list(map(_ROLE, turns))
    if roles[::2].count("user") + roles[1::2].count("assistant") != len(roles) or not roles:
        return False
    texts: list[str] = list(map(_TEXT, turns))
    return "" not in texts and (all(map(str.isalnum, map(_FIRST, texts))) or not any(map(is_blank, texts)))


def _put_system(kept: list[Turn], system: str, notes: Counter[str]) -> None:
    if kept[0][0] != "system":
        kept.insert(0, ["system", system])
    elif kept[0][1] != system:
        kept[0] = ["system", f"{system}\n\n{kept[0][1]}"]
        notes["system_merged"] = 1


def has_stray_thinking(turns: Sequence[Turn]) -> bool:
    """Whether some answer holds one of the markers of thinking without the other: templates cut it there."""
    return any(
        turn[0] == "assistant" and (("<think>" in text) != ("</think>" in text)) for turn in turns if (text := turn[1])
    )


def content_digest(turns: bytes, tools: str | None) -> bytes:
    """sha256 over the compact JSON of [tools, turns], given that of the turns as delivered: no id, file or position."""
    return hashlib.sha256(b"[%b,%b]" % (orjson.dumps(tools), turns)).digest()


def conversation_id(digest: bytes, occurrence: int) -> str:
    """The id of the content's `occurrence`-th conversation, from 0: others than the first exist without dedupe only."""
    if occurrence:
        digest = hashlib.sha256(digest + b"occurrence %d" % occurrence).digest()
    return digest.hex()


def as_messages(turns: Sequence[Turn]) -> tuple[Message, ...]:
    fields = cast("Sequence[list[Any]]", turns)  # the roles are those of aliases.ROLES
    return tuple(Message(*turn) for turn in fields)
