"""The cases of ../shared/cases from 001 to 091, as far as reading decides them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from readkit import CASES, case, from_bytes
from shardmill.errors import DataError

PING = [("user", "ping"), ("assistant", "pong")]
QA = [("user", "q"), ("assistant", "a")]


def test_001_every_name_of_the_assistant(tmp_path: Path) -> None:
    got = case("001", tmp_path)
    assert got.texts == [
        [("user", f"{word}?"), ("assistant", str(n))] for n, word in enumerate(("one", "two", "three"), 1)
    ]
    assert got.counts.roles == {"human": 2, "user": 1, "chatgpt": 1, "bing": 1, "bard": 1}


def test_002_system_and_user_are_known(tmp_path: Path) -> None:
    got = case("002", tmp_path)
    assert [role for role, _ in got.texts[0]] == ["system", "user", "assistant", "user", "assistant"]


def test_004_unknown_role_is_rejected_by_name(tmp_path: Path) -> None:
    got = case("004", tmp_path)
    assert got.ids == ["ok_0"]
    assert got.rejects[0].source_id == "a"
    assert got.reasons == ["unknown_role"]
    assert "unknown_role=hummany" in got.rejects[0].detail


def test_006_and_011_no_user_turn(tmp_path: Path) -> None:
    assert case("006", tmp_path).reasons == ["no_user_turn"]
    got = case("011", tmp_path)
    assert (got.reasons, got.ids) == (["no_user_turn"], ["ok_0"])


def test_007_two_users_in_a_row_stay_two(tmp_path: Path) -> None:
    got = case("007", tmp_path)
    assert got.texts == [[("user", "First thought."), ("user", "Also this."), ("assistant", "Noted.")]]
    assert got.counts.notes["consecutive_user"] == 1


def test_009_a_last_user_turn_is_kept(tmp_path: Path) -> None:
    got = case("009", tmp_path)
    assert got.texts[0][-1] == ("user", "q2 never answered")
    assert got.counts.notes["ends_with_user"] == 1


def test_014_tool_turns(tmp_path: Path) -> None:
    got = case("014", tmp_path)
    messages = got.conversations[0].messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1].as_template() == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
    }
    assert messages[2].as_template() == {"role": "tool", "content": '{"temp": -3}'}
    assert json.loads(got.conversations[0].tools or "") == [{"name": "weather", "parameters": {"type": "object"}}]
    assert got.counts.notes["with_tools"] == 1


def test_016_bad_tools(tmp_path: Path) -> None:
    assert case("016", tmp_path).reasons == ["bad_tools", "bad_tools"]


def test_020_null_is_no_text(tmp_path: Path) -> None:
    got = case("020", tmp_path)
    assert (got.ids, got.reasons) == (["a_0"], ["empty_user"])
    assert got.texts == [[("user", "q"), ("assistant", "")]]
    assert got.counts.notes["blank_assistant_turns"] == 1


def test_022_blank_texts(tmp_path: Path) -> None:
    got = case("022", tmp_path)
    assert (got.ids, got.reasons) == (["a_0"], ["empty_user"])
    assert got.texts[0][1] == ("assistant", " \n\t\u00a0\u200b")
    assert got.counts.notes["blank_assistant_turns"] == 1


def test_024_content_parts(tmp_path: Path) -> None:
    got = case("024", tmp_path)
    assert got.texts == [[("user", "Hello there"), ("assistant", "Hi")]]
    assert got.reasons == ["non_text_part"]
    assert "image_url" in got.rejects[0].detail


def test_025_text_and_parts_in_one_file(tmp_path: Path) -> None:
    got = case("025", tmp_path)
    assert got.texts == [[("user", "hi"), ("assistant", "hi")]]
    assert (got.counts.records, got.counts.duplicates) == (2, 1)


@pytest.mark.parametrize(("number", "count"), [("027", 1), ("029", 2), ("081", 2), ("089", 3), ("091", 2)])
def test_027_029_081_089_091_all_read_as_the_same_conversation(number: str, count: int, tmp_path: Path) -> None:
    got = case(number, tmp_path)
    assert got.texts == [QA]
    assert (got.counts.records, got.counts.duplicates) == (count, count - 1)
    every = case(number, tmp_path, dedupe=False)
    assert every.texts == [QA] * count


def test_030_shapes_that_are_no_conversation(tmp_path: Path) -> None:
    got = case("030", tmp_path)
    assert got.ids == ["ok_0"]
    assert got.reasons == [
        "turn_not_an_object",
        "turns_not_a_list",
        "turns_not_a_list",
        "turn_not_an_object",
        "not_an_object",
    ]


def test_040_an_empty_record_does_not_hide_the_one_with_its_id(tmp_path: Path) -> None:
    got = case("040", tmp_path)
    assert got.reasons == ["empty_conversation"]
    assert got.texts == [
        [("user", "long question"), ("assistant", "long answer"), ("user", "next"), ("assistant", "next answer")]
    ]
    assert got.counts.joined == 1
    apart = case("040", tmp_path, rejoin=False)
    assert apart.ids == ["Ab3_0", "Ab3_2"]


def test_042_same_content_under_another_id(tmp_path: Path) -> None:
    got = case("042", tmp_path)
    assert (got.ids, got.counts.duplicates) == (["x_0"], 1)
    assert sorted(case("042", tmp_path, dedupe=False).ids) == ["x_0", "y_0"]


def test_043_parts_are_rejoined(tmp_path: Path) -> None:
    got = case("043", tmp_path)
    assert [text for _, text in got.texts[0]] == ["q1", "a1", "q2", "a2", "q3", "a3"]
    assert (got.ids, got.counts.joined, got.counts.notes["overlaps_dropped"]) == (["C9_0"], 1, 1)
    apart = case("043", tmp_path, rejoin=False)
    assert [[text for _, text in each] for each in apart.texts] == [["q1", "a1", "q2", "a2"], ["q3", "a3"]]
    assert apart.counts.notes["leading_assistant_turns"] == 1


def test_045_ids_are_data(tmp_path: Path) -> None:
    got = case("045", tmp_path, dedupe=False)
    assert got.ids[:2] == ["../../etc/x", "a/b c+d%20e?f#g"]
    assert got.ids[2] == "ключ-🦆"
    assert len(got.ids[3]) > 2000


def test_051_a_real_pair_is_one_character(tmp_path: Path) -> None:
    got = case("051", tmp_path)
    assert got.texts[0][0] == ("user", "duck \U0001f986")
    assert got.counts.notes["lone_surrogates"] == 0


def test_052_nothing_is_lost_behind_nul(tmp_path: Path) -> None:
    assert case("052", tmp_path).texts[0][0] == ("user", "before\0after")


@pytest.mark.parametrize("number", ["054", "056"])
def test_054_056_bom_and_utf16(number: str, tmp_path: Path) -> None:
    got = case(number, tmp_path)
    assert got.texts == [PING]
    assert got.conversations[0].place.byte_offset == (4 if number == "054" else None)


def test_057_one_latin1_byte_costs_one_record(tmp_path: Path) -> None:
    for bad_records in ("reject", "fail"):
        got = case("057", tmp_path, bad_records=bad_records)
        assert (got.reasons, got.ids) == (["invalid_utf8"], ["ok_0"])
        assert got.rejects[0].place.record == 1


def test_059_only_newlines_end_lines(tmp_path: Path) -> None:
    got = case("059", tmp_path)
    assert got.texts == [[("user", "line\u2028sep"), ("assistant", "next\x85line\u2029para")], PING]


@pytest.mark.parametrize(("number", "count"), [("061", 2), ("062", 3)])
def test_061_062_texts_are_not_altered(number: str, count: int, tmp_path: Path) -> None:
    got = case(number, tmp_path)
    source = json.loads((next(CASES.glob(f"{number}-*")) / "input.json").read_text())
    assert got.counts.conversations == count
    assert [[text for _, text in each] for each in got.texts] == [
        [turn["value"] for turn in each["conversations"]] for each in source
    ]


def test_071_a_cut_off_last_line(tmp_path: Path) -> None:
    got = case("071", tmp_path)
    assert (got.ids, got.reasons) == (["ok_0"], ["cut_off"])
    assert got.rejects[0].place.record == 2
    with pytest.raises(
        DataError, match=r"line 2, record 2: the file is cut off inside a string; 1 records come before"
    ):
        case("071", tmp_path, bad_records="fail")


def test_073_074_076_values_one_after_another(tmp_path: Path) -> None:
    assert case("073", tmp_path, dedupe=False).ids == ["ok_0", "b", "c"]
    assert case("074", tmp_path).ids == ["ok_0", "b"]
    assert case("076", tmp_path).ids == ["ok_0", "b"]


def test_078_nan_and_infinity_are_null(tmp_path: Path) -> None:
    got = case("078", tmp_path, dedupe=False)
    assert got.ids == ["a", "b", "ok_0"]
    assert got.counts.notes["nan_values"] == 2


@pytest.mark.parametrize(
    ("file", "reasons"),
    [
        ("emptyarray.json", []),
        ("emptyobj.jsonl", ["no_conversations"]),
        ("null.json", ["not_an_object"]),
        ("space.jsonl", []),
        ("zero.json", []),
        ("zero.jsonl", []),
    ],
)
def test_079_empty_files(file: str, reasons: list[str], tmp_path: Path) -> None:
    for bad_records in ("reject", "fail"):
        got = case("079", tmp_path, file, bad_records=bad_records)
        assert (got.conversations, got.reasons) == ([], reasons)


def test_083_zstd_frames(tmp_path: Path) -> None:
    assert case("083", tmp_path, "ok.jsonl.zst").ids == ["ok_0"]
    assert case("083", tmp_path, "twoframes.jsonl.zst").ids == ["ok_0", "b"]
    got = case("083", tmp_path, "truncated.jsonl.zst")
    assert got.reasons == ["cut_off"]
    with pytest.raises(DataError, match="cut off: its zstd data end too early"):
        case("083", tmp_path, "truncated.jsonl.zst", bad_records="fail")


def test_084_deep_nesting_costs_one_record(tmp_path: Path) -> None:
    for bad_records in ("reject", "fail"):
        got = case("084", tmp_path, bad_records=bad_records)
        assert (got.ids, got.reasons) == (["ok_0", "z"], ["too_deep"])


def test_086_a_line_of_40_mb(tmp_path: Path) -> None:
    if not CASES.is_dir():
        pytest.skip(f"the cases are not at {CASES}")
    script = next(CASES.glob("086-*")) / "gen.py"
    made = subprocess.run([sys.executable, script, "40"], capture_output=True, check=True)
    got = from_bytes(made.stdout, tmp_path, dedupe=False)
    assert got.ids == ["ok_0", "huge", "z"]
    assert len(got.texts[1][0][1]) == 40_000_000


def test_088_dates_stay_texts(tmp_path: Path) -> None:
    got = case("088", tmp_path)
    assert got.ids == ["2023-01-01", "2023-01-02"]
    assert got.texts[0][0] == ("user", "2024-05-06")
