"""The sample dataset holds what its README says: judged from the JSON alone, without shardmill's own reader."""

import json
import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from shardmill.reading.reasons import RejectReason

SAMPLE = Path(__file__).parents[1] / "config" / "sample"
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
}
TOOL_ROLES = {"function_call", "observation"}
SCRIPTS = {"LATIN", "CYRILLIC", "GREEK", "ARABIC", "DEVANAGARI", "CJK", "HIRAGANA", "KATAKANA", "HANGUL"}
# Letters or words that no other language of the sample has, for the languages in Latin script.
MARKS = {
    "German": "„seit“",
    "French": "l'église",
    "Spanish": "¿",
    "Portuguese": "“por que”|pôr do sol",
    "Italian": "Scrivi due frasi|senza panna",
    "Polish": "po polsku",
    "Turkish": "ı",
    "Dutch": "fiets",
    "Vietnamese": "[ạảậốộ]",
}

Turn: TypeAlias = tuple[str, str | None]
Read: TypeAlias = tuple[dict[str, list[Turn]], dict[str, list[str]]]


def text_of(value: Any) -> str | None:
    """A turn's text; content parts are joined. Raises ValueError for a part that is not text."""
    if isinstance(value, list):
        if any(part["type"] != "text" for part in value):
            raise ValueError("non_text_part")
        return "".join(part["text"] for part in value)
    assert value is None or isinstance(value, str)
    return value


def is_blank(text: str | None) -> bool:
    return text is None or all(c.isspace() or unicodedata.category(c) == "Cf" for c in text)


def turns_of(record: Any) -> list[Turn]:
    """(role, text) of a record's turns. Raises ValueError, with the malformation, for a record that makes no prompt."""
    if not isinstance(record, dict):
        raise ValueError("not_an_object")
    if "conversations" not in record and "messages" not in record:
        raise ValueError("no_conversations")
    raw = record.get("conversations") or record.get("messages")
    if not raw:
        raise ValueError("empty_conversation")
    if not isinstance(raw, list):
        raise ValueError("turns_not_a_list")
    if not all(isinstance(turn, dict) for turn in raw):
        raise ValueError("turn_not_an_object")
    names = [(turn.get("from") or turn["role"]).strip().lower() for turn in raw]
    if TOOL_ROLES & set(names):
        raise ValueError("tools_not_supported")
    if "tools" in record:
        try:
            json.loads(record["tools"])
        except json.JSONDecodeError as error:
            raise ValueError("bad_tools") from error
    if not set(names) <= set(ROLES):
        raise ValueError("unknown_role")
    turns: list[Turn] = [
        (ROLES[name], text_of(turn.get("value", turn.get("content")))) for name, turn in zip(names, raw, strict=True)
    ]
    if record.get("system"):
        turns.insert(0, ("system", record["system"]))
    users = [text for role, text in turns if role == "user"]
    if not users:
        raise ValueError("no_user_turn")
    if all(is_blank(text) for text in users):
        raise ValueError("empty_user")
    return turns


