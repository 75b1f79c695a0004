"""Reading under random records, layouts, orders and damage: nothing is lost in silence, and the accounting balances.

SHARDMILL_SOAK=1 (make soak) runs 100,000 random mutations instead of 2,000, and 10,000 odd records instead of 150.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from readkit import Read, array, lines, read, record
from shardmill.errors import DataError
from shardmill.reading.shapes import has_records_for_turns

SOAK = bool(os.environ.get("SHARDMILL_SOAK"))
MUTATIONS = 100_000 if SOAK else 2_000
ODD = 10_000 if SOAK else 150
SEED = int(os.environ.get("SHARDMILL_SEED", "1"))

modest = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

texts = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    ['"', "}", '}, {"id": "x"', "[", "\\", "\n", "\0", "null"]
)
asked = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    """Records that make a conversation, in several dialects."""
    role, content = draw(st.sampled_from([("from", "value"), ("role", "content")]))
    roles = st.sampled_from(["human", "gpt", "User", "assistant", "system"])
    turns = [{role: who, content: text} for who, text in draw(st.lists(st.tuples(roles, texts), max_size=4))]
    turns.insert(draw(st.integers(0, len(turns))), {role: "human", content: draw(asked)})
    field = draw(st.sampled_from(["conversations", "conversation", "messages", "items"]))
    made: dict[str, Any] = {field: turns}
    if draw(st.booleans()):
        made = {"id": draw(asked), **made}
    if draw(st.booleans()):
        made["extra"] = draw(st.none() | st.integers() | texts | st.lists(texts, max_size=2))
    return made


# What may stand where something else should: any JSON, with words that mean something among its keys and texts.
WORDS = """role from content value text type image_url user gpt tool tool_calls function_call function name arguments
parameters conversations messages system tools id"""
words = st.sampled_from(WORDS.split())
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | words | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | texts, inner, max_size=3),
    max_leaves=8,
)


RICH = {
    "id": "rich",
    "system": "Be kind.",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "name": "f", "tool_call_id": "c", "content": 2},
        {"from": "function_call", "value": '{"name": "f"}'},
    ],
}


@st.composite
def odd_records(draw: st.DrawFn) -> Any:
    """Records with a value or two, somewhere in them, replaced or put in."""
    made: Any = draw(records() | st.just(RICH).map(copy.deepcopy))
    for _ in range(draw(st.integers(1, 2))):
        holder, key = draw(st.sampled_from(list(places(made))))
        if draw(st.booleans()):
            holder[key] = draw(anything)
        elif isinstance(holder, dict):
            holder[draw(words)] = draw(anything)
        else:
            holder.insert(key, draw(anything))
    return made


def places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Every value inside `holder`, at any depth, as the dict or list that it is in and its key there."""
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        yield holder, key
        if isinstance(value, dict | list):
            yield from places(value)


def layouts(made: list[Any]) -> dict[str, bytes]:
    return {
        "lines": lines(made),
        "array": array(made),
        "indented": array(made, indent=2),
        "ascii": json.dumps(made).encode(),
        "concatenated": b"".join(json.dumps(each).encode() for each in made),
        "wrapped": b'{"data":' + array(made) + b"}",
        "utf-16": array(made).decode().encode("utf-16"),
        "gz": gzip.compress(lines(made)),
        "zst": zstandard.ZstdCompressor().compress(array(made)),
    }


def read_bytes(content: bytes, folder: Path, **options: Any) -> Read:
    path = folder / "data"
    path.write_bytes(content)
    return read(path, folder / "spool", **options)


def outcome(got: Read) -> list[tuple[str, str, Any, str | None]]:
    return [(each.conversation_id, each.source_id, each.messages, each.tools) for each in got.conversations]


@modest
@given(made=st.lists(records(), min_size=1, max_size=8))
def test_every_layout_gives_the_same(made: list[Any], tmp_path: Path) -> None:
    results = {name: read_bytes(content, tmp_path, bad_records="fail") for name, content in layouts(made).items()}
    first = results["lines"]
    assert first.counts.records == len(made)
    assert first.counts.rejected == 0
    for name, got in results.items():
        assert outcome(got) == outcome(first), name


