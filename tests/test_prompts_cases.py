"""The cases of ../shared/cases from 001 to 109 through the front door: small builds, and then their files.

What each case reads as stands, word for word, in test_reading_cases.py; here a build of all of them holds exactly that.
Cases that bring a template, or ask for a tokenizer of some kind, have a prompts step of their own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import duckdb
import orjson
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from readkit import CASES, case_input, prompt_rows, prompts_step, read
from shardmill.errors import DataError
from shardmill.files import read_json
from shardmill.paths import BuildPaths, shard_names
from shardmill.quality.checks import read_check
from shardmill.rendering import Decoder
from shardmill.rendering.files import embedded_tokenizer
from shardmill.settings import CHECKS
from shardmill.turns import asked_turns
from workspace import Workspace

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason=f"the cases are not at {CASES}")


def rejects(build: BuildPaths) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(build.rejects).to_pylist()
    return rows


REJECTED = {
    "004": ["unknown_role"],
    "006": ["no_user_turn"],
    "011": ["no_user_turn"],
    "014": ["tools_not_supported"],
    "016": ["bad_tools", "bad_tools"],
    "020": ["empty_user"],
    "022": ["empty_user"],
    "024": ["non_text_part"],
    "030": ["not_an_object", "turn_not_an_object", "turn_not_an_object", "turns_not_a_list", "turns_not_a_list"],
    "040": ["empty_conversation"],
    "057": ["invalid_utf8"],
    "071": ["cut_off"],
    "079": ["no_conversations", "not_an_object"],
    "083": ["cut_off"],
    "084": ["too_deep"],
    "086": ["prompt_too_long"],
}


def test_all_cases_in_one_build(tmp_path: Path) -> None:
    """What other tools crash on, together, stops nothing, loses nothing, and goes to the model as it was written."""
    files = [file for file in sorted(CASES.glob("*/input*")) if int(file.parent.name[:3]) <= 109]
    files += sorted(CASES.glob("079-*/*.json*")) + sorted(CASES.glob("083-*/*.zst"))
    huge = tmp_path / "086-huge.jsonl"
    with huge.open("wb") as stream:
        subprocess.run([sys.executable, next(CASES.glob("086-*/gen.py")), "1"], stdout=stream, check=True)
    files.append(huge)
    assert {file.parent.name[:3] for file in files[:-1]} == {
        folder.name[:3] for folder in CASES.glob("*-*") if int(folder.name[:3]) <= 109 and folder.name[:3] != "086"
    }
    # Ids and contents recur over the cases, which were not written to be read together.
    prompts = {"shards": 8, "rejoin": False, "dedupe": False, "turns": "final"}
    (tmp_path / "all").mkdir()
    workspace = Workspace(
        tmp_path / "all", {"dataset": {"path": [*map(str, files)], "bad_records": "reject"}, "prompts": prompts}
    )
    done = workspace.snakemake("--until", "make_prompts")
    assert "Traceback" not in done.stdout + done.stderr
    build = BuildPaths(workspace.results)
    rows = prompt_rows(build)
    by_case: dict[str, list[str]] = defaultdict(list)
    for row in rejects(build):
        file = Path(row["source_file"])
        by_case[(file.name if file.name == huge.name else file.parent.name)[:3]].append(row["reason"])
        assert row["detail"] and row["record"] >= 1
    assert {number: sorted(reasons) for number, reasons in by_case.items()} == REJECTED
    counts = read_json(build.build_json)["counts"]
    assert counts["records"] == counts["conversations"] + counts["rejected"] == 96
    assert counts["joined"] == counts["duplicates"] == counts["beyond_limit"] == 0

    expected: Counter[tuple[str, bytes]] = Counter()
    for file in files:
        for each in read(file, tmp_path / "spool", rejoin=False, dedupe=False).conversations:
            if each.tools or each.source_id == "huge":
                continue
            (messages,) = asked_turns([message.as_template() for message in each.messages], "final")
            expected[("" if each.source_id == each.conversation_id else each.source_id, orjson.dumps(messages))] += 1
    found = Counter(
        ("" if row["source_id"] == row["conversation_id"] else row["source_id"], row["messages"].encode())
        for row in rows
    )
    assert found == expected
    # The ids of 101, 102 and 109: two special ids a turn and one to begin the answer, whatever texts look like.
    tokenizer = Tokenizer.from_file(str(embedded_tokenizer() / "tokenizer.json"))
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    decode = Decoder(embedded_tokenizer()).decode
    for row in rows:
        messages = json.loads(row["messages"])
        turns = len(messages) + (messages[0]["role"] != "system")
        assert sum(index in special for index in row["prompt_ids"]) == 2 * turns + 1
        if "\ufffd" not in row["messages"]:
            assert all(message["content"] in decode(row["prompt_ids"]) for message in messages)
    # In another process and folder, with the files in another order: the same bytes.
    again = prompts_step(
        tmp_path / "again", [*map(str, reversed(files))], dataset={"bad_records": "reject"}, prompts=prompts
    )
    for name in shard_names(8):
        assert again.prompts(name).read_bytes() == build.prompts(name).read_bytes()
    # 045: ids are data, never names of files.
    assert {path.name for path in (workspace.results / "prompts").iterdir()} == {
        *(f"shard-{number:05d}-of-00008.parquet" for number in range(8)),
        "rejects.parquet",
    }


def test_012_a_template_without_system_turns_costs_the_conversations_that_have_one(tmp_path: Path) -> None:
    template = next(CASES.glob("012-*/template.jinja"))
    build = prompts_step(tmp_path, [case_input("012"), case_input("007")], model={"chat_template": str(template)})
    (row,) = prompt_rows(build)
    assert Decoder(embedded_tokenizer()).decode(row["prompt_ids"]) == (
        "<user>First thought.</user>\n<user>Also this.</user>\n"
    )
    (reject,) = rejects(build)
    assert (reject["reason"], reject["detail"]) == ("system_not_supported", "System role not supported")


def test_106_and_107_bos_is_there_once_and_only_the_template_strips(tmp_path: Path) -> None:
    """With a tokenizer that adds BOS to whatever it encodes."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(embedded_tokenizer(), folder)
    described = json.loads((folder / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ping").ids[0] == 1
    template = next(CASES.glob("106-*/template.jinja"))
    build = prompts_step(
        tmp_path / "build",
        [case_input("106"), case_input("107")],
        model={"tokenizer": str(folder), "chat_template": str(template)},
        prompts={"turns": "final"},
    )
    assert sorted(row["prompt_ids"] for row in prompt_rows(build)) == sorted(
        [1, *tokenizer.encode(text, add_special_tokens=False).ids, 2]
        for text in ("<|user|>ping", "<|user|>  indented\n")
    )


def test_104_and_107_with_qwen3(qwen3: Path, tmp_path: Path) -> None:
    """Thinking in earlier answers, and all before a stray `</think>`, goes as the template has it, and this is counted.

    All other white space of the contents stays.
    """
    record = json.loads(Path(case_input("104")).read_text())[0]
    longer = tmp_path / "longer.json"
    longer.write_text(json.dumps([{"conversations": [*record["conversations"], {"from": "human", "value": "And?"}]}]))
    stripped = json.loads(Path(case_input("107")).read_text())[0]
    more = tmp_path / "more.json"
    more.write_text(
        json.dumps([{"conversations": [*stripped["conversations"], {"from": "human", "value": " \tand? "}]}])
    )
    build = prompts_step(
        tmp_path / "build",
        [case_input("104"), case_input("107"), str(longer), str(more)],
        model={"name": "qwen3", "tokenizer": str(qwen3), "thinking": True},
        servers={"engine": "sglang", "gpus": [0]},
        prompts={"turns": "final"},
    )
    decode = Decoder(qwen3).decode
    first = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\n3+3?<|im_end|>\n"
    blanks = "<|im_start|>user\n  indented\n<|im_end|>\n<|im_start|>assistant\n"
    assert {decode(row["prompt_ids"]) for row in prompt_rows(build)} == {
        f"{first}<|im_start|>assistant\n",
        f"{first}<|im_start|>assistant\n left over 6<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n",
        blanks,
        f"{blanks}\n  - item\n<|im_end|>\n<|im_start|>user\n \tand? <|im_end|>\n<|im_start|>assistant\n",
    }
    assert read_json(build.build_json)["counts"]["notes"]["stray_think_markers"] == 2


def test_006_nothing_left_to_ask_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"makes no prompt: 1 records, rejected as 1 no_user_turn\.$"):
        prompts_step(tmp_path, [case_input("006")])


def test_071_broken_syntax_stops_a_build_with_one_sentence(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, {"dataset": {"path": case_input("071")}})
    done = workspace.snakemake("--until", "make_prompts", expect=1)
    said = done.stdout + done.stderr
    assert "line 2, record 2: the file is cut off inside a string; 1 records come before it." in said
    assert "Traceback" not in said


def test_061_and_062_residue_is_flagged_by_a_check_and_stays(tmp_path: Path) -> None:
    """Where it goes to the model. Real markup, as in 061's second record, is no residue."""
    files = []
    for number in ("061", "062"):
        asked = json.loads(Path(case_input(number)).read_text())
        for record in asked:
            record["conversations"].append({"from": "human", "value": "And then?"})  # so that its answer is history
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(asked))
    build = prompts_step(tmp_path / "build", [*map(str, files)], prompts={"turns": "final"})
    rows = prompt_rows(build)
    assert sum("Copy code" in row["messages"] or "Too many requests" in row["messages"] for row in rows) == 2
    check = read_check(CHECKS / "page_residue.sql")
    with duckdb.connect() as connection:
        connection.execute(f"CREATE VIEW prompts AS FROM '{build.root}/prompts/shard-*.parquet'")
        value = connection.execute(check.query).fetchone()
        assert check.examples is not None
        examples = {text for _, text in connection.execute(check.examples).fetchall()}
    assert (len(rows), value) == (5, (0.8,))
    assert len(examples) == 3