@pytest.fixture(scope="module")
def records() -> list[Any]:
    return list(json.loads((SAMPLE / "conversations.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def read(records: list[Any]) -> Read:
    """The records that read well (id to turns) and the others (kind of malformation to ids)."""
    good: dict[str, list[Turn]] = {}
    malformed: dict[str, list[str]] = {}
    for record in records:
        try:
            turns = turns_of(record)
        except ValueError as error:
            name = record["id"] if isinstance(record, dict) else "none"
            malformed.setdefault(str(error), []).append(name)
        else:
            assert record["id"] not in good
            good[record["id"]] = turns
    return good, malformed


def test_the_file_is_plain_utf8_and_small() -> None:
    raw = (SAMPLE / "conversations.json").read_bytes()
    assert len(raw) < 400_000
    assert not raw.startswith(b"\xef\xbb\xbf")
    text = raw.decode("utf-8")
    # invisible characters would be lost on a reader of the file: they are written as escapes
    assert not re.search("[\u200b\ufeff\u2028\u2029]", text)
    assert r"\u200b" in text


def test_counts_are_those_of_the_readme(records: list[Any], read: Read) -> None:
    good, malformed = read
    distinct = {json.dumps(turns) for turns in good.values()}
    later_parts = {name for name in good if not name.endswith("_0") and f"{name.rsplit('_', 1)[0]}_0" in good}
    assert later_parts == {"XSDM0Jv_6"}
    assert len(records) == 116
    assert len(distinct) - len(later_parts) == 96
    assert len(good) - len(distinct) == 2
    assert sum(map(len, malformed.values())) == 17


def test_the_readme_names_every_malformed_record(
    read: Read,
) -> None:
    rows = re.findall(
        r"^\| (\d+) \| [^|]+ \| ([^|]+) \| `(\w+)` \|$", (SAMPLE / "README.md").read_text("utf-8"), re.MULTILINE
    )
    documented: dict[str, list[str]] = {}
    for count, ids, reason in rows:
        names = [name.strip("`") for name in ids.split(", ")]
        assert len(names) == int(count)
        documented.setdefault(reason, []).extend(names)
    assert set(documented) <= set(RejectReason)
    _, malformed = read
    assert {k: sorted(v) for k, v in documented.items()} == {k: sorted(v) for k, v in malformed.items()}


def test_ids_are_sharegpt_ids_and_one_occurs_twice_on_purpose(records: list[Any]) -> None:
    ids = [record["id"] for record in records if isinstance(record, dict)]
    assert len(ids) == len(records) - 1
    assert all(re.fullmatch(r"[A-Za-z0-9]{7}_\d+", name) for name in ids)
    assert [name for name, count in Counter(ids).items() if count > 1] == ["UrrrUaR_0"]


def test_the_later_part_starts_with_the_last_turn_of_the_first(
    read: Read,
) -> None:
    good, _ = read
    first, second = good["XSDM0Jv_0"], good["XSDM0Jv_6"]
    assert first[-1] == second[0] and first[-1][0] == "assistant"
    assert len(first) - 1 == 6  # the suffix is the index of the part's first turn


def test_user_texts_are_distinct_and_shapes_are_many(
    read: Read,
) -> None:
    good, _ = read
    unique = {json.dumps(turns): turns for turns in good.values()}.values()
    prompts = [json.dumps([turn for turn in turns if turn[0] != "assistant"]) for turns in unique]
    assert len(set(prompts)) == len(prompts)
    roles = [Counter(role for role, _ in turns) for turns in unique]
    assert sum(count["user"] > 1 for count in roles) >= 30
    assert max(count["user"] for count in roles) == 6
    assert sum(count["system"] for count in roles) == 9
    users = [text for turns in unique for role, text in turns if role == "user" and text]
    assert any(len(text.split()) > 590 for text in users)
    assert any("<|im_end|>" in text for text in users)
    assert any("<html>" in text for text in users)
    assert any(text != text.strip() and "\t" in text for text in users)


def test_no_conversation_outgrows_a_slot_of_the_embedded_server(
    read: Read,
) -> None:
    # A rough count of SmolLM2's ids without its tokenizer: one for 2.5 bytes of ASCII, one a byte elsewhere, 5 a turn,
    # and the default system turn. Held against the tokenizer once, it was at most 26 ids too low for any conversation
    # here; a slot has 2,048, of which 96 are for the answer.
    good, _ = read
    for name, turns in good.items():
        text = "".join(text or "" for _, text in turns)
        others = sum(len(c.encode()) for c in text if ord(c) > 127)
        assert (len(text.encode()) - others) / 2.5 + others + 5 * len(turns) + 30 < 1_800, name


def test_scripts_and_languages_are_there(read: Read) -> None:
    good, _ = read
    users = "\n".join(text for turns in good.values() for role, text in turns if role == "user" and text)
    scripts = {unicodedata.name(c, "").split(" ")[0] for c in users if c.isalpha()}
    assert scripts >= SCRIPTS
    assert [language for language, mark in MARKS.items() if not re.search(mark, users)] == []
