"""Reading: what becomes of every kind of file, record and turn."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from readkit import Read, array, from_bytes, from_records, lines, read, record, turns
from shardmill.errors import DataError
from shardmill.reading import dataset_digest, dataset_files

PING = [("user", "ping"), ("assistant", "pong")]
QA = [("user", "q"), ("assistant", "a")]


# Formats

RECORDS = [record(f"r{n}", f"question {n}", f'answer {n} with }}, {{"id" in it') for n in range(7)]
WANTED = [[("user", f"question {n}"), ("assistant", f'answer {n} with }}, {{"id" in it')] for n in range(7)]


def as_parquet(records: list[Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), sink, row_group_size=3)
    return sink.getvalue()


FORMATS = {
    "array": array(RECORDS),
    "indented array": array(RECORDS, indent=2),
    "lines": lines(RECORDS),
    "lines without the last newline": lines(RECORDS).rstrip(),
    "crlf": lines(RECORDS).replace(b"\n", b"\r\n"),
    "indented array with crlf": array(RECORDS, indent=1).replace(b"\n", b"\r\n"),
    "blank lines": b"\n\n" + lines(RECORDS).replace(b"\n", b"\n \n"),
    "concatenated": b"".join(json.dumps(each).encode() for each in RECORDS),
    "indented values": b"\n".join(json.dumps(each, indent=2).encode() for each in RECORDS),
    "two arrays": array(RECORDS[:3]) + b"\n" + array(RECORDS[3:]),
    "lines, then an array": lines(RECORDS[:3]) + array(RECORDS[3:]),
    "array, then lines": array(RECORDS[:3]) + b"\n" + lines(RECORDS[3:]),
    "wrapped": b'{"version": 1, "data": ' + array(RECORDS) + b', "more": [1, 2, {"x": 3}]}',
    "wrapped twice": b'{"train": '
    + array(RECORDS[:4], indent=1)
    + b', "none": [], "test": '
    + array(RECORDS[4:])
    + b"}",
    "bom": b"\xef\xbb\xbf" + array(RECORDS),
    "bom before lines": b"\xef\xbb\xbf" + lines(RECORDS),
    "two files with a bom": b"\xef\xbb\xbf" + lines(RECORDS[:3]) + b"\xef\xbb\xbf" + lines(RECORDS[3:]),
    "utf-16": lines(RECORDS).decode().encode("utf-16"),
    "utf-16 without bom": array(RECORDS).decode().encode("utf-16-be"),
    "utf-32": array(RECORDS).decode().encode("utf-32"),
    "parquet": as_parquet(RECORDS),
}


@pytest.mark.parametrize("packed", ["plain", "gz", "two gz members", "zst", "two zst frames"])
@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_told_by_their_content(name: str, packed: str, tmp_path: Path) -> None:
    content = FORMATS[name]
    if packed != "plain" and name == "parquet":
        pytest.skip("Parquet is compressed inside")
    half = len(content) // 2
    compress = gzip.compress if "gz" in packed else zstandard.ZstdCompressor().compress
    if packed.startswith("two"):
        content = compress(content[:half]) + compress(content[half:])
    elif packed != "plain":
        content = compress(content)
    got = from_bytes(content, tmp_path, "misnamed.csv", bad_records="fail")
    assert got.texts == WANTED
    assert [each.place.record for each in got.conversations] == list(range(1, 8))
    if packed == "plain" and "utf" not in name and name != "parquet":
        for each, wanted in zip(got.conversations, RECORDS, strict=True):
            assert each.place.byte_offset is not None
            found, _ = json.JSONDecoder().raw_decode(content[each.place.byte_offset :].decode())
            assert found == wanted


def test_a_record_with_other_records_in_a_field_is_no_wrapper(tmp_path: Path) -> None:
    got = from_records([record("a", "q", "a", history=[record("x", "old", "older")])], tmp_path)
    assert got.texts == [QA]
    got = from_records([{"history": [record("x", "old", "older")], **record("a", "q", "a")}], tmp_path)
    assert got.texts == [QA]


def test_bad_first_elements_do_not_hide_an_array_of_records(tmp_path: Path) -> None:
    for before in ([None], ["a", 3], [{}], [[]]):
        got = from_bytes(b'{"data": ' + array([*before, *RECORDS]) + b"}", tmp_path)
        assert (got.texts, got.counts.rejected) == (WANTED, len(before))
        got = from_bytes(array([*before, *RECORDS]), tmp_path)
        assert (got.texts, got.counts.rejected) == (WANTED, len(before))


def test_bare_lists_of_turns(tmp_path: Path) -> None:
    assert from_bytes(array(turns("q", "a")), tmp_path).texts == [QA]
    assert from_bytes(array([turns("q", "a"), turns("ping", "pong")]), tmp_path).texts == [QA, PING]
    assert from_bytes(lines([turns("q", "a"), turns("ping", "pong")]), tmp_path).texts == [QA, PING]


def test_several_files_and_globs(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_bytes(array(RECORDS[:2]))
    (tmp_path / "a [1].jsonl").write_bytes(lines(RECORDS[2:4]))
    (tmp_path / "c").write_bytes(as_parquet(RECORDS[4:]))
    files = dataset_files(["c", "b.json", "*.jso*", "a [1].jsonl"], tmp_path)
    assert [file.name for file in files] == ["a [1].jsonl", "b.json", "c"]
    got = read(files, tmp_path / "spool", base=tmp_path)
    assert [(each.place.file, each.place.record) for each in got.conversations] == [
        *[("a [1].jsonl", 1), ("a [1].jsonl", 2), ("b.json", 1), ("b.json", 2), ("c", 1), ("c", 2), ("c", 3)]
    ]
    assert dataset_digest(files) == dataset_digest(reversed(files)) != dataset_digest(files[:2])
    for missing in ("d.json", "*.zip"):
        with pytest.raises(DataError, match=r"dataset\.path"):
            dataset_files(missing, tmp_path)


def test_parquet_dialects(tmp_path: Path) -> None:
    rows: list[Any] = [
        {
            "id": 7,
            "conversations": [
                {"from": "human", "value": "q", "role": None},
                {"from": "gpt", "value": "a", "role": None},
            ],
        },
        {
            "id": 8,
            "conversations": [
                {"from": None, "value": "ping", "role": "user"},
                {"from": None, "value": "pong", "role": "bot"},
            ],
        },
        {"id": 9, "conversations": None},
    ]
    got = from_bytes(as_parquet(rows), tmp_path)
    assert (got.texts, got.ids, got.reasons) == ([QA, PING], ["7", "8"], ["no_conversations"])
    got = from_bytes(as_parquet([{"messages": json.dumps(turns("q", "a"))}, {"messages": "q: a"}]), tmp_path)
    assert (got.texts, got.reasons) == ([QA], ["turns_not_a_list"])
    numbered = pa.table({"id": [1.5, float("nan")], "messages": [turns("q", "a"), turns("ping", "pong")]})
    sink = io.BytesIO()
    pq.write_table(numbered, sink)
    got = from_bytes(sink.getvalue(), tmp_path)
    assert got.ids == ["1.5", got.conversations[1].conversation_id], "NaN, as pandas writes a missing number, is no id"
    whole = as_parquet(RECORDS)
    got = from_bytes(whole[:-20], tmp_path)
    assert got.reasons == ["damaged_file"]
    with pytest.raises(DataError, match="Parquet"):
        from_bytes(whole[:-20], tmp_path, bad_records="fail")


# Dialects


@pytest.mark.parametrize("key", ["conversations", "conversation", "messages", "items", "Messages"])
def test_fields_of_turns(key: str, tmp_path: Path) -> None:
    assert from_records([{key: turns("q", "a")}], tmp_path).texts == [QA]


@pytest.mark.parametrize("other", [{"items": 3}, {"messages": ""}, {"messages": "all of it"}, {"conversation": "c-1"}])
def test_a_field_of_turns_that_is_something_else_beside_the_turns(other: dict[str, Any], tmp_path: Path) -> None:
    given = {"conversations": turns("q", "a")} if "conversation" not in other else {"messages": turns("q", "a")}
    assert from_records([{**other, **given}], tmp_path).texts == [QA]
    assert from_records([other], tmp_path).reasons == ["turns_not_a_list"]


@pytest.mark.parametrize(
    ("written", "role"),
    [
        *[(name, "user") for name in ("human", "HUMAN", " user ", "Prompter")],
        *[(name, "assistant") for name in ("gpt", "ChatGPT", "bing", "bard", "Bot", "assistant")],
        *[(name, "system") for name in ("system", "Developer")],
        *[(name, "tool") for name in ("tool", "function", "observation", "Tool Response")],
    ],
)
def test_roles(written: str, role: str, tmp_path: Path) -> None:
    got = from_records([{"messages": [*turns("q"), {"role": written, "content": "x"}]}], tmp_path)
    assert got.texts[0][-1] == (role, "x")


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"from": "narrator", "value": "x"}, "unknown_role"),
        ({"from": "", "value": "x"}, "unknown_role"),
        ({"from": "human", "role": "assistant", "value": "x"}, "unknown_role"),
        ({"value": "x"}, "missing_role"),
        ({"from": None, "value": "x"}, "missing_role"),
        ({"from": 3, "value": "x"}, "missing_role"),
        ({"from": "human", "value": True}, "bad_content"),
        ({"from": "human", "value": {"x": 1}}, "bad_content"),
        ({"from": "human", "value": [1]}, "bad_content"),
        ({"from": "human", "value": [{"type": "text", "text": 5}]}, "bad_content"),
        ({"from": "human", "value": [{"type": ["text"], "text": "x"}]}, "bad_content"),
        ({"from": "human", "value": [{"type": "input_audio"}]}, "non_text_part"),
        ({"from": "function_call", "value": "weather(Oslo)"}, "bad_tool_call"),
        ({"from": "function_call", "value": '{"arguments": {}}'}, "bad_tool_call"),
        ([], "turn_not_an_object"),
    ],
)
def test_turns_that_make_a_reject(turn: Any, reason: str, tmp_path: Path) -> None:
    got = from_records([{"id": "x", "messages": [*turns("q", "a"), turn]}], tmp_path, bad_records="fail")
    assert (got.reasons, got.rejects[0].source_id) == ([reason], "x")


def test_numbers_are_texts_and_ids(tmp_path: Path) -> None:
    got = from_records(
        [{"id": 42, "messages": [{"role": "user", "content": 7}, {"role": "bot", "content": 1.5}]}], tmp_path
    )
    assert (got.ids, got.texts) == (["42"], [[("user", "7"), ("assistant", "1.5")]])


def test_a_record_without_an_id_has_its_contents(tmp_path: Path) -> None:
    got = from_records([record(None, "q", "a"), record("", "ping", "pong"), record("z", "q", "a")], tmp_path)
    assert got.ids == ["z", got.conversations[1].conversation_id]


def test_system_fields(tmp_path: Path) -> None:
    got = from_records(
        [
            record("a", "q", system="Be kind."),
            {"system": "Be kind.", "messages": [{"role": "system", "content": "Be kind."}, *turns("q2")]},
            {"system": "Be kind.", "messages": [{"role": "system", "content": "Be short."}, *turns("q3")]},
            record("d", "q4", system=None),
            record("e", "q5", system=" "),
            {"messages": [*turns("q6", "a"), {"role": "system", "content": "Stop."}, *turns("q7")]},
        ],
        tmp_path,
    )
    assert [each[0] for each in got.texts] == [
        *[
            ("system", "Be kind."),
            ("system", "Be kind."),
            ("system", "Be kind.\n\nBe short."),
            ("user", "q4"),
            ("user", "q5"),
        ],
        ("user", "q6"),
    ]
    assert got.texts[5][2] == ("system", "Stop.")
    assert (got.counts.notes["system_merged"], got.counts.notes["system_in_the_middle"]) == (1, 1)


def test_tool_calls_of_openai(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "2"},
    ]
    got = from_records([{"messages": messages, "tools": [{"type": "function"}]}], tmp_path)
    _, calling, answering = got.conversations[0].messages
    assert calling.as_template()["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert answering.as_template() == {"role": "tool", "content": "2", "name": "f", "tool_call_id": "c1"}


def test_blank_user_turns_go_and_leading_assistants(tmp_path: Path) -> None:
    got = from_records([record("a", "hello", "q", "a", "", "b", "q2", first="gpt")], tmp_path)
    assert got.texts == [[("user", "q"), ("assistant", "a"), ("assistant", "b"), ("user", "q2")]]
    got = from_records([record("a", "q", "a", "\u200b", "b", "q2")], tmp_path)
    assert got.texts == [[("user", "q"), ("assistant", "a"), ("assistant", "b"), ("user", "q2")]]
    assert got.counts.notes["blank_user_turns"] == 1


# Text


def test_lone_surrogates_become_one_mark_each(tmp_path: Path) -> None:
    text = rb'{"messages":[{"role":"user","content":"\ud83e x \udd86\ud83e\udd86 \\ud83e \"\ud83e\ud83e\udd86"}]}'
    got = from_bytes(text, tmp_path)
    assert got.texts == [[("user", '\ufffd x \ufffd\U0001f986 \\ud83e "\ufffd\U0001f986')]]
    assert got.counts.notes["lone_surrogates"] == 3
    got = from_bytes(
        '{"messages":[{"role":"user","content":"\ud83e \ud83e\udd86"}]}'.encode("utf-8", "surrogatepass"), tmp_path
    )
    assert got.texts == [[("user", "\ufffd \U0001f986")]]
    assert got.counts.notes["lone_surrogates"] == 1
    text16 = '{"messages":[{"role":"user","content":"\ud83e!"}]}'.encode("utf-16", "surrogatepass")
    got = from_bytes(text16, tmp_path)
    assert (got.texts, got.counts.notes["lone_surrogates"]) == ([[("user", "\ufffd!")]], 1)


def test_texts_stay_as_they_are(tmp_path: Path) -> None:
    text = " \t\r\n\x00\x01\x1f\x7f\u200b\u200d\u202e\ufeff\u0301 x \n"
    got = from_records([record("a", text, text)], tmp_path)
    assert got.texts == [[("user", text), ("assistant", text)]]


def test_words_like_nan_in_texts_stay(tmp_path: Path) -> None:
    got = from_bytes(b'{"x": [NaN, -Infinity], "messages":[{"role":"user","content":"NaN, \\"Infinity"}]}', tmp_path)
    assert got.texts == [[("user", 'NaN, "Infinity')]]
    assert got.counts.notes["nan_values"] == 2


def test_deep_but_readable_records_reject_without_a_traceback(tmp_path: Path) -> None:
    deep: Any = "x"
    for _ in range(400):
        deep = [deep]
    for bad in (
        {"deep": deep},
        record("a", "q", tools=[{"deep": deep}]),
        {"messages": [{"from": deep, "value": deep}]},
    ):
        assert from_records([bad], tmp_path).counts.rejected == 1


# Broken syntax

BROKEN = {
    "no quote": b'{"id": "r3", "conversations": [{"from": "human", "value": "que}, {"from": "gpt", "value": "a"}]}',
    "no closing": b'{"id": "r3", "conversations": [{"from": "human", "value": "question"}',
    "bad word": b'{"id": "r3", "x": tru, "conversations": []}',
    "trailing comma": b'{"id": "r3", "conversations": [],}',
    "control character": b'{"id": "r3", "conversations": [{"from": "human", "value": "a\tb"}]}',
    "bad escape": rb'{"id": "r3", "conversations": [{"from": "human", "value": "a\x62"}]}',
    "single quotes": b"{'id': 'r3', 'conversations': []}",
    "half": b'{"id": "r3", "conversations": [{"from": "hum',
    "half a key": b'{"id": "r3", "conv',
    "rubbish": b"%PDF-1.4 \xff\xfe\x00 rubbish",
}


@pytest.mark.parametrize("layout", ["lines", "array", "indented array", "wrapped", "concatenated"])
@pytest.mark.parametrize("kind", BROKEN)
def test_whole_records_before_and_after_a_broken_one_are_kept(kind: str, layout: str, tmp_path: Path) -> None:
    good = [json.dumps(each, indent=2 if layout == "indented array" else None).encode() for each in RECORDS]
    pieces = [*good[:3], BROKEN[kind], *good[4:]]
    content = {
        "lines": b"\n".join(pieces) + b"\n",
        "array": b"[" + b", ".join(pieces) + b"]",
        "indented array": b"[\n" + b",\n".join(pieces) + b"\n]\n",
        "wrapped": b'{"data": [' + b",".join(pieces) + b"]}",
        "concatenated": b"".join(pieces),
    }[layout]
    got = from_bytes(content, tmp_path)
    assert got.texts == WANTED[:3] + WANTED[4:]
    assert got.counts.rejected >= 1
    first = got.rejects[0]
    assert (first.reason, first.place.record) == ("invalid_json", 4)
    assert first.place.byte_offset is not None
    assert content[first.place.byte_offset :].startswith(BROKEN[kind])
    assert first.excerpt.startswith(BROKEN[kind][:20].decode(errors="replace"))
    assert got.counts.records == 7
    with pytest.raises(DataError) as stopped:
        from_bytes(content, tmp_path, bad_records="fail")
    assert f"byte {first.place.byte_offset:,}, line " in str(stopped.value)
    assert "record 4: " in str(stopped.value)
    assert "3 records come before it" in str(stopped.value)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("parquet", "lines, then an array")])
def test_every_cut_says_so_or_loses_nothing(name: str, tmp_path: Path) -> None:
    content = FORMATS[name]
    for cut in range(1, len(content), max(1, len(content) // 60)):
        got = from_bytes(content[:cut], tmp_path)
        assert got.texts == WANTED[: len(got.texts)]
        assert len(got.texts) >= len(WANTED) * cut // len(content) - 1
        cut_off = [reject for reject in got.rejects if reject.reason == "cut_off"]
        assert len(got.rejects) == len(cut_off) <= 1 or "bom" in name or "utf" in name or cut < 12
        if not cut_off and len(got.rejects) == 0 and ("array" in name or "wrapped" in name):
            assert len(got.texts) in (3, 7), "an array that doesn't end is no whole file"


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor(write_checksum=True).compress])
def test_a_cut_or_damaged_compressed_file_keeps_what_came_before(compress: Any, tmp_path: Path) -> None:
    many = [record(f"r{n}", os.urandom(40).hex(), "a") for n in range(4000)]
    packed = compress(lines(many))
    got = from_bytes(packed[: len(packed) // 2], tmp_path)
    assert 0 < got.counts.conversations < 4000
    assert got.reasons == ["cut_off"]
    assert "data end too early" in got.rejects[0].detail
    middle = len(packed) * 3 // 4
    damaged = packed[:middle] + bytes(64) + packed[middle + 64 :]
    got = from_bytes(damaged, tmp_path)
    assert got.counts.conversations < 4000
    assert got.reasons[-1] == "damaged_file"


def test_commas_that_are_too_many_or_too_few(tmp_path: Path) -> None:
    good = [json.dumps(each).encode() for each in RECORDS]
    assert from_bytes(b"[" + b",".join(good) + b",]", tmp_path).texts == WANTED
    assert from_bytes(b"[" + b" ".join(good) + b"]", tmp_path).texts == WANTED
    assert from_bytes(b"[" + b",,".join(good) + b"]", tmp_path).texts == WANTED
    assert from_bytes(b",\n".join(good), tmp_path).texts == WANTED
    with pytest.raises(DataError, match="a comma is missing"):
        from_bytes(b"[" + b" ".join(good) + b"]", tmp_path, bad_records="fail")


def test_unclosed_brackets_take_no_forever(tmp_path: Path) -> None:
    good = json.dumps(record("r", "q", "a")).encode()
    for content in (b'{"a":' * 50_000, b'[{"a":' * 50_000, b'{"' * 100_000, b"[" * 500_000, b'"' * 500_000):
        assert from_bytes(content, tmp_path).counts.conversations == 0
    for content in (b"[" + (good + b",[") * 2_000, (good + b'{"') * 2_000):
        assert from_bytes(content, tmp_path, dedupe=False).counts.conversations == 2_000


# Rejoining and duplicates


def joined(tmp_path: Path, records: list[Any], **options: Any) -> Read:
    return from_records(records, tmp_path, **options)


def test_parts_need_not_be_neighbours_nor_in_one_file(tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_bytes(lines([record("z", "other", "x"), record("c_3", "a2", "q3", "a3", first="gpt")]))
    second.write_bytes(
        lines([record("c_5", "a3", "q4", first="gpt"), record("y", "more", "x"), record("c_0", "q1", "a1", "q2", "a2")])
    )
    got = read([first, second], tmp_path / "spool")
    assert got.ids == ["z", "y", "c_0"]
    assert [text for _, text in got.texts[2]] == ["q1", "a1", "q2", "a2", "q3", "a3", "q4"]
    assert got.counts.joined == 2


@pytest.mark.parametrize(
    ("later", "note"),
    [
        (record("c_3", "other", "q3", "a3", first="gpt"), "mismatched_parts"),
        (record("c_2", "q3", "a3"), "mismatched_parts"),
        (record("c_6", "a2", "q3", "a3", first="gpt"), "gaps"),
        (record("c_3", "a2", "q3", first="gpt", system="other"), "mismatched_parts"),
    ],
)
def test_a_gap_or_a_mismatch_keeps_parts_apart(later: Any, note: str, tmp_path: Path) -> None:
    got = joined(tmp_path, [record("c_0", "q1", "a1", "q2", "a2"), later])
    assert (got.counts.conversations, got.counts.joined, got.counts.notes[note]) == (2, 0, 1)


def test_records_that_are_only_numbered_stay_apart(tmp_path: Path) -> None:
    assert joined(tmp_path, [record(f"item_{n}", f"prompt {n}") for n in range(6)]).counts.joined == 0
    assert joined(tmp_path, [record(f"item_{n}", f"prompt {n}", "yes") for n in range(6)]).counts.joined == 0
    assert joined(tmp_path, [record(f"item_{n}", f"prompt {n}", "yes") for n in (0, 2, 3)]).counts.joined == 0


def test_a_whole_dataset_that_is_numbered_behind_one_word(tmp_path: Path) -> None:
    """It takes no time and no memory, and is not noted as a thousand oddities; a split among so many is joined."""
    numbered = [record(f"item_{n}", f"prompt {n}", "yes") for n in range(1500)]
    got = joined(tmp_path, numbered)
    assert (got.counts.conversations, got.counts.joined) == (1500, 0)
    assert not got.counts.notes.keys() & {"gaps", "mismatched_parts", "ambiguous_parts"}
    parts = [record(f"long_{2 * n}", f"q{n}", f"a{n}") for n in range(1200)]
    assert joined(tmp_path, parts).counts.joined == 1199


def test_parts_that_fit_two_others_stay_apart(tmp_path: Path) -> None:
    parts = [
        record("c_0", "q1", "a1"),
        record("c_1", "a1", "q2", "x", first="gpt"),
        record("c_1", "a1", "q2", "y", first="gpt"),
    ]
    got = joined(tmp_path, parts)
    assert (got.counts.conversations, got.counts.joined, got.counts.notes["ambiguous_parts"]) == (3, 0, 1)


def test_one_id_with_two_contents_stays_two(tmp_path: Path) -> None:
    got = joined(tmp_path, [record("c_0", "q1", "a1"), record("c_0", "q2", "a2")])
    assert got.ids == ["c_0", "c_0"]


def test_a_dataset_twice_is_the_dataset_once(tmp_path: Path) -> None:
    parts = [record("c_0", "q1", "a1"), record("c_1", "a1", "q2", "a2", first="gpt"), record("d", "q", "a")]
    got = joined(tmp_path, parts + parts)
    assert (got.counts.conversations, got.counts.joined, got.counts.duplicates) == (2, 1, 3)
    twice = joined(tmp_path, parts + parts, dedupe=False)
    assert (twice.counts.conversations, twice.counts.joined) == (4, 2)
    once = {each.conversation_id for each in got.conversations}
    assert once < {each.conversation_id for each in twice.conversations}


def test_duplicates_are_told_after_joining(tmp_path: Path) -> None:
    got = joined(
        tmp_path,
        [
            record("c_0", "q1", "a1"),
            record("c_2", "q2", "a2"),
            record("whole", "q1", "a1", "q2", "a2"),
            record("e", "q1", "a1"),
        ],
    )
    assert (got.ids, got.counts.joined, got.counts.duplicates) == (["c_0", "e"], 1, 1)


def test_an_answer_alone_is_read_when_its_question_is_joined(tmp_path: Path) -> None:
    got = joined(
        tmp_path,
        [record("c_3", "a2", first="gpt"), record("c_0", "q1", "a1", "q2", "a2"), record("c_9", "a", first="gpt")],
    )
    assert (got.counts.joined, got.reasons) == (1, ["no_user_turn"])
    assert got.rejects[0].source_id == "c_9"


# Memory


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    with path.open("wb") as stream:
        for block in range(60):
            stream.write(
                lines(record(f"{block}-{n}_0", f"{block} {n} " + "word " * 400, "x" * 2000) for n in range(500))
            )
    script = (
        "import resource, sys, pathlib\n"
        "from shardmill.reading import Reader\n"
        "import shardmill.reading.resolve\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "count = sum(1 for _ in Reader([pathlib.Path(sys.argv[1])], pathlib.Path(sys.argv[2])).conversations())\n"
        "print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, path, tmp_path / "spool"], capture_output=True, text=True, check=True
    )
    count, grown = map(int, done.stdout.split())
    assert count == 30_000
    assert grown < 100, f"{grown} MiB for a file of {path.stat().st_size >> 20} MiB"


def test_what_is_asked_for_is_what_is_imported() -> None:
    script = "import sys, shardmill.reading; print({'numpy', 'pyarrow', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