@modest
@given(made=st.lists(records(), min_size=1, max_size=6), data=st.data())
def test_parquet_gives_the_same(made: list[Any], data: st.DataObject, tmp_path: Path) -> None:
    plain = [{key: value for key, value in each.items() if key != "extra"} for each in made]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(plain, schema=_schema(plain)), sink)
    assert outcome(read_bytes(sink.getvalue(), tmp_path)) == outcome(read_bytes(lines(plain), tmp_path))


@settings(modest, max_examples=ODD)
@given(odd=st.lists(odd_records() | anything.filter(lambda each: not isinstance(each, list)), min_size=1, max_size=4))
def test_any_value_in_any_place_costs_its_record_at_most(odd: list[Any], tmp_path: Path) -> None:
    """No record can break off the reading, or take its neighbours along."""
    assume(not any(has_records_for_turns(each) for each in odd))  # these are taken for records without their ends
    first, last = record("first", "question one", "answer one"), record("last", "question two", "answer two")
    got = read_bytes(lines([first, *odd, last]), tmp_path, bad_records="fail", dedupe=False, rejoin=False)
    assert [got.ids[0], got.ids[-1]] == ["first", "last"]
    assert got.counts.records == len(odd) + 2
    wrapped = read_bytes(b'{"data":' + array([first, *odd, last]) + b"}", tmp_path, dedupe=False, rejoin=False)
    assert outcome(wrapped) == outcome(got)


def _schema(made: list[Any]) -> pa.Schema:
    turn = pa.struct([(name, pa.string()) for name in ("from", "value", "role", "content")])
    fields = sorted({key for each in made for key in each} - {"id"})
    return pa.schema([("id", pa.string()), *((field, pa.list_(turn)) for field in fields)])


# Ids from few names, so that parts meet, repeat, miss and contradict one another.
@st.composite
def parts(draw: st.DrawFn) -> dict[str, Any]:
    start = draw(st.integers(0, 4))
    said = [draw(st.sampled_from(["", "x"])) + str(number) for number in range(start, start + draw(st.integers(0, 4)))]
    first = "human" if start % 2 == 0 else "gpt"
    return record(f"{draw(st.sampled_from('ab'))}_{start}", *said, first=first)


@modest
@given(made=st.lists(parts(), max_size=12), dedupe=st.booleans(), rejoin=st.booleans(), seed=st.integers(0, 9))
def test_order_does_not_matter(made: list[Any], dedupe: bool, rejoin: bool, seed: int, tmp_path: Path) -> None:
    shuffled = list(made)
    random.Random(seed).shuffle(shuffled)
    options = {"dedupe": dedupe, "rejoin": rejoin}
    one, other = read_bytes(lines(made), tmp_path, **options), read_bytes(lines(shuffled), tmp_path, **options)
    assert sorted(outcome(one)) == sorted(outcome(other))
    # Copies of one content may differ in what was dropped from them; the notes are those of the first.
    for dropped in ("leading_assistant_turns", "repeated_leading_turns", "blank_user_turns"):
        del one.counts.notes[dropped], other.counts.notes[dropped]
    for name in ("records", "joined", "duplicates", "conversations", "rejects", "notes"):
        assert getattr(one.counts, name) == getattr(other.counts, name), name
    if not dedupe:
        assert one.counts.duplicates == 0


@modest
@given(made=st.lists(records(), max_size=8), more=st.lists(records(), max_size=4))
def test_appending_moves_no_conversation(made: list[Any], more: list[Any], tmp_path: Path) -> None:
    before = [each.conversation_id for each in read_bytes(lines(made), tmp_path).conversations]
    after = [each.conversation_id for each in read_bytes(lines(made + more), tmp_path).conversations]
    assert after[: len(before)] == before


