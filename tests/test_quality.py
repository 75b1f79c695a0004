"""Checks: a sound build passes, each kind of damage fails the check made for it, and verdicts say what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builds import (
    CLOSE,
    STOP,
    VOCABULARY,
    Answer,
    MadeBuild,
    disaster,
    good,
    ids_of,
    long_answer,
    settings_of,
    thinking,
)
from shardmill.catalog import connect
from shardmill.errors import DataError, SettingsError
from shardmill.facts import build_facts
from shardmill.files import read_json, write_json
from shardmill.paths import BuildPaths
from shardmill.quality.checks import load_checks, read_check
from shardmill.quality.repetition import register
from shardmill.quality.run import check_build, check_pilot, check_shard
from shardmill.quality.tables import prepare
from shardmill.quality.verdict import render_verdict
from shardmill.schemas import COMPLETIONS, TOKENS, read_rows, write_table
from shardmill.settings import CHECKS, Settings

FIRST, SECOND = "shard-00000-of-00002", "shard-00001-of-00002"
THINKING: dict[str, Any] = {
    "model": {"name": "Qwen/Qwen3.6-27B", "thinking": True, "context": 32768},
    "servers": {"engine": "sglang", "endpoints": ["http://127.0.0.1:30000"]},
}


def made(tmp_path: Path, answers: Sequence[Answer], chosen: Settings | None = None) -> tuple[BuildPaths, Settings]:
    chosen = chosen or settings_of()
    return MadeBuild(tmp_path / "made-0123456789", chosen).write(answers), chosen


def failing(report: dict[str, Any]) -> set[str]:
    return {check["name"] for check in report["checks"] if not check["passed"]}


def value(report: dict[str, Any], name: str) -> float | None:
    found: float | None = next(check["value"] for check in report["checks"] if check["name"] == name)
    return found


def sound(count: int = 40) -> list[Answer]:
    return [good(number, text=long_answer(number, 90)) for number in range(count)]


def test_a_sound_build_passes_every_check(tmp_path: Path) -> None:
    build, chosen = made(tmp_path, sound())
    report = check_build(build, chosen)
    assert failing(report) == set()
    assert report["passed"]
    assert {check["name"] for check in report["checks"]} == {path.stem for path in CHECKS.glob("*.sql")}
    assert report == read_json(build.quality_report)
    # No thinking, no failure, no word of what generate cut: four checks have nothing to judge, and five have no limit.
    without_rows = {check["name"] for check in report["checks"] if check["value"] is None}
    assert without_rows == {"no_thinking", "thinking_not_closed", "failed_by_reason", "cut_at_stop"}
    assert render_verdict(report).endswith("(40 rows): 27 passed, 4 had no rows to judge, 5 only reported.")


def test_a_sound_thinking_build_passes(tmp_path: Path) -> None:
    build, chosen = made(tmp_path, [thinking(number) for number in range(40)], settings_of(**THINKING))
    report = check_build(build, chosen)
    assert failing(report) == set()
    assert value(report, "no_thinking") == 0


def test_the_seeds_disaster_is_stopped_at_the_gate(tmp_path: Path) -> None:
    """An empty think block and "OK." from every server, with thinking on."""
    build, chosen = made(tmp_path, [disaster(number) for number in range(40)], settings_of(**THINKING))
    report = check_pilot(build, chosen, [FIRST])
    assert not report["passed"]
    assert {"nearly_empty", "no_thinking", "equal_answers"} <= failing(report)
    assert report == read_json(build.pilot_report)
    shown = render_verdict(report)
    counts = [int(count) for count in re.findall(r"(\d+) (?:passed|FAILED|of no|had no|only)", shown.splitlines()[0])]
    assert len(counts) >= 4 and sum(counts) == len(report["checks"]), "each check is in one count"
    for said in ("no_thinking", "100.0%", "≤ 5.0%", "<think> </think> OK.", "chat template"):
        assert said in shown
    empty = next(check for check in report["checks"] if check["name"] == "nearly_empty")
    assert len(empty["examples"]) == 3
    assert all(len(example["prompt_id"]) == 64 for example in empty["examples"])


def test_rows_that_are_damaged_inside_are_one_sentence(tmp_path: Path) -> None:
    """Of the right size, with a sound footer: DuckDB's own word for it names no file."""
    build, chosen = made(tmp_path, [good(number) for number in range(60)])
    path = build.tokens(FIRST)
    content = bytearray(path.read_bytes())
    for place in range(300, 420):
        content[place] ^= 255
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match="`shardmill verify` says which file"):
        check_build(build, chosen)


