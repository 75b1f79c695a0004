"""The ShareGPT dialects: one table of aliases, and a record's way to normalised turns.

What is in no table is rejected by its name, never guessed, and never taken for the assistant.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from shardmill.files import canonical_json
from shardmill.reading.reasons import RejectReason

# Keys are compared without case; a key written exactly like this goes before a variant.
ID_KEYS = ("id", "conversation_id", "conv_id", "_id", "uuid")
TURNS_KEYS = ("conversations", "conversation", "messages", "items")
SYSTEM_KEYS = ("system", "system_prompt")
TOOLS_KEYS = ("tools", "functions")
ROLE_KEYS = ("from", "role")
CONTENT_KEYS = ("value", "content", "text")

# Roles are compared in lower case, without outer spaces, and with `_` for inner spaces and hyphens.
FUNCTION_CALL = "function_call"
ROLES: dict[str, str] = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(
        ("gpt", "assistant", "chatgpt", "bing", "bard", "bot", "chatbot", "ai", "model", "claude"), "assistant"
    ),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(
        ("tool", "function", "observation", "ipython"),
        "tool",
    ),
    **dict.fromkeys(
        tuple(f"{what}_{kind}" for what in ("tool", "function") for kind in ("response", "result", "output")),
        "tool",
    ),
    **dict.fromkeys((FUNCTION_CALL, "tool_call", "tool_calls"), FUNCTION_CALL),
}

_PLAIN_ROLES = {name: role for name, role in ROLES.items() if role in ("user", "assistant", "system")}

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})

# Anything but white space, control characters and what Unicode calls default-ignorable (no width, no ink): str.strip()
# leaves the latter, and a text of nothing else is as blank as one of spaces.
_INK = re.compile(
    r"[^\s\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    r"\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U000e0000-\U000e0fff]"
)


class Unreadable(Exception):
    """The record makes no conversation."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


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


def is_blank(text: str) -> bool:
    """Nothing but white space and characters without width."""
    return _INK.search(text) is None


def looks_like_record(value: Any) -> bool:
    """An object with a field of turns that holds a list: what a broken file is read on from."""
    return isinstance(value, dict) and any(isinstance(_get(value, (key,)), list) for key in TURNS_KEYS)


