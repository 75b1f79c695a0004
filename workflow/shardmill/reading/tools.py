"""Tool declarations and tool calls, as canonical JSON."""

from __future__ import annotations

from typing import Any

import orjson

from shardmill.files import canonical_json
from shardmill.reading.aliases import TOOLS_KEYS, get
from shardmill.reading.reasons import RejectReason, Unreadable
from shardmill.reading.text import is_blank, kind_of


def declarations(record: dict[str, Any]) -> str | None:
    """What the record's own field declares; None where there is none, or it is empty. Raises Unreadable."""
    found = get(record, TOOLS_KEYS)
    if found is None or found == [] or (isinstance(found, str) and is_blank(found)):
        return None
    if isinstance(found, str):
        try:
            found = orjson.loads(found)
        except orjson.JSONDecodeError as error:
            raise Unreadable(RejectReason.BAD_TOOLS, f"the tool declarations are not JSON: {error}") from None
    if not isinstance(found, list):
        raise Unreadable(RejectReason.BAD_TOOLS, f"the tool declarations are {kind_of(found)}, not a list")
    if not all(isinstance(tool, dict) for tool in found):
        raise Unreadable(RejectReason.BAD_TOOLS, "a tool declaration is not an object")
    return _canonical(found, RejectReason.BAD_TOOLS, "the tool declarations") if found else None


def calls_from_text(text: str, number: int) -> str:
    """The calls that a turn of the role function_call holds as its text. `number` is the turn's."""
    try:
        return calls_as_json(orjson.loads(text), number)
    except orjson.JSONDecodeError:
        raise Unreadable(RejectReason.BAD_TOOL_CALL, f"the tool call of turn {number} is not JSON") from None


def calls_as_json(value: Any, number: int) -> str:
    """A list of {"id"?, "type": "function", "function": {"name", "arguments"}}."""
    calls = [_call(call, number) for call in (value if isinstance(value, list) else [value])]
    return _canonical(calls, RejectReason.BAD_TOOL_CALL, f"the calls of turn {number}")


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