def test_the_disaster_in_87_percent_of_the_rows(tmp_path: Path) -> None:
    answers = [disaster(number) if number % 100 < 87 else good(number) for number in range(200)]
    build, chosen = made(tmp_path, answers)
    report = check_build(build, chosen)
    assert value(report, "nearly_empty") == pytest.approx(0.87)
    assert not report["passed"]


def test_a_shard_that_goes_bad_in_the_middle_is_not_published(tmp_path: Path) -> None:
    answers = [good(number) if number % 2 == 0 else disaster(number) for number in range(60)]
    build, chosen = made(tmp_path, answers)
    assert check_shard(build, chosen, FIRST)["passed"]
    assert not check_shard(build, chosen, SECOND)["passed"]


@pytest.mark.parametrize("scope", ["pilot", "shard"])
def test_todays_servers_are_judged_beside_many_rows_of_another_build(tmp_path: Path, scope: str) -> None:
    """A few bad rows among many reused ones are within every limit, and are all that was asked here."""
    reused = [good(number, reused_from="made-9876543210") for number in range(400)]
    for bad, passes in ((disaster, False), (good, True)):
        answers = [*reused, *(bad(number) for number in range(400, 440))]
        build, chosen = made(tmp_path / bad.__name__, answers)
        report = check_shard(build, chosen, FIRST) if scope == "shard" else check_pilot(build, chosen, [FIRST])
        assert report["passed"] is passes, failing(report)
        assert passes or "nearly_empty" in failing(report)
        # Longer than all others, as where only what a limit had cut is asked again: that alone is no reason to stop.
        cut = [*reused, *(good(n, text=long_answer(n, 400), finish_reason="length") for n in range(400, 440))]
        of_cut = check_pilot(*made(tmp_path / f"{bad.__name__}-cut", cut), [FIRST])
        assert not [check for check in of_cut["checks"] if check["title"].endswith("(rows asked here)")]
        (empty,) = (check for check in report["checks"] if check["name"] == "nearly_empty")
        assert empty["title"].endswith(" (rows asked here)") is not passes


DAMAGE: dict[str, Callable[[int], Answer]] = {
    "nearly_empty": lambda n: good(n, text=f"word{n} yes"),
    "truncated": lambda n: good(n, text=long_answer(n, 90), finish_reason="length"),
    "equal_answers": lambda n: good(n, text=long_answer(7, 90)),
    "loops": lambda n: good(n, text=f"{long_answer(n, 40)} " + f"again{n} and{n} once{n} more{n} " * 20),
    "refusals": lambda n: good(n, text=f"I'm sorry, but I can't help with that. {long_answer(n, 80)}"),
    "other_script": lambda n: good(
        n, text=long_answer(n, 90), question=f"{n} 请问这条河流从哪里开始流到哪里去而且为什么这么长呢我很想知道"
    ),
    "ids_after_stop": lambda n: good(n, output_ids=[*ids_of(long_answer(n, 90)), STOP, 17, STOP]),
    "ids_outside_vocabulary": lambda n: good(n, output_ids=[*ids_of(long_answer(n, 90)), VOCABULARY, STOP]),
    "stop_supervised": lambda n: good(n, output_ids=ids_of(long_answer(n, 90))),
    "accept_length_mean": lambda n: good(n, text=long_answer(n, 90), accept_length=1.02),
    "failed": lambda n: replace(good(n), status="failed", reason="repetition"),
    "nothing_after_thinking": lambda n: good(n, text=f"<think> {long_answer(n, 90)} </think>\n"),
    "duplicate_prompt_ids": lambda n: good(n, text=long_answer(n, 90), question="The same question for all?"),
}
# What the damage to these rows rightly fails as well.
BESIDES = {
    "failed": {"failed_by_reason"},
    "loops": set(),
    "nearly_empty": {"answer_tokens_p50"},
    "accept_length_mean": {"accept_length_over_position", "accept_length_over_time"},
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_fails_the_check_that_is_made_for_it(tmp_path: Path, name: str) -> None:
    bad = 36 if name == "accept_length_mean" else 12
    answers = [DAMAGE[name](number) if number < bad else answer for number, answer in enumerate(sound())]
    build, chosen = made(tmp_path, answers)
    report = check_build(build, chosen)
    assert name in failing(report)
    assert failing(report) <= {name} | BESIDES.get(name, set())
    check = next(check for check in report["checks"] if check["name"] == name)
    assert 1 <= len(check["examples"]) <= 3
    assert check["advice"]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("no_thinking", lambda n: good(n, text=f"\n</think>\n\n{long_answer(n, 90)}")),
        ("thinking_not_closed", lambda n: good(n, text=long_answer(n, 90), finish_reason="stop")),
    ],
)
def test_damage_to_thinking(tmp_path: Path, name: str, answer: Callable[[int], Answer]) -> None:
    answers = [answer(number) if number < 12 else thinking(number) for number in range(40)]
    build, chosen = made(tmp_path, answers, settings_of(**THINKING))
    report = check_build(build, chosen)
    assert failing(report) == {name}
    assert value(report, name) == pytest.approx(0.3)
    # The same rows under thinking: false are nobody's fault.
    assert check_build(build, settings_of())["passed"]


