"""The dataset's conversations, in file order, with what became of every record.

Two passes. The first reads all files, normalises every record and spools it; memory holds 120 bytes a record.
Between them it is decided which parts belong together and which contents are the same. The second pass yields.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from shardmill.errors import DataError
from shardmill.identity import split_id
from shardmill.reading.content import as_messages, content_digest, conversation_id, has_stray_thinking, in_order
from shardmill.reading.cursor import Lost
from shardmill.reading.dialect import Turns, read_turns, source_id
from shardmill.reading.framing import Framer
from shardmill.reading.parquet import parquet_records
from shardmill.reading.reasons import BROKEN_SYNTAX, BadRecords, RejectReason, Unreadable
from shardmill.reading.records import EXCERPT, Conversation, Place, ReadCounts, Reject
from shardmill.reading.sources import ByteSource, is_parquet, line_of
from shardmill.reading.syntax import Mended

if TYPE_CHECKING:
    from shardmill.reading.spool import Spool

_NO_DIGEST = bytes(32)


class Reader:
    """Reads `files` once. `counts` is final when `conversations` is exhausted.

    `folder` takes the spool: about as many bytes as the dataset has, decompressed. `base` is what names of files in
    places are relative to, where they lie below it.
    """

    def __init__(
        self,
        files: Sequence[Path],
        folder: Path,
        *,
        bad_records: BadRecords | str = BadRecords.FAIL,
        rejoin: bool = True,
        dedupe: bool = True,
        base: Path | None = None,
    ) -> None:
        self.counts = ReadCounts()
        self._files = list(files)
        self._names = [_name(file, base) for file in files]
        self._folder = folder
        self._bad_records = BadRecords(bad_records)
        self._rejoin = rejoin
        self._dedupe = dedupe
        self._mended = Mended()

    def conversations(self) -> Iterator[Conversation | Reject]:
        """First most rejects, while reading; then the conversations, in file order, with the rest of the rejects.

        Raises DataError at the first broken record under `bad_records: fail`.
        """
        from shardmill.reading.spool import Spool  # numpy: not for those who only want the files or the reasons

        spool = Spool(self._folder)
        try:
            for number in range(len(self._files)):
                yield from self._read_file(number, spool)
            yield from self._deliver(spool)
        finally:
            spool.close()

    # First pass

    def _read_file(self, number: int, spool: Spool) -> Iterator[Reject]:
        for record, offset, value in self._values(number):
            self.counts.records += 1
            if isinstance(value, Lost):
                if value.reason in BROKEN_SYNTAX and self._bad_records is BadRecords.FAIL:
                    raise self._stop(number, record, offset, value)
                yield self._reject(number, record, offset, None, value.reason, value.detail, value.excerpt)
                continue
            try:
                turns = read_turns(value, self.counts.roles)
                self._add(spool, (number, record, offset), turns)
            except Unreadable as why:
                yield self._reject(number, record, offset, source_id(value), why.reason, why.detail, _excerpt(value))

    def _values(self, number: int) -> Iterator[tuple[int, int, Any]]:
        """Record number, byte offset (-1: unknown) and value or Lost, of every record of a file."""
        path = self._files[number]
        record = 0
        if is_parquet(path):
            for row in parquet_records(path):
                record += 1
                yield record, -1, row
            return
        source = ByteSource(path)
        for frame in Framer(source, self._mended).records():
            record += 1
            offset, value = (frame.offset, frame) if isinstance(frame, Lost) else frame
            yield record, -1 if source.transcoded else offset, value
        self._mended.surrogates += source.surrogates

    def _add(self, spool: Spool, place: tuple[int, int, int], turns: Turns) -> None:
        counts = self.counts
        counts.turns += len(turns.messages)
        if turns.several_fields:
            counts.notes["several_turn_fields"] += 1
        split = split_id(turns.source_id) if self._rejoin else None
        body = orjson.dumps(turns.messages)
        payload = b"%b,%b]" % (orjson.dumps([turns.source_id, turns.system, turns.tools])[:-1], body)
        try:
            delivered, _ = in_order(turns.messages, turns.system, later_part=False)
            if delivered != turns.messages:
                body = orjson.dumps(delivered)
            digest, flags = content_digest(body, turns.tools), 0
        except Unreadable:
            if split is None:
                raise
            from shardmill.reading.spool import ALONE_UNREADABLE

            digest, flags = _NO_DIGEST, ALONE_UNREADABLE
        if split is None:
            spool.add(payload, place, digest)
        else:
            part, assistants = _part(turns, *split, payload)
            spool.add(payload, place, digest, part, flags | assistants)

    # Second pass

    def _deliver(self, spool: Spool) -> Iterator[Conversation | Reject]:
        from shardmill.reading.resolve import CONVERSATION, DUPLICATE, JOINED, joined_turns, resolve
        from shardmill.reading.spool import ALONE_UNREADABLE

        counts = self.counts
        index = spool.index()
        fate = resolve(spool, index, self._rejoin, self._dedupe, counts.notes)
        counts.joined = int((fate.state == JOINED).sum())
        counts.duplicates = int((fate.state == DUPLICATE).sum())
        for entry in (fate.state == CONVERSATION).nonzero()[0].tolist():
            row = index[entry]
            number, record, offset = int(row["file"]), int(row["record"]), int(row["offset"])
            (own_id, system, tools, _), turns = joined_turns(spool, index, fate, entry)
            try:
                delivered, notes = in_order(turns, system, later_part=bool(row["start"]))
            except Unreadable as why:
                assert row["flags"] & ALONE_UNREADABLE
                excerpt = _excerpt([turn[:2] for turn in turns])
                yield self._reject(number, record, offset, own_id, why.reason, why.detail, excerpt)
                continue
            counts.notes.update(notes)
            if tools is not None or any(len(turn) > 2 for turn in delivered):
                counts.notes["with_tools"] += 1
            counts.notes["stray_think_markers"] += has_stray_thinking(delivered)
            counts.conversations += 1
            content = conversation_id(row["digest"].tobytes(), int(fate.occurrence[entry]))
            yield Conversation(
                conversation_id=content,
                source_id=fate.source_ids.get(entry, own_id) or content,
                messages=as_messages(delivered),
                tools=tools,
                place=self._place(number, record, offset),
            )
        counts.notes["lone_surrogates"] = self._mended.surrogates
        counts.notes["nan_values"] = self._mended.nans

    # What a person is told

    def _place(self, number: int, record: int, offset: int) -> Place:
        return Place(self._names[number], record, offset if offset >= 0 else None)

    def _reject(
        self, number: int, record: int, offset: int, own_id: str | None, reason: RejectReason, detail: str, excerpt: str
    ) -> Reject:
        self.counts.rejected += 1
        self.counts.rejects[reason.value] += 1
        return Reject(self._place(number, record, offset), own_id, reason, detail, excerpt[:EXCERPT])

    def _stop(self, number: int, record: int, offset: int, lost: Lost) -> DataError:
        name = self._names[number]
        where = f"record {record:,}"
        if offset >= 0:
            where = f"byte {offset:,}, line {line_of(self._files[number], offset):,}, {where}"
        return DataError(
            f"The dataset {name} is broken at {where}: {lost.detail}; {record - 1:,} records come before it. "
            "Repair the file, or set dataset.bad_records to reject to go on without what is broken."
        )


def _part(turns: Turns, base: str, start: int, payload: bytes) -> tuple[tuple[int, int, int, int, int, int, int], int]:
    from shardmill.reading.spool import ASSISTANT, ASSISTANT_FIRST, ASSISTANT_LAST

    first, last = turns.messages[0], turns.messages[-1]
    assistants = ASSISTANT if any(turn[0] == "assistant" for turn in turns.messages) else 0
    if assistants:
        assistants |= ASSISTANT_FIRST * (first[0] == "assistant") | ASSISTANT_LAST * (last[0] == "assistant")
    part = (
        _hash(base) | 1,  # never 0, which says that there is no suffix
        start,
        len(turns.messages),
        _hash(tuple(first)),
        _hash(tuple(last)),
        _hash((turns.system, turns.tools)),
        _hash(payload),
    )
    return part, assistants


def _hash(value: Hashable) -> int:
    """Python's own, seeded for each process: it never leaves this one."""
    return hash(value) & 0xFFFF_FFFF_FFFF_FFFF


def _name(file: Path, base: Path | None) -> str:
    if base is not None and file.is_relative_to(base):
        return str(file.relative_to(base))
    return str(file)


def _excerpt(value: Any) -> str:
    """The record's beginning as JSON; in Python's notation where it is nested too deep, or Parquet has more types."""
    try:
        return orjson.dumps(value)[: 4 * EXCERPT].decode(errors="replace")
    except TypeError:
        return repr(value)[:EXCERPT]
