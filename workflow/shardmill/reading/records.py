"""What reading makes: conversations, rejects and counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from shardmill.reading.reasons import RejectReason

Role = Literal["system", "user", "assistant", "tool"]

EXCERPT = 400  # characters of a reject's excerpt


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record stands."""

    file: str
    record: int  # 1-based in its file
    byte_offset: int | None  # of its first byte in the decompressed file; None in Parquet and in transcoded UTF-16


@dataclass(frozen=True, slots=True)
class Message:
    """One turn, its text exactly as in the dataset. A null content is an empty text here."""

    role: Role
    content: str
    tool_calls: str | None = None  # assistant: canonical JSON of a list of {"type": "function", "function": {…}}
    name: str | None = None  # tool: the function that answered
    tool_call_id: str | None = None  # tool: the call that it answers

    def as_template(self) -> dict[str, Any]:
        """The message as chat templates take it; a key without a value is left out."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls is not None:
            message["tool_calls"] = orjson.loads(self.tool_calls)
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


@dataclass(frozen=True, slots=True)
class Conversation:
    conversation_id: str  # sha256 hex of the content (see content.conversation_id)
    source_id: str  # the record's id, or the conversation_id where it has none
    messages: tuple[Message, ...]  # at least one user message; the first that is not system is a user's
    tools: str | None  # canonical JSON of the list of tool declarations
    place: Place


@dataclass(frozen=True, slots=True)
class Reject:
    place: Place
    source_id: str | None
    reason: RejectReason
    detail: str
    excerpt: str  # the record's beginning, clipped


@dataclass
class ReadCounts:
    """Final when the reader is exhausted. records = conversations + joined + rejected + duplicates, always."""

    records: int = 0
    joined: int = 0  # parts that became one with the part before
    rejected: int = 0
    duplicates: int = 0
    conversations: int = 0
    rejects: Counter[str] = field(default_factory=Counter)  # by reason
    roles: Counter[str] = field(default_factory=Counter)  # turns by role as written, lower-cased
    turns: int = 0
    notes: Counter[str] = field(default_factory=Counter)  # everything that was mended or stands out: wording.NOTES

    @property
    def balanced(self) -> bool:
        parts = self.conversations + self.joined + self.rejected + self.duplicates
        return self.records == parts
