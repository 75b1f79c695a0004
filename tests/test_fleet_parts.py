"""Judgements of the fleet that need no process: a server's record, patience, endpoints, what servers must be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardmill.engines.base import Fault, ServerInfo
from shardmill.errors import SettingsError
from shardmill.fleet.endpoints import endpoints, read_file
from shardmill.fleet.patience import Patience
from shardmill.fleet.record import Record
from shardmill.fleet.site import Expectation, State
from shardmill.fleet.timing import VARIABLE, timing
from shardmill.home import Home, fleet_key
from shardmill.settings import Settings, resolve


def answered(record: Record, count: int, accept: float | None = None, degenerate: bool = False) -> None:
    for _ in range(count):
        record.answered(1.0, 2.0, 100, accept, degenerate)


# A server's record


def test_three_faults_in_a_row_are_suspect_and_an_answer_clears_them() -> None:
    record = Record(0.0)
    for _ in range(10):
        record.failed(Fault.SERVER_ERROR, "500")
        record.failed(Fault.TIMEOUT, "")
        answered(record, 1)
    assert not record.suspect
    for _ in range(3):
        record.failed(Fault.RESET, "peer")
    assert record.suspect and record.last_fault == "reset: peer"
    assert record.faults == {"server_error": 10, "timeout": 10, "reset": 3}


def test_refused_is_suspect_at_once_and_a_full_queue_never() -> None:
    record = Record(0.0)
    for _ in range(50):
        record.failed(Fault.QUEUE_FULL, "")
    assert not record.suspect
    record.failed(Fault.REFUSED, "")
    assert record.suspect


def test_accept_length_falling_to_one_is_bad_whatever_it_was_on_average() -> None:
    record = Record(0.0)
    answered(record, 5000, 3.3)
    assert record.bad is None
    answered(record, 12, 1.0)
    assert record.bad is not None and "from 3.30 to" in record.bad


def test_a_draft_that_never_was_any_good_is_not_bad() -> None:
    record = Record(0.0)
    answered(record, 500, 1.1)
    assert record.bad is None


def test_ordinary_swings_of_the_accept_length_are_not_bad() -> None:
    record = Record(0.0)
    answered(record, 100, 3.3)
    answered(record, 100, 1.9)  # long contexts
    assert record.bad is None


def test_repeated_output_is_bad_and_one_in_ten_is_not() -> None:
    record = Record(0.0)
    for _ in range(20):
        answered(record, 9)
        answered(record, 1, degenerate=True)
    assert record.bad is None
    answered(record, 6, degenerate=True)
    assert record.bad is not None and "repeat" in record.bad


def test_refused_prompts_say_nothing_about_a_server() -> None:
    record = Record(0.0)
    for _ in range(40):
        record.answered(1.0, 0.1, 0, None, False)
    assert record.bad is None and record.accept_length is None and record.answers == 40


# Patience


def member(state: State, failures: int = 0, launched: bool = True, why: str = "") -> Any:
    launcher = object() if launched else None
    return SimpleNamespace(name="gpu0", state=state, failures=failures, launcher=launcher, why=why)


def job(joined: float = 0.0, patience_s: float = 10.0) -> Any:
    return SimpleNamespace(joined=joined, patience_s=patience_s)


def refusals(patience: Patience, now: float, *members: Any, joined: float = 0.0) -> list[tuple[str, str]]:
    return [(kind, message) for _, kind, message in patience.refusals(now, members, [job(joined)])]


def test_patience_begins_when_the_last_server_left() -> None:
    patience = Patience(0.0)
    assert refusals(patience, 100.0, member(State.READY)) == []
    lost = member(State.SUSPECT, launched=False, why="nothing listens at its port.")
    assert refusals(patience, 109.0, lost) == []
    ((kind, message),) = refusals(patience, 110.5, lost)
    assert kind == "no_servers"
    assert message == "No server was left for 10 s (generate.patience_s): gpu0 nothing listens at its port."
    assert refusals(patience, 110.5, lost, joined=105.0) == [], "a job that came later waits for as long"


def test_a_first_start_takes_as_long_as_it_takes_and_repeated_failures_do_not() -> None:
    patience = Patience(0.0)
    for now in (5.0, 500.0, 1500.0):
        assert refusals(patience, now, member(State.STARTING)) == []
    assert refusals(patience, 1520.0, member(State.STARTING, failures=3)) != []


def test_given_up_is_told_at_once_and_a_set_up_fault_is_called_one() -> None:
    assert refusals(Patience(0.0), 1.0, member(State.FAILED, why="x"))[0][0] == "no_servers"
    mixed = [member(State.FAILED, why="x"), member(State.REFUSED, why="The key is wrong.")]
    assert refusals(Patience(0.0), 1.0, *mixed) == [("setup", "No server can be used: gpu0 The key is wrong.")]
    assert refusals(Patience(0.0), 1.0, member(State.REFUSED), member(State.BACKOFF)) == []
    assert refusals(Patience(0.0), 11.0) == [
        ("no_servers", "No server was left for 10 s (generate.patience_s): no endpoint is given.")
    ]


# What servers must agree with

INFO = ServerInfo("Qwen3.6-27B", 248320, 262144, 16, 48, None, "0.5.23")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"vocab_size": 49152}, "vocabulary of 49152, but the prompts were made for one of 248320"),
        ({"context": 4096}, "context of 4096 tokens, but model.context is 8192"),
        ({"vocab_size": None, "context": None}, None),
    ],
)
def test_another_vocabulary_or_a_smaller_context_is_refused(changes: dict[str, Any], words: str | None) -> None:
    expected = Expectation("Qwen/Qwen3.6-27B", 8192, 248320)
    refusal = expected.refusal("http://h:1", dataclasses.replace(INFO, **changes))
    assert refusal is None if words is None else refusal is not None and words in refusal


@pytest.mark.parametrize(
    "name", ["Qwen3.6-27B", "/dev/shm/shardmill-0/qwen3.6-27b-0123456789", "Qwen/Qwen3.6-27B", None]
)
def test_a_name_that_means_the_same_is_not_warned_of(name: str | None) -> None:
    expected = Expectation("Qwen/Qwen3.6-27B", 8192)
    assert expected.warning("http://h:1", dataclasses.replace(INFO, model_name=name)) is None
    assert expected.warning("http://h:1", dataclasses.replace(INFO, model_name="Llama-4")) is not None


# Endpoints and the fleet's own folder


def with_servers(**servers: Any) -> Settings:
    return resolve({"servers": {"engine": "sglang", **servers}})


def test_endpoints_of_both_kinds_each_once(tmp_path: Path) -> None:
    listed = tmp_path / "list"
    listed.write_text("# two\nhttp://b:2/ # slash\n\nhttp://a:1\nhttps://c/path/\n")
    settings = with_servers(endpoints=["http://a:1/"], endpoints_file=str(listed))
    assert [(e.name, e.url) for e in endpoints(settings)] == [
        ("a:1", "http://a:1"),
        ("b:2", "http://b:2"),
        ("c/path", "https://c/path"),
    ]
    assert endpoints(with_servers(endpoints_file=str(tmp_path / "not there yet"))) == []


@pytest.mark.parametrize("line", ["host:1", "ftp://a", "http://", "http://me:secret@a:1"])
def test_a_line_that_is_no_url_is_named(tmp_path: Path, line: str) -> None:
    listed = tmp_path / "list"
    listed.write_text(f"http://a:1\n{line}\n")
    with pytest.raises(SettingsError, match="Line 2 of the endpoints file") as raised:
        read_file(listed)
    assert "secret" not in str(raised.value)


def test_the_key_follows_from_what_decides_which_servers_these_are() -> None:
    plain = with_servers(endpoints=["http://a:1"])
    assert fleet_key(plain) == fleet_key(resolve({**plain.as_dict(), "name": "other", "sampling": {"temperature": 0}}))
    for other in ({"args": {"x": 1}}, {"endpoints": ["http://b:1"]}, {"engine": "llamacpp"}):
        assert fleet_key(with_servers(**{"endpoints": ["http://a:1"], **other})) != fleet_key(plain)
    assert Home.of(plain).root.is_absolute()


def test_times_can_be_set_and_a_wrong_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"tick_s": 0.5}')
    assert timing().tick_s == 0.5 and timing().probe_timeout_s == 60
    monkeypatch.setenv(VARIABLE, '{"tock_s": 0.5}')
    with pytest.raises(SettingsError, match="tock_s"):
        timing()


def test_casts_are_honest() -> None:
    """The stand-ins above have what the real classes have."""
    from shardmill.fleet.jobs import Job
    from shardmill.fleet.member import Member

    names = {field.name for field in dataclasses.fields(Member)}
    assert set(vars(member(State.READY))) <= names
    assert set(vars(cast(Any, job()))) <= {field.name for field in dataclasses.fields(Job)}
