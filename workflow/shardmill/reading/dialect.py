"""A record's way to normalised turns, whatever ShareGPT dialect it is written in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import orjson

from shardmill.reading.aliases import (
    CONTENT_KEYS,
    FUNCTION_CALL,
    ID_KEYS,
    ROLE_KEYS,
    ROLES,
    SYSTEM_KEYS,
    TURNS_KEYS,
    get,
    keys_there,
    known_role,
)
from shardmill.reading.reasons import RejectReason, Unreadable
from shardmill.reading.shapes import looks_like_turn
from shardmill.reading.text import as_text, is_blank, kind_of, number_text
from shardmill.reading.tools import calls_as_json, calls_from_text, declarations

_FROM, _VALUE = itemgetter("from"), itemgetter("value")
_PLAIN_ROLES = {name: role for name, role in ROLES.items() if role in ("user", "assistant", "system")}

# A turn on its way: [role, content], or [role, content, tool_calls, name, tool_call_id] (see records.Message). Plain
# tuples and lists, since hundreds of thousands of them go through the spool a second.
Turn = Sequence[str | None]


@dataclass(slots=True)
class Turns:
    """A record's turns, every one of them, before their order is looked at."""

    source_id: str | None
    system: str | None  # from a field of its own
    tools: str | None
    messages: list[Turn]
    several_fields: bool


def source_id(record: Any) -> str | None:
    """The record's id as text, unchanged; a number as JSON writes it."""
    if not isinstance(record, dict):
        return None
    found = get(record, ID_KEYS)
    if isinstance(found, str):
        return found or None
    if isinstance(found, int | float) and not isinstance(found, bool):
        return number_text(found)
    return None


def read_turns(record: Any, roles: Counter[str]) -> Turns:
    """Normalises one record; `roles` counts the turns by role as written. Raises Unreadable."""
    if isinstance(record, list) and looks_like_turn(next(iter(record), None)):
        record = {TURNS_KEYS[0]: record}  # nothing but the turns
    if not isinstance(record, dict):
        raise Unreadable(RejectReason.NOT_AN_OBJECT, f"the record is {kind_of(record)}, not an object")
    turns, several = _turns_field(record)
    messages = _plain_turns(turns, roles)
    if messages is None:
        messages = []
        for number, turn in enumerate(turns, 1):
            if not isinstance(turn, dict):
                raise Unreadable(RejectReason.TURN_NOT_AN_OBJECT, f"turn {number} is {kind_of(turn)}, not an object")
            messages.append(_read_turn(turn, number, roles))
    return Turns(source_id(record), _system_field(record), declarations(record), messages, several)


def _plain_turns(turns: list[Any], roles: Counter[str]) -> list[Turn] | None:
    """All turns at once where each is {"from": a known role, "value": a text} and no more, as most are; else None."""
    try:
        written, said = list(map(_FROM, turns)), list(map(_VALUE, turns))
        known = list(map(_PLAIN_ROLES.__getitem__, written))
    except (KeyError, TypeError):
        return None
    if list(map(len, turns)).count(2) != len(turns) or set(map(type, said)) != {str}:
        return None
    roles.update(written)
    return list(zip(known, said, strict=True))


def _turns_field(record: dict[str, Any]) -> tuple[list[Any], bool]:
    filled: list[list[Any]] = []
    empty = misfit = None
    for key in keys_there(record, TURNS_KEYS):
        found = get(record, (key,))
        if found is None:
            continue
        if isinstance(found, str):
            found = _json_list(found)
        if not isinstance(found, list):
            misfit = misfit or f"{key} holds {kind_of(found)}, not a list of turns"
        elif found:
            filled.append(found)
        else:
            empty = empty or key
    if filled:
        return filled[0], len(filled) > 1
    if misfit is not None:
        raise Unreadable(RejectReason.TURNS_NOT_A_LIST, misfit)
    if empty is not None:
        raise Unreadable(RejectReason.EMPTY_CONVERSATION, f"{empty} is an empty list")
    raise Unreadable(RejectReason.NO_CONVERSATIONS, f"none of {', '.join(TURNS_KEYS)} is there")


def _json_list(text: str) -> Any:
    """The list that a text holds, as in some Parquet files; the text itself where it is none."""
    if text.lstrip()[:1] != "[":
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _read_turn(turn: dict[str, Any], number: int, roles: Counter[str]) -> Turn:
    written, known = _role(turn, number)
    roles[written] += 1
    content = as_text(get(turn, CONTENT_KEYS), number)
    if known == FUNCTION_CALL:
        return ("assistant", "", calls_from_text(content, number), None, None)
    if known == "assistant":
        calls = get(turn, ("tool_calls",)) or get(turn, ("function_call",))
        return ("assistant", content, calls_as_json(calls, number), None, None) if calls else ("assistant", content)
    if known == "tool":
        return ("tool", content, None, _optional(turn, "name"), _optional(turn, "tool_call_id"))
    return (known, content)


def _role(turn: dict[str, Any], number: int) -> tuple[str, str]:
    found = [value for key in ROLE_KEYS if (value := get(turn, (key,))) is not None]
    if not found:
        raise Unreadable(RejectReason.MISSING_ROLE, f"turn {number} has none of {', '.join(ROLE_KEYS)}")
    known: set[str] = set()
    for value in found:
        if not isinstance(value, str):
            raise Unreadable(RejectReason.MISSING_ROLE, f"the role of turn {number} is {kind_of(value)}, not a text")
        role = known_role(value)
        if role is None:
            raise Unreadable(RejectReason.UNKNOWN_ROLE, f"unknown_role={value[:60]} (turn {number})")
        known.add(role)
    if len(known) > 1:
        both = "|".join(str(value)[:60] for value in found)
        raise Unreadable(RejectReason.UNKNOWN_ROLE, f"unknown_role={both} (turn {number} names two speakers)")
    return found[0].strip().lower(), known.pop()


def _system_field(record: dict[str, Any]) -> str | None:
    found = get(record, SYSTEM_KEYS)
    if found is None:
        return None
    if not isinstance(found, str | list):
        raise Unreadable(RejectReason.BAD_CONTENT, f"the system field holds {kind_of(found)}, not a text")
    text = found if isinstance(found, str) else as_text(found, 0)
    return None if is_blank(text) else text


def _optional(turn: dict[str, Any], key: str) -> str | None:
    found = get(turn, (key,))
    return found if isinstance(found, str) else None