def rewrite(build: BuildPaths, kind: str, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    path, schema = (build.tokens(FIRST), TOKENS) if kind == "tokens" else (build.completions(FIRST), COMPLETIONS)
    write_table(path, schema, change(list(read_rows(path))))


TAMPERED: dict[str, tuple[str, Callable[[list[dict[str, Any]]], list[dict[str, Any]]]]] = {
    "mask_length": ("tokens", lambda rows: [{**rows[0], "loss_mask": [*rows[0]["loss_mask"], 1]}, *rows[1:]]),
    "mask_boundary": ("tokens", lambda rows: [{**rows[0], "loss_mask": [1] * rows[0]["seq_len"]}, *rows[1:]]),
    "token_exact": (
        "tokens",
        lambda rows: [{**rows[0], "input_ids": [9, *rows[0]["input_ids"][1:]]}, *rows[1:]],
    ),
    "rows_without_tokens": ("tokens", lambda rows: rows[1:]),
    "stop_supervised": (
        "tokens",
        lambda rows: [{**rows[0], "finish_reason": "length"}, *rows[1:]],
    ),
    "token_counts": ("completions", lambda rows: [{**rows[0], "completion_tokens": 80}, *rows[1:]]),
    "duplicate_rows": ("completions", lambda rows: [rows[0], *rows]),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_file_that_was_changed_is_found_out(tmp_path: Path, name: str) -> None:
    build, chosen = made(tmp_path, sound())
    rewrite(build, *TAMPERED[name])
    for report in (check_shard(build, chosen, FIRST), check_build(build, chosen)):
        assert name in failing(report)
        assert not report["passed"]


def test_answers_that_were_cut_at_their_stop_are_counted_and_warned_of(tmp_path: Path) -> None:
    """What generate took away before it kept a row is told by its file's footer alone."""
    effort = {"cut_at_stop": 2, "degenerate": {"empty": 1}, "faults": {"timeout": 3}}
    chosen = settings_of()
    build = MadeBuild(tmp_path / "made-0123456789", chosen, effort=effort).write(sound())
    report = check_build(build, chosen)
    assert report["effort"] == {"cut_at_stop": 4, "degenerate": {"empty": 2}, "faults": {"timeout": 6}}
    assert value(report, "cut_at_stop") == pytest.approx(4 / 40)
    assert failing(report) == {"cut_at_stop"} and report["passed"]
    assert f"{FIRST}: 2 answers" in render_verdict(report)
    # A file of an earlier version doesn't tell, which is not the same as none.
    untold = check_build(*made(tmp_path / "untold", sound()))
    assert untold["effort"] is None and value(untold, "cut_at_stop") is None


def test_accept_length_that_falls_over_time_warns(tmp_path: Path) -> None:
    answers = [replace(answer, accept_length=3.4 - n * 0.03) for n, answer in enumerate(sound())]
    report = check_build(*made(tmp_path, answers))
    assert "accept_length_over_time" in failing(report)
    assert report["passed"]


def test_servers_that_draft_nothing_give_no_value(tmp_path: Path) -> None:
    report = check_build(*made(tmp_path, [replace(answer, accept_length=None) for answer in sound()]))
    assert value(report, "accept_length_mean") is None
    assert report["passed"]


def test_a_training_window_keeps_what_it_reaches(tmp_path: Path) -> None:
    long = good(1, output_ids=[10 + index % 4000 for index in range(4000)] + [STOP])
    report = check_build(*made(tmp_path, [*sound(15), long]))
    rows = list(read_rows(tmp_path / "made-0123456789" / "tokens" / f"{SECOND}.parquet")) + list(
        read_rows(tmp_path / "made-0123456789" / "tokens" / f"{FIRST}.parquet")
    )
    kept = sum(sum(row["loss_mask"][:2048]) for row in rows) / sum(sum(row["loss_mask"]) for row in rows)
    assert kept < 1
    assert value(report, "kept_at_2k") == pytest.approx(kept)
    assert value(report, "kept_at_8k") == 1


# -- accounting


def test_accounting_counts_every_fate(tmp_path: Path) -> None:
    answers = [
        *sound(20),
        Answer(text=None, status="failed", reason="empty", conversation="a"),
        replace(good(50), conversation="a", turn=1, status="failed", reason="not_reached"),
        replace(good(52), conversation="a", turn=2, status="failed", reason="not_reached"),
        good(51),
    ]
    chosen = settings_of(quality={"limits": {"failed": 0.5, "failed_by_reason": 0.5}})
    build, chosen = made(tmp_path, answers, chosen)
    report = check_build(build, chosen)
    accounting = report["accounting"]
    assert {key: accounting[key] for key in ("prompts", "ok", "failed", "not_reached", "balanced")} == {
        "prompts": 24,
        "ok": 21,
        "failed": 1,
        "not_reached": 2,
        "balanced": True,
    }
    assert report["passed"]
    assert accounting["records"] == sum(
        accounting[key] for key in ("conversations", "joined", "rejected", "duplicates", "beyond_limit")
    )


@pytest.mark.parametrize("count", ["records", "joined", "duplicates", "prompts", "conversations"])
def test_a_build_that_does_not_balance_never_passes(tmp_path: Path, count: str) -> None:
    chosen = settings_of(quality={"override": ["all"], "limits": {"accounting": None}})
    build, chosen = made(tmp_path, sound(), chosen)
    facts = read_json(build.build_json)
    facts["counts"][count] += 1
    write_json(build.build_json, facts)
    report = check_build(build, chosen)
    assert not report["accounting"]["balanced"]
    assert not report["passed"]
    assert "does not balance" in render_verdict(report)


def test_rows_in_the_wrong_shard_do_not_balance(tmp_path: Path) -> None:
    build, chosen = made(tmp_path, sound())
    moved = list(read_rows(build.completions(FIRST)))
    write_table(build.completions(SECOND), COMPLETIONS, [*read_rows(build.completions(SECOND)), moved.pop()])
    write_table(build.completions(FIRST), COMPLETIONS, moved)
    report = check_build(build, chosen)
    assert not report["accounting"]["balanced"]
    assert {"accounting"} <= failing(report)


def test_a_lost_completion_is_not_called_unreached(tmp_path: Path) -> None:
    build, chosen = made(tmp_path, sound())
    rewrite(build, "completions", lambda rows: rows[1:])
    report = check_build(build, chosen)
    assert report["accounting"]["not_reached"] == 0
    assert not report["accounting"]["balanced"]


def test_checks_run_without_prompts_on_this_machine(tmp_path: Path) -> None:
    """A build that was restored from S3 has no prompts files."""
    build, chosen = made(tmp_path, sound())
    for name in (FIRST, SECOND):
        build.prompts(name).unlink()
    report = check_build(build, chosen)
    assert report["passed"]
    assert value(report, "other_script") is None
    assert "prompts of 2 shards are not on this machine; not judged over all rows: " in said_in_one_line(report)


def said_in_one_line(report: dict[str, Any]) -> str:
    return " ".join(render_verdict(report).split())


def test_what_needs_prompts_is_carried_on_where_they_are_gone(tmp_path: Path) -> None:
    """A check that failed on one machine may not pass on another for want of prompts; limits of today hold."""
    build, chosen = made(tmp_path, [*sound(34), *(DAMAGE["other_script"](number) for number in range(34, 40))])
    first = check_build(build, chosen)
    assert value(first, "other_script") == 0.15 and failing(first) == {"other_script"}
    for name in (FIRST, SECOND):
        build.prompts(name).unlink()
    again = check_build(build, chosen)
    entry, before = (
        next(check for check in report["checks"] if check["name"] == "other_script") for report in (again, first)
    )
    assert not again["passed"] and entry == {**before, "judged_at": first["checked_at"]} and entry["examples"]
    said = said_in_one_line(again)
    assert f"carried over from when they were: other_script (of {first['checked_at']})" in said
    lenient = check_build(build, settings_of(quality={"limits": {"other_script": 0.2}}))
    assert lenient["passed"] and value(lenient, "other_script") == 0.15
    # A kept report that is damaged is as good as none.
    build.judged.write_text("[]")
    assert value(check_build(build, chosen), "other_script") is None


# -- limits, overrides, small samples


def test_override_goes_on_knowingly_and_the_report_says_so(tmp_path: Path) -> None:
    answers = [disaster(number) for number in range(40)]
    chosen = settings_of(quality={"override": ["nearly_empty", "equal_answers"]})
    report = check_build(*made(tmp_path, answers, chosen))
    assert report["passed"]
    assert {check["name"] for check in report["checks"] if check["overridden"]} == {"nearly_empty", "equal_answers"}
    assert "overridden" in render_verdict(report)


def test_limits_of_the_config_replace_or_turn_off(tmp_path: Path) -> None:
    chosen = settings_of(quality={"limits": {"nearly_empty": 1.0, "equal_answers": None, "answer_tokens_p50": 1}})
    report = check_build(*made(tmp_path, [disaster(number) for number in range(40)], chosen))
    assert report["passed"]
    assert report["off"] == ["equal_answers"]
    assert "equal_answers" not in {check["name"] for check in report["checks"]}


def test_a_limit_makes_a_reported_value_a_judged_one(tmp_path: Path) -> None:
    chosen = settings_of(quality={"limits": {"prompt_tokens_p95": 2}})
    report = check_build(*made(tmp_path, sound(), chosen))
    assert failing(report) == {"prompt_tokens_p95"}


def test_a_small_pilot_warns_and_gives_no_verdict(tmp_path: Path) -> None:
    build, chosen = made(tmp_path, [disaster(number) for number in range(22)])
    report = check_pilot(build, chosen, [FIRST])
    assert report["passed"] and report["verdict"] == "none"
    assert all(check["severity"] == "warning" for check in report["checks"] if not check["passed"])
    shown = render_verdict(report)
    assert "no verdict: 11 rows, 12 are needed; " in shown and "nearly_empty" in shown
    twelve = check_pilot(*made(tmp_path, [disaster(number) for number in range(24)]), [FIRST])
    assert not twelve["passed"] and twelve["verdict"] == "failed"


def test_no_rows_are_never_called_passed(tmp_path: Path) -> None:
    """The run goes on after an empty pilot; a build without a row is not one that passed."""
    build, chosen = made(tmp_path, [])
    pilot, whole = check_pilot(build, chosen, [FIRST]), check_build(build, chosen)
    assert pilot["passed"] and not whole["passed"]
    for report in (pilot, whole):
        shown = render_verdict(report)
        assert report["verdict"] == "none"
        assert shown.endswith("(0 rows): no verdict: 0 rows.")
        assert "passed" not in shown


def test_a_small_build_is_judged_for_it_is_no_sample(tmp_path: Path) -> None:
    build, chosen = made(tmp_path, [disaster(number) for number in range(5)])
    assert check_build(build, chosen)["verdict"] == "failed"


def test_one_unlucky_shard_of_a_good_run_is_published(tmp_path: Path) -> None:
    """25% truncated in a shard of 40 happens by chance when 15% is the rule; the whole build is held to 15%."""
    answers = [
        good(n, text=long_answer(n, 90), finish_reason="length" if n % 8 in (0, 1) else "stop") for n in range(80)
    ]
    build, chosen = made(tmp_path, answers)
    assert check_shard(build, chosen, FIRST)["passed"]
    assert failing(check_build(build, chosen)) == {"truncated"}


# -- checks of a user's own


def own_check(folder: Path, text: str, name: str = "mine") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.sql"
    path.write_text(text, encoding="utf-8")
    return path


MINE = """-- title: Answers that say word0
-- unit: rows
-- limit: 0
-- severity: warning
-- advice: Say something else,
--   or raise the limit.
SELECT count(*) FROM completions WHERE contains(text, 'word0 ');

-- examples:
SELECT prompt_id, text FROM completions WHERE contains(text, 'word0 ') LIMIT 3;
"""


def test_a_check_of_the_users_own_needs_a_file_and_nothing_else(tmp_path: Path) -> None:
    own_check(tmp_path / "checks", MINE)
    chosen = settings_of(quality={"checks_dir": str(tmp_path / "checks"), "limits": {"mine": 1}})
    build, chosen = made(tmp_path, [good(n, text=f"word0 {long_answer(n, 90)}") for n in range(40)], chosen)
    report = check_build(build, chosen)
    mine = next(check for check in report["checks"] if check["name"] == "mine")
    assert (mine["value"], mine["limit"], mine["passed"], mine["severity"]) == (40, 1, False, "warning")
    assert mine["advice"] == "Say something else, or raise the limit."
    assert len(mine["examples"]) == 3
    assert report["passed"]


def test_a_users_check_takes_the_place_of_a_shipped_one(tmp_path: Path) -> None:
    own_check(tmp_path / "checks", MINE, "nearly_empty")
    checks = load_checks(settings_of(quality={"checks_dir": str(tmp_path / "checks")}).quality)
    assert next(check for check in checks.checks if check.name == "nearly_empty").title == "Answers that say word0"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SELECT 1", "no line `-- title:"),
        ("-- title: a\nSELECT 1", "no line `-- unit:"),
        ("-- title: a\n-- unit: rows\n-- limit: few\nSELECT 1", "limit 'few'"),
        ("-- title: a\n-- unit: rows\n-- direction: up\nSELECT 1", "direction 'up'"),
        ("-- title: a\n-- unit: rows\n-- severity: fatal\nSELECT 1", "severity 'fatal'"),
        ("-- title: a\n-- unit: rows\n-- scope: all\nSELECT 1", "scope 'all'"),
        ("-- title: a\n-- unit: rows\n-- limits: 1\nSELECT 1", "unknown header 'limits'"),
    ],
)
def test_a_wrong_header_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = own_check(tmp_path / "checks", text)
    with pytest.raises(DataError, match=r"mine\.sql") as error:
        read_check(path)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT nothing FROM completions", "DuckDB refuses the check"),
        ("SELECT 1, 2", "one row of one value"),
        ("SELECT turn FROM completions", "one row of one value"),
        ("SELECT 'many'", "must give a number"),
    ],
)
def test_a_query_that_is_no_check_is_named(tmp_path: Path, query: str, said: str) -> None:
    own_check(tmp_path / "checks", f"-- title: a\n-- unit: rows\n{query}")
    chosen = settings_of(quality={"checks_dir": str(tmp_path / "checks")})
    build, chosen = made(tmp_path, sound(20), chosen)
    with pytest.raises(DataError, match=r"mine\.sql") as error:
        check_build(build, chosen)
    assert said in str(error.value)


