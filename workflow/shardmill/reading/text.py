"""What a turn says, as text."""

from __future__ import annotations

import math
import re
from typing import Any

import orjson

from shardmill.reading.aliases import TEXT_PARTS, get
from shardmill.reading.reasons import RejectReason, Unreadable

# Anything but white space, control characters and what Unicode calls default-ignorable (no width, no ink): str.strip()
# leaves the latter, and a text of nothing else is as blank as one of spaces.
_INK = re.compile(
    r"[^\s\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    r"\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U000e0000-\U000e0fff]"
)


def is_blank(text: str) -> bool:
    """Nothing but white space and characters without width."""
    return _INK.search(text) is None


def as_text(content: Any, number: int) -> str:
    """The content of turn `number` as text: null is empty, a number as JSON writes it, text parts joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, int | float) and not isinstance(content, bool):
        return number_text(content) or ""
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise Unreadable(RejectReason.BAD_CONTENT, f"the content of turn {number} is {kind_of(content)}")
    return "".join(_part(part, number) for part in content)


def _part(part: Any, number: int) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise Unreadable(RejectReason.BAD_CONTENT, f"a content part of turn {number} is {kind_of(part)}")
    kind = get(part, ("type",))
    text = get(part, ("text",))
    others = [key for key, value in part.items() if value is not None and key.lower() not in ("type", "text")]
    if kind is None and isinstance(text, str) and not others:
        return text
    if not isinstance(kind, str):
        raise Unreadable(RejectReason.BAD_CONTENT, f"the type of a content part of turn {number} is {kind_of(kind)}")
    if kind not in TEXT_PARTS:
        raise Unreadable(RejectReason.NON_TEXT_PART, f"non_text_part={kind[:60]} (turn {number})")
    if not isinstance(text, str):
        raise Unreadable(RejectReason.BAD_CONTENT, f"a text part of turn {number} holds {kind_of(text)}")
    return text


def number_text(number: float) -> str | None:
    """A number as JSON writes it; None for NaN and Infinity, which Parquet has: they are null, as in JSON."""
    return orjson.dumps(number).decode() if math.isfinite(number) else None


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")