def looks_like_turn(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(_get(value, ROLE_KEYS), str)


def has_records_for_turns(value: Any) -> bool:
    """Whether a record's turns hold whole records: it lacks its end, and took that of those that follow."""
    if not isinstance(value, dict):
        return False
    found = [_get(value, (key,)) for key in TURNS_KEYS]
    elements = (element for turns in found if isinstance(turns, list) for element in turns)
    return any(looks_like_record(element) and not looks_like_turn(element) for element in elements)


def source_id(record: Any) -> str | None:
    """The record's id as text, unchanged; a number as JSON writes it."""
    if not isinstance(record, dict):
        return None
    found = _get(record, ID_KEYS)
    if isinstance(found, str):
        return found or None
    if isinstance(found, int | float) and not isinstance(found, bool):
        return orjson.dumps(found).decode()
    return None


def read_turns(record: Any, roles: Counter[str]) -> Turns:
    """Normalises one record; `roles` counts the turns by role as written. Raises Unreadable."""
    if isinstance(record, list) and looks_like_turn(next(iter(record), None)):
        record = {TURNS_KEYS[0]: record}  # nothing but the turns
    if not isinstance(record, dict):
        raise Unreadable(RejectReason.NOT_AN_OBJECT, f"the record is {_kind(record)}, not an object")
    turns, several = _turns_field(record)
    messages = _plain_turns(turns, roles)
    if messages is None:
        messages = []
        for number, turn in enumerate(turns, 1):
            if not isinstance(turn, dict):
                raise Unreadable(RejectReason.TURN_NOT_AN_OBJECT, f"turn {number} is {_kind(turn)}, not an object")
            messages.append(_read_turn(turn, number, roles))
    return Turns(source_id(record), _system_field(record), _tools_field(record), messages, several)


def _plain_turns(turns: list[Any], roles: Counter[str]) -> list[Turn] | None:
    """All turns at once where each is {"from": a known role, "value": a text} and no more, as most are; else None."""
    try:
        written = [turn["from"] for turn in turns]
        said = [turn["value"] for turn in turns]
        known = [_PLAIN_ROLES[role] for role in written]
    except (KeyError, TypeError):
        return None
    if set(map(len, turns)) != {2} or set(map(type, said)) != {str}:
        return None
    roles.update(written)
    return list(zip(known, said, strict=True))


def _turns_field(record: dict[str, Any]) -> tuple[list[Any], bool]:
    filled: list[list[Any]] = []
    there: list[str] = []
    for key in TURNS_KEYS:
        found = _get(record, (key,))
        if found is None:
            continue
        if isinstance(found, str):
            found = _json_list(found, key)
        if not isinstance(found, list):
            raise Unreadable(RejectReason.TURNS_NOT_A_LIST, f"{key} holds {_kind(found)}, not a list of turns")
        there.append(key)
        if found:
            filled.append(found)
    if filled:
        return filled[0], len(filled) > 1
    if there:
        raise Unreadable(RejectReason.EMPTY_CONVERSATION, f"{there[0]} is an empty list")
    raise Unreadable(RejectReason.NO_CONVERSATIONS, f"none of {', '.join(TURNS_KEYS)} is there")


def _json_list(text: str, key: str) -> Any:
    """Some Parquet files hold the turns as JSON text."""
    if text.lstrip()[:1] == "[":
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            pass  # said below, with the field's name
    raise Unreadable(RejectReason.TURNS_NOT_A_LIST, f"{key} holds a text, not a list of turns")


def _read_turn(turn: dict[str, Any], number: int, roles: Counter[str]) -> Turn:
    written, known = _role(turn, number)
    roles[written] += 1
    content = _text(_get(turn, CONTENT_KEYS), number)
    if known == FUNCTION_CALL:
        return ("assistant", "", _calls_from_text(content, number), None, None)
    if known == "assistant":
        calls = _get(turn, ("tool_calls",)) or _get(turn, ("function_call",))
        return ("assistant", content, _calls(calls, number), None, None) if calls else ("assistant", content)
    if known == "tool":
        return ("tool", content, None, _optional(turn, "name"), _optional(turn, "tool_call_id"))
    return (known, content)


def _role(turn: dict[str, Any], number: int) -> tuple[str, str]:
    found = [value for key in ROLE_KEYS if (value := _get(turn, (key,))) is not None]
    if not found:
        raise Unreadable(RejectReason.MISSING_ROLE, f"turn {number} has none of {', '.join(ROLE_KEYS)}")
    known: set[str] = set()
    for value in found:
        if not isinstance(value, str):
            raise Unreadable(RejectReason.MISSING_ROLE, f"the role of turn {number} is {_kind(value)}, not a text")
        role = _known_role(value)
        if role is None:
            raise Unreadable(RejectReason.UNKNOWN_ROLE, f"unknown_role={value[:60]} (turn {number})")
        known.add(role)
    if len(known) > 1:
        both = "|".join(str(value)[:60] for value in found)
        raise Unreadable(RejectReason.UNKNOWN_ROLE, f"unknown_role={both} (turn {number} names two speakers)")
    return found[0].strip().lower(), known.pop()


@functools.lru_cache(maxsize=1024)
def _known_role(written: str) -> str | None:
    return ROLES.get("_".join(written.replace("-", " ").replace("_", " ").lower().split()))


def _text(content: Any, number: int) -> str:
    """A content as text: null is empty, a number as JSON writes it, text parts joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, int | float) and not isinstance(content, bool):
        return orjson.dumps(content).decode()
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise Unreadable(RejectReason.BAD_CONTENT, f"the content of turn {number} is {_kind(content)}")
    return "".join(_part(part, number) for part in content)


def _part(part: Any, number: int) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise Unreadable(RejectReason.BAD_CONTENT, f"a content part of turn {number} is {_kind(part)}")
    kind = _get(part, ("type",))
    text = _get(part, ("text",))
    others = [key for key, value in part.items() if value is not None and key.lower() not in ("type", "text")]
    if kind in TEXT_PARTS or (kind is None and isinstance(text, str) and not others):
        if isinstance(text, str):
            return text
        raise Unreadable(RejectReason.BAD_CONTENT, f"a text part of turn {number} holds {_kind(text)}")
    if kind is None:
        raise Unreadable(RejectReason.BAD_CONTENT, f"a content part of turn {number} is an object without a type")
    raise Unreadable(RejectReason.NON_TEXT_PART, f"non_text_part={str(kind)[:60]} (turn {number})")


def _system_field(record: dict[str, Any]) -> str | None:
    found = _get(record, SYSTEM_KEYS)
    if found is None:
        return None
    if not isinstance(found, str | list):
        raise Unreadable(RejectReason.BAD_CONTENT, f"the system field holds {_kind(found)}, not a text")
    text = found if isinstance(found, str) else _text(found, 0)
    return None if is_blank(text) else text


def _tools_field(record: dict[str, Any]) -> str | None:
    found = _get(record, TOOLS_KEYS)
    if found is None or found == [] or (isinstance(found, str) and is_blank(found)):
        return None
    if isinstance(found, str):
        try:
            found = orjson.loads(found)
        except orjson.JSONDecodeError as error:
            raise Unreadable(RejectReason.BAD_TOOLS, f"the tool declarations are not JSON: {error}") from None
    if not isinstance(found, list):
        raise Unreadable(RejectReason.BAD_TOOLS, f"the tool declarations are {_kind(found)}, not a list")
    if not all(isinstance(tool, dict) for tool in found):
        raise Unreadable(RejectReason.BAD_TOOLS, "a tool declaration is not an object")
    return _canonical(found, RejectReason.BAD_TOOLS, "the tool declarations") if found else None


def _calls_from_text(text: str, number: int) -> str:
    try:
        return _calls(orjson.loads(text), number)
    except orjson.JSONDecodeError:
        raise Unreadable(RejectReason.BAD_TOOL_CALL, f"the tool call of turn {number} is not JSON") from None


def _calls(value: Any, number: int) -> str:
    """Tool calls as canonical JSON: a list of {"id"?, "type": "function", "function": {"name", "arguments"}}."""
    calls = value if isinstance(value, list) else [value]
    return _canonical(
        [_call(call, number) for call in calls], RejectReason.BAD_TOOL_CALL, f"the calls of turn {number}"
    )


def _call(call: Any, number: int) -> dict[str, Any]:
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise Unreadable(RejectReason.BAD_TOOL_CALL, f"the tool call of turn {number} is no object with a name")
    arguments = inner.get("arguments", inner.get("parameters"))
    if isinstance(arguments, str):
        # Templates write arguments with tojson: a text that is an object already would be quoted twice.
        try:
            parsed = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    function = {"name": inner["name"], "arguments": {} if arguments is None else arguments}
    result: dict[str, Any] = {"type": "function", "function": function}
    if isinstance(call.get("id"), str):
        result["id"] = call["id"]
    return result


def _canonical(value: Any, reason: RejectReason, what: str) -> str:
    try:
        return canonical_json(value).decode()
    except TypeError as error:  # orjson reads 1,024 levels and writes 254; Parquet has values that JSON has not
        raise Unreadable(reason, f"{what} can't be written as JSON: {error}") from None


def _optional(turn: dict[str, Any], key: str) -> str | None:
    found = _get(turn, (key,))
    return found if isinstance(found, str) else None


def _get(mapping: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The first value that is not null under one of `keys`, whatever their case; None where there is none."""
    for key in _present(tuple(mapping), keys):
        value = mapping[key]
        if value is not None:
            return value
    return None


@functools.lru_cache(maxsize=4096)
def _present(there: tuple[str, ...], keys: tuple[str, ...]) -> tuple[str, ...]:
    """Which keys of an object are some of `keys`, in the order of those, exact spelling first. Few shapes are many."""
    exact = [key for key in keys if key in there]
    variants = [key for wanted in keys for key in there if key not in keys and key.lower() == wanted]
    return (*exact, *variants)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")