def test_every_shipped_check_says_what_to_do() -> None:
    for path in CHECKS.glob("*.sql"):
        check = read_check(path)
        if check.limit is not None:
            assert check.advice, path.name


def test_an_unknown_check_in_the_config_is_refused() -> None:
    with pytest.raises(SettingsError, match="nearly_empty"):
        settings_of(quality={"limits": {"nearly_emptyy": 1}})


def test_reports_hold_no_nan(tmp_path: Path) -> None:
    own_check(tmp_path / "checks", "-- title: a\n-- unit: rows\n-- limit: 0\nSELECT 'nan'::DOUBLE")
    chosen = settings_of(quality={"checks_dir": str(tmp_path / "checks")})
    build, chosen = made(tmp_path, sound(20), chosen)
    check_build(build, chosen)
    text = build.quality_report.read_text()
    assert value(json.loads(text), "mine") is None
    assert "NaN" not in text


# -- what the facts measure


@settings(max_examples=15, deadline=None)
@given(
    head=st.lists(st.integers(1000, 4000), max_size=80, unique=True),
    cycle=st.lists(st.integers(10, 900), min_size=1, max_size=40, unique=True),
    times=st.integers(1, 40),
)
def test_a_loop_is_what_fills_the_end_of_an_answer(
    tmp_path_factory: pytest.TempPathFactory, head: list[int], cycle: list[int], times: int
) -> None:
    answer = good(0, output_ids=[*head, *(cycle * times), STOP])
    ids = [*head, *(cycle * times), STOP]
    tail = ids[len(ids) - 1 - min(256, len(ids) // 2) : -1]
    looping = len(tail) >= 24 and any(tail[period:] == tail[:-period] for period in range(1, len(tail) // 4 + 1))
    report = check_build(*made(tmp_path_factory.mktemp("loop"), [answer]))
    assert value(report, "loops") == int(looping)


def facts_of(build: BuildPaths, chosen: Settings, facts: dict[str, Any], column: str) -> list[tuple[int, int]]:
    """A column of `answers` beside where </think> is in the ids."""
    with connect(build) as connection:
        prepare(connection, chosen, facts)
        return connection.execute(
            f"SELECT a.{column}, coalesce(list_position(c.output_ids, {CLOSE}), 0) FROM answers a "
            "JOIN completions c USING (conversation_id, turn)"
        ).fetchall()


def test_thinking_is_counted_in_tokens(tmp_path: Path) -> None:
    build, chosen = made(tmp_path, [thinking(number, number % 2 == 0) for number in range(8)], settings_of(**THINKING))
    rows = facts_of(build, chosen, build_facts(build), "thinking_tokens")
    assert sorted(rows) == [(40, 0)] * 4 + [(41, 41)] * 4


def test_thinking_that_is_closed_in_words_alone_is_not_closed(tmp_path: Path) -> None:
    """An answer that spells </think> with other tokens, as one about this very marker does."""
    spelled = [replace(thinking(number), output_ids=[*ids_of(long_answer(number, 90)), STOP]) for number in range(4)]
    build, chosen = made(tmp_path, spelled, settings_of(**THINKING))
    assert facts_of(build, chosen, build_facts(build), "closed") == [(False, 0)] * 4


def test_without_a_token_for_it_the_text_says_where_thinking_ends(tmp_path: Path) -> None:
    build, chosen = made(tmp_path, [thinking(number) for number in range(4)], settings_of(**THINKING))
    facts = build_facts(build)
    facts["model"]["think_close_ids"] = []
    rows = facts_of(build, chosen, facts, "thinking_tokens")
    assert all(closing == 41 and abs(measured - closing) <= 4 for measured, closing in rows)


# -- loops anywhere


def loop_by_hand(ids: Sequence[int]) -> int:
    """repetition.py's rule, read literally."""
    for least, periods in ((128, range(1, 33)), (512, range(33, 129)), (2048, range(129, 513))):
        for period in periods:
            run = 0
            for index in range(period, len(ids)):
                run = run + 1 if ids[index] == ids[index - period] else 0
                if run == least:
                    return index - run - period + 2
    return 0


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from([1, 2, 7, 31, 32, 33, 128, 129]), st.integers(0, 2600)),
        min_size=1,
        max_size=4,
    ),
    st.randoms(use_true_random=False),
)
def test_a_loop_in_the_middle_is_found_where_it_begins(shapes: list[tuple[int, int, int]], random: Random) -> None:
    answers = []
    for before, period, length in shapes:
        cycle = [random.randrange(100) for _ in range(period)]
        middle = (cycle * (length // period + 1))[:length]
        answers.append([random.randrange(1000, 4000) for _ in range(before)] + middle + [4001, 4002])
    with duckdb.connect() as connection:
        register(connection)
        found = connection.execute("SELECT loop_at(ids) FROM (SELECT unnest($1::INTEGER[][]) AS ids)", [answers])
        assert [row[0] for row in found.fetchall()] == [loop_by_hand(answer) for answer in answers]


def test_an_answer_that_came_out_of_its_loop_is_one(tmp_path: Path) -> None:
    looped = [*ids_of(long_answer(1, 90)), *(list(range(20, 31)) * 20), *ids_of(long_answer(2, 300)), STOP]
    report = check_build(*made(tmp_path, [*sound(19), good(19, output_ids=looped)]))
    assert value(report, "loops") == pytest.approx(0.05)
    (example,) = next(check for check in report["checks"] if check["name"] == "loops")["examples"]
    assert "from token 91 of 611" in example["what"]