@modest
@given(said=st.lists(asked, min_size=3, max_size=12, unique=True), data=st.data())
def test_any_split_is_joined_again(said: list[str], data: st.DataObject, tmp_path: Path) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(said) - 1), max_size=4)))
    made: list[dict[str, Any]] = []
    for start, end in zip([0, *cuts], [*cuts, len(said)], strict=True):
        # Real files repeat the answer before. A part of that answer alone would have the same index as its repeat.
        repeat = int(start > 0 and start % 2 == 0 and len(made[-1]["conversations"]) > 1)
        first = "human" if (start - repeat) % 2 == 0 else "gpt"
        made.append(record(f"c_{start - repeat}", *said[start - repeat : end], first=first))
    got = read_bytes(lines(data.draw(st.permutations(made))), tmp_path)
    assert [[text for _, text in each] for each in got.texts] == [said]
    assert got.counts.joined == len(cuts)


PIECES = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\",
    b"\n",
    b"\0",
    b"\xff",
    b"\xe9",
    b"null",
    b"NaN",
    b'{"id": "',
    b"\\ud800",
    b"1e999",
    b"\xef\xbb\xbf",
]


def mutate(content: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(content) + 1)
        end = min(len(content), at + rng.choice([1, 1, 2, 8, 60]))
        kind = rng.randrange(6)
        if kind == 0:
            content = content[:at]
        elif kind == 1:
            content = content[:at] + content[end:]
        elif kind == 2:
            content = content[:at] + rng.choice(PIECES) + content[at:]
        elif kind == 3:
            content = content[:at] + rng.randbytes(end - at) + content[end:]
        elif kind == 4:
            content = content[:end] + content[at:]
        else:
            content = content[:at] + rng.choice(PIECES) + content[end:]
    return content


def test_random_mutations_give_no_traceback(tmp_path: Path) -> None:
    made = [record(f"a_{n}", f"q{n}", f"a{n}\u00e9 \U0001f986") for n in (0, 2, 5)]
    made += [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "tools": "[]", "id": n}
        for n in range(2)
    ]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(made[:3]), sink)
    bases = [*layouts(made).values(), sink.getvalue()]
    rng = random.Random(SEED)
    for number in range(MUTATIONS):
        content = mutate(rng.choice(bases), rng)
        options = {"dedupe": rng.random() < 0.5, "rejoin": rng.random() < 0.5}
        try:
            got = read_bytes(content, tmp_path, **options)
            try:
                strict = read_bytes(content, tmp_path, bad_records="fail", **options)
            except DataError as error:
                assert "broken" in str(error)
                assert set(got.reasons) & {"invalid_json", "cut_off", "damaged_file"}
            else:
                assert outcome(strict) == outcome(got)
        except Exception as error:  # noqa: BLE001 (any at all is what this looks for)
            pytest.fail(f"mutation {number} of seed {SEED}: {error!r} on {content!r}")


@pytest.mark.parametrize("layout", ["lines", "array", "indented", "concatenated", "wrapped"])
def test_damage_inside_one_record_costs_that_record_alone(layout: str, tmp_path: Path) -> None:
    """One byte changed inside a record: all records before and behind it are still there."""
    made = [record(f"r{n}", f"question {n}", f"answer {n}") for n in range(5)]
    whole = layouts(made)[layout]
    pieces = (
        [json.dumps(each, indent=2).encode() for each in made]
        if layout == "indented"
        else [json.dumps(each).encode() for each in made]
    )
    middle = pieces[2].replace(b"\n", b"\n  ") if layout == "indented" else pieces[2]
    start = whole.index(middle)
    rng = random.Random(SEED)
    for _ in range(MUTATIONS // 20):
        at = rng.randrange(start, start + len(middle))
        content = whole[:at] + rng.choice(PIECES) + whole[at + rng.randint(0, 1) :]
        got = read_bytes(content, tmp_path)
        kept = {text for each in got.texts for _, text in each}
        for n in (0, 1, 3, 4):
            assert f"question {n}" in kept, content
