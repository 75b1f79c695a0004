"""The audit of an answer: what is kept, what is cut, what is tried again, and what is a server's fault."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.engines import Answer, Fault
from shardmill.generate.audit import (
    ENDLESS_IDS,
    MIN_REPEATS,
    Degenerate,
    Faulty,
    Kept,
    Useless,
    Verdict,
    audit,
    cycle_length,
    endless,
)
from shardmill.generate.reasons import MEANING, FailReason

STOPS = frozenset({2, 4})
VOCABULARY = 1000


def judged(ids: list[int], finish: str = "stop", matched: int | str | None = 2, **changes: int) -> Verdict:
    answer = Answer(
        output_ids=ids,
        finish=finish,
        matched=matched,
        prompt_tokens=changes.get("prompt_tokens", 7),
        completion_tokens=changes.get("completion_tokens", len(ids)),
        accept_length=None,
        latency_s=1.0,
    )
    return audit(answer, 7, STOPS, VOCABULARY, changes.get("max_new_tokens", 8192))


def prose(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(10, VOCABULARY) for _ in range(length)]


def test_a_whole_answer_is_kept_as_it_is() -> None:
    ids = [*prose(50), 2]
    assert judged(ids) == Kept(ids, "stop", cut=False)
    assert judged(prose(50), "length", None) == Kept(prose(50), "length", cut=False)


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("stop", sorted(STOPS))
def test_junk_after_the_first_stop_id_is_cut_and_the_reason_set_right(finish: str, stop: int) -> None:
    ids = [*prose(50), stop, 77, 2, 78]
    assert judged(ids, finish) == Kept([*prose(50), stop], "stop", cut=True)


def test_more_than_was_asked_for_is_cut_to_length() -> None:
    assert judged(prose(20), "length", None, max_new_tokens=16) == Kept(prose(20)[:16], "length", cut=True)
    assert judged([*prose(20), 2], "stop", 2, max_new_tokens=16) == Kept(prose(20)[:16], "length", cut=True)
    assert judged([*prose(15), 2], "stop", 2, max_new_tokens=16) == Kept([*prose(15), 2], "stop", cut=False)


@pytest.mark.parametrize(
    ("ids", "finish"), [([], "stop"), ([], "length"), ([2], "stop"), ([4], "stop"), ([2, 50, 51], "length")]
)
def test_nothing_said_is_empty(ids: list[int], finish: str) -> None:
    assert judged(ids, finish) == Useless(Degenerate.EMPTY)


@pytest.mark.parametrize(
    ("verdict", "fault"),
    [
        (judged([*prose(5), 2], completion_tokens=5), Fault.COUNTS_DISAGREE),
        (judged([*prose(5), 2], prompt_tokens=8), Fault.COUNTS_DISAGREE),
        (judged([10, VOCABULARY, 2]), Fault.BAD_IDS),
        (judged([10, -1, 2]), Fault.BAD_IDS),
        (judged(prose(5)), Fault.BAD_FINISH),
        (judged(prose(5), "stop", "some text"), Fault.BAD_FINISH),
    ],
)
def test_what_does_not_fit_together_is_the_servers_fault(verdict: Verdict, fault: Fault) -> None:
    assert isinstance(verdict, Faulty)
    assert verdict.fault is fault
    assert verdict.foreign_stop is None


def test_a_stop_at_an_id_that_is_none_of_ours_is_named() -> None:
    verdict = judged([*prose(5), 99], "stop", 99)
    assert isinstance(verdict, Faulty)
    assert verdict.foreign_stop == 99


@pytest.mark.parametrize("period", [1, 2, 3, 7, 40, 64])
def test_an_endless_cycle_is_found_also_after_a_good_start(period: int) -> None:
    cycle = prose(period, seed=1)
    looped = [*prose(300), *cycle * (ENDLESS_IDS // period + MIN_REPEATS)]
    assert judged(looped, "length", None) == Useless(Degenerate.REPETITION)


def test_a_short_answer_of_nothing_but_one_id_is_a_repetition() -> None:
    assert judged([0] * 96, "length", None) == Useless(Degenerate.REPETITION)
    assert judged([*prose(30), *[11, 12] * 33], "length", None) == Useless(Degenerate.REPETITION)


@pytest.mark.parametrize(
    "ids",
    [
        [*prose(300), *[61] * 250],  # a line of "=" cut by length
        [*prose(40), *[61] * 30],
        [*prose(100), *[8, 9] * 40],  # a table's rule
        [61] * 80 + prose(200),  # a loop that ended
        [*prose(500), *prose(150, seed=3) * 3],  # a paragraph said three times
        [*prose(10), *[5, 6, 7, 8] * 2],
    ],
    ids=["line", "short line", "table rule", "loop that ended", "paragraph thrice", "short"],
)
def test_ordinary_repetition_is_kept(ids: list[int]) -> None:
    assert judged(ids, "length", None) == Kept(ids, "length", cut=False)


def test_a_long_table_with_changing_cells_is_kept() -> None:
    source = random.Random(5)
    rows = [[30, source.randrange(100, 900), 30, source.randrange(100, 900), 30, 31] for _ in range(1000)]
    ids = [token for row in rows for token in row]
    assert judged(ids, "length", None) == Kept(ids, "length", cut=False)


def test_an_answer_that_stopped_by_itself_is_endless_only_when_it_is_nothing_else() -> None:
    assert isinstance(judged([*[61] * 900, 2]), Kept)
    assert judged([*[0] * 5000, 2]) == Useless(Degenerate.REPETITION)
    assert isinstance(judged([*prose(3000), *[0] * 2000, 2]), Kept)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=120), st.integers(1, 60))
def test_the_cycle_detector_agrees_with_its_definition(ids: list[int], least: int) -> None:
    def repeats(period: int) -> bool:
        tail = max(least, MIN_REPEATS * period)
        return tail <= len(ids) and all(ids[i] == ids[i - period] for i in range(len(ids) - tail + period, len(ids)))

    found = next((period for period in range(1, len(ids) + 1) if repeats(period)), 0)
    assert cycle_length(ids, least) == found


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=100), st.sampled_from(["stop", "length"]))
def test_what_is_kept_obeys_the_contract(ids: list[int], finish: str) -> None:
    verdict = judged(ids, finish, 2)
    if isinstance(verdict, Kept):
        kept = verdict.output_ids
        assert kept == ids[: len(kept)] and kept
        stops = [index for index, token in enumerate(kept) if token in STOPS]
        assert stops == ([len(kept) - 1] if verdict.finish == "stop" else [])
        assert verdict.cut == (len(kept) < len(ids))


def test_random_ids_are_never_endless() -> None:
    assert not any(endless(prose(length, seed=length), "length") for length in range(1, 400))


def test_every_reason_is_explained() -> None:
    assert set(MEANING) == set(FailReason)
    assert {str(kind) for kind in Degenerate} <= {str(reason) for reason in FailReason}
