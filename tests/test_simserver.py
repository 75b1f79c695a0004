"""The simulated fleet itself: it agrees with what real servers answered, and each of its faults does what it says."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simserver import SimConfig, SimFleet, answer, prompt_hash, write_command
from simserver.__main__ import parse
from simserver.faults import ANSWER_KINDS, KINDS, REFUSAL_KINDS
from simserver.fleet import python_environment

PROMPT = list(range(100, 140))
GREEDY: dict[str, Any] = {"max_new_tokens": 32, "temperature": 0}


def _golden_folder() -> Path | None:
    root = Path(__file__).resolve().parent.parent
    places = [os.environ.get("SHARDMILL_SHARED"), root.parent / "shared", "/work/shared"]
    found = [Path(place) / "golden" for place in places if place and (Path(place) / "golden").is_dir()]
    return found[0] if found else None


GOLDEN = _golden_folder()
needs_golden = pytest.mark.skipif(
    GOLDEN is None, reason="the recorded answers of real servers (shared/golden) are not here"
)


def call(
    url: str, path: str, body: object = None, method: str | None = None, timeout: float = 20.0, **headers: Any
) -> tuple[int, dict[str, str], bytes]:
    """One request on a fresh connection: status, headers, raw body."""
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=timeout)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
        got = connection.getresponse()
        return got.status, {k.lower(): v for k, v in got.getheaders()}, got.read()
    finally:
        connection.close()


def generate(url: str, ids: list[int] | None = None, timeout: float = 20.0, **sampling: Any) -> Any:
    status, _, body = call(
        url, "/generate", {"input_ids": ids or PROMPT, "sampling_params": {**GREEDY, **sampling}}, timeout=timeout
    )
    assert status == 200, body
    return json.loads(body)


@pytest.fixture(scope="module")
def fleet() -> Iterator[SimFleet]:
    """0: instant. 1: instant, with MTP."""
    with SimFleet(2, {"instant": True, "length_mean": 20.0, "length_cap": 30}, [{}, {"mtp": True}]) as fleet:
        yield fleet


@pytest.fixture
def clean(fleet: SimFleet) -> SimFleet:
    for i in range(len(fleet)):
        if not fleet.alive(i):
            fleet.start(i)
        fleet.faults(i, [])
        fleet.wait_ready(i)
    return fleet


# Against the recorded answers


def _recorded(version: str, name: str) -> tuple[dict[str, Any], Any]:
    assert GOLDEN is not None
    folder = GOLDEN / f"sglang-{version}"
    record = json.loads((folder / f"{name}.request.json").read_text())
    bodies = list(folder.glob(f"{name}.body.*"))
    raw = bodies[0].read_text() if bodies else ""
    try:
        return record, json.loads(raw)
    except ValueError:
        return record, raw


def _expanded(body: Any) -> Any:
    """A recorded request with its shortened list of ids made whole again."""
    ids = body.get("input_ids") if isinstance(body, dict) else None
    if isinstance(ids, list) and ids and isinstance(ids[-1], str):
        body = {**body, "input_ids": [ids[0]] * int(ids[-1].split()[1])}
    return body


def _shape(value: Any) -> Any:
    """Keys and types, all the way down. Numbers are one type; a list is known by the shapes of its elements."""
    if isinstance(value, dict):
        return {key: _shape(one) for key, one in value.items()}
    if isinstance(value, list):
        shapes: list[Any] = []
        for one in value:
            if _shape(one) not in shapes:
                shapes.append(_shape(one))
        return shapes
    return "number" if type(value) in (int, float) else type(value).__name__


def _same_shape(got: Any, want: Any) -> None:
    """`finish_reason` must be of the real shape of its own type: the stand-in may stop where the real model did not."""
    shapes = {"stop": {"type": "str", "matched": "number"}, "length": {"type": "str", "length": "number"}}
    for body in (got, want):
        for one in body if isinstance(body, list) else [body]:
            if "meta_info" in one:
                # Cached tokens are not simulated: the field is null where nothing was cached, in both versions.
                one["meta_info"]["cached_tokens_details"] = None
                finish = one["meta_info"]["finish_reason"]
                if finish is not None and finish["type"] in shapes:
                    assert _shape(finish) == shapes[finish["type"]]
                    one["meta_info"]["finish_reason"] = None
    assert _shape(got) == _shape(want)


@pytest.fixture(scope="module")
def twins() -> Iterator[dict[str, SimFleet]]:
    """A stand-in for each recorded server, which gives the recorded greedy answer to the recorded prompt."""
    made: dict[str, SimFleet] = {}
    try:
        for version, context, vocabulary in (("0.5.23", 8192, 49152), ("0.5.11", 4096, 151936)):
            answers = {}
            if GOLDEN is not None:
                record, body = _recorded(version, "generate_ids_greedy")
                answers = {
                    prompt_hash(record["request"]["body"]["input_ids"]): [i for i in body["output_ids"] if i != 2]
                }
            config = {
                "instant": True, "version": version, "context": context, "vocab_size": vocabulary, "answers": answers,
                "max_running_requests": 16, "mamba_slots": None, "max_total_tokens": 32768,
            }  # fmt: skip
            made[version] = SimFleet(1, config)
            made[version].__enter__()
        yield made
    finally:
        for one in made.values():
            one.close()


SAME_WORDS = [
    "err_404", "err_empty_ids", "err_invalid_json", "err_method", "err_neg_temperature", "err_no_input",
    "err_prompt_plus_new_too_long", "err_prompt_too_long", "err_unknown_sampling_key", "err_wrong_type", "flush_cache",
    "health", "health_generate", "ready", "abort_request",
]  # fmt: skip
SAME_ANSWER = [
    "generate_ids_greedy", "generate_length", "generate_stop_token_ids", "generate_ids_rid_nospecial",
    "err_unknown_top_key",
]  # fmt: skip
SAME_SHAPE = [
    "generate_batch", "generate_ignore_eos", "generate_n2", "generate_sampled_seed", "generate_text", "get_model_info",
    "model_info", "server_info", "tokenize", "v1_loads", "v1_models",
]  # fmt: skip


def _cases(names: list[str]) -> list[Any]:
    return [
        pytest.param(version, name, id=f"{version}-{name}")
        for version in ("0.5.23", "0.5.11")
        for name in names
        if GOLDEN is None or (GOLDEN / f"sglang-{version}" / f"{name}.request.json").exists()
    ]


def _replay(twins: dict[str, SimFleet], version: str, name: str) -> tuple[Any, Any]:
    """The stand-in's and the real server's body to the same request, after their statuses and headers agreed."""
    record, want = _recorded(version, name)
    request = record["request"]
    body = _expanded(request["body"])
    raw = body.encode() if isinstance(body, str) else b"" if body is None else json.dumps(body).encode()
    status, headers, got = call(
        twins[version].urls[0], request["path"], raw or None, request["method"], **{"content-type": "application/json"}
    )
    assert status == record["status"]
    for name_of in ("server", "content-type"):
        recorded_headers = {key.lower(): value for key, value in record["headers"].items()}
        assert headers.get(name_of) == recorded_headers.get(name_of)
    try:
        return json.loads(got), want
    except ValueError:
        return got.decode(), want


@needs_golden
@pytest.mark.parametrize(("version", "name"), _cases(SAME_WORDS))
def test_refusals_are_the_real_ones_word_for_word(twins: dict[str, SimFleet], version: str, name: str) -> None:
    got, want = _replay(twins, version, name)
    assert got == want


@needs_golden
@pytest.mark.parametrize(("version", "name"), _cases(SAME_ANSWER))
def test_answers_have_the_real_shape_and_the_same_ids(twins: dict[str, SimFleet], version: str, name: str) -> None:
    got, want = _replay(twins, version, name)
    for key in ("output_ids", "prompt_token_ids"):
        assert got.get(key) == want.get(key)
    for key in ("finish_reason", "prompt_tokens", "completion_tokens", "weight_version"):
        assert got["meta_info"][key] == want["meta_info"][key]
    _same_shape(got, want)


@needs_golden
@pytest.mark.parametrize(("version", "name"), _cases(SAME_SHAPE))
def test_other_bodies_have_the_real_shape(twins: dict[str, SimFleet], version: str, name: str) -> None:
    got, want = _replay(twins, version, name)
    _same_shape(got, want)


@needs_golden
def test_a_streamed_answer_has_the_real_chunks(twins: dict[str, SimFleet]) -> None:
    record, want = _recorded("0.5.23", "generate_stream")
    status, headers, got = call(twins["0.5.23"].urls[0], "/generate", record["request"]["body"])
    assert (status, headers["content-type"]) == (200, record["headers"]["content-type"])
    mine, real = ([part for part in text.split("\n\n") if part] for text in (got.decode(), want))
    assert mine[-1] == real[-1] == "data: [DONE]"
    ours, theirs = ([json.loads(part[6:]) for part in parts[:-1]] for parts in (mine, real))
    for at in (0, 1, 2, 3, -1):  # the real server joined two of its last chunks
        assert ours[at]["output_ids"] == theirs[at]["output_ids"]
        _same_shape(ours[at], theirs[at])
    assert len(ours) == len(ours[-1]["output_ids"])


@needs_golden
@pytest.mark.parametrize("version", ["0.5.23", "0.5.11"])
def test_metrics_are_series_of_the_real_server(twins: dict[str, SimFleet], version: str) -> None:
    record, want = _recorded(version, "metrics")
    status, headers, got = call(twins[version].urls[0], "/metrics")
    assert (status, headers["content-type"]) == (200, record["headers"]["Content-Type"])

    def series(text: str) -> set[str]:
        names = {line.rsplit(" ", 1)[0] for line in text.splitlines() if line and not line.startswith("#")}
        return {name.split('pid="')[0] for name in names}

    def types(text: str) -> set[str]:
        return {line for line in text.splitlines() if line.startswith("# TYPE")}

    assert len(series(got.decode())) > 15
    assert series(got.decode()) <= series(want)
    assert types(got.decode()) <= types(want)


@needs_golden
@pytest.mark.parametrize("version", ["0.5.23", "0.5.11"])
def test_abort_duplicate_and_full_queue_are_the_real_ones(version: str) -> None:
    """What needs a request in flight: a slow server with one slot and no queue."""
    assert GOLDEN is not None
    config = {
        "version": version,
        "mamba_slots": None,
        "max_running_requests": 1,
        "max_queued_requests": 0,
        "vocab_size": 151936,
    }
    with SimFleet(1, {**config, "styles": {"loop": 1.0}}) as fleet, ThreadPoolExecutor(1) as pool:
        url = fleet.urls[0]
        record, want = _recorded(version, "generate_aborted")
        running = pool.submit(call, url, "/generate", record["request"]["body"])
        fleet.wait_for(lambda: fleet.stats(0)["running"] == 1, "the request to run")
        duplicate, duplicate_body = _recorded(version, "dup_rid_second")
        status, _, got = call(url, "/generate", duplicate["request"]["body"] | {"rid": "abort-me"})
        assert status == duplicate["status"] == 400
        assert got.decode() == json.dumps(duplicate_body, separators=(",", ":")).replace("dup", "abort-me")
        status, _, got = call(url, "/generate", {"input_ids": PROMPT})
        assert (status, json.loads(got)) == (
            503,
            json.loads((GOLDEN / "sglang-0.5.23" / "err_queue_full.body.json").read_text()),
        )
        time.sleep(0.15)
        assert call(url, "/abort_request", {"rid": "abort"})[0] == 200  # by prefix
        status, _, got = running.result(10)
        body = json.loads(got)
        assert status == 200
        _same_shape(body, want)
        assert body["meta_info"]["finish_reason"] == want["meta_info"]["finish_reason"]
        assert 0 < len(body["output_ids"]) == body["meta_info"]["completion_tokens"] < 2000


def test_mtp_adds_the_spec_fields_and_their_absence_means_none(fleet: SimFleet, clean: SimFleet) -> None:
    plain, mtp = (generate(url)["meta_info"] for url in fleet.urls)
    assert not [name for name in plain if name.startswith("spec_")]
    assert mtp["spec_accept_length"] == pytest.approx(mtp["completion_tokens"] / mtp["spec_verify_ct"])
    assert 0 <= mtp["spec_accept_rate"] <= 1
    info = json.loads(call(fleet.urls[1], "/server_info")[2])
    assert (info["max_running_requests"], info["speculative_algorithm"]) == (48, "EAGLE")
    assert info["internal_states"][0]["effective_max_running_requests_per_dp"] == 16
    assert 1 <= info["internal_states"][0]["avg_spec_accept_length"] <= 4


# Determinism


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.integers(0, 900), min_size=1, max_size=30),
    limits=st.tuples(st.integers(1, 120), st.integers(1, 120)),
    style=st.sampled_from(["random", "think", "empty_think", "ok", "loop"]),
    sampling=st.fixed_dictionaries(
        {"temperature": st.sampled_from([0, 0.7])},
        optional={"stop_token_ids": st.lists(st.integers(0, 999), max_size=40)},
    ),
)
def test_an_answer_is_a_pure_function_and_the_limit_only_cuts_it(
    ids: list[int], limits: tuple[int, int], style: str, sampling: dict[str, Any]
) -> None:
    config = SimConfig(vocab_size=1000, styles={style: 1.0}, ok_ids=(500, 501))
    short, long = sorted(limits)
    a, b = (answer(config, ids, sampling, limit) for limit in (short, long))
    assert a == answer(config, list(ids), dict(sampling), short)
    assert a.ids == b.ids[:short] and 0 < len(a.ids) <= short
    stops = {*config.eos_ids, *sampling.get("stop_token_ids", ())}
    assert not set(a.ids[:-1]) & stops
    assert a.matched == (a.ids[-1] if a.ids[-1] in stops else None)
    assert a.matched is not None or len(a.ids) == short
    assert all(0 <= i < config.vocab_size for i in a.ids)


def test_lengths_have_the_mean_that_was_asked_for() -> None:
    config = SimConfig(length_mean=200.0, length_sigma=0.9)
    lengths = [len(answer(config, [i, 7], {"temperature": 0}, 8192).ids) for i in range(2000)]
    assert 180 < sum(lengths) / len(lengths) < 220
    assert max(lengths) > 1000


def test_servers_agree_with_each_other_and_with_the_function(fleet: SimFleet, clean: SimFleet) -> None:
    for start in range(5):
        ids = list(range(start, start + 30))
        expected = answer(SimConfig(length_mean=20.0, length_cap=30), ids, GREEDY, 32).ids
        assert [generate(url, ids)["output_ids"] for url in fleet.urls] == [expected, expected]
    different = {tuple(generate(fleet.urls[0], PROMPT, temperature=t)["output_ids"]) for t in (0, 0.5, 1.0)}
    assert len(different) == 3


def test_a_stop_string_cuts_after_its_id(fleet: SimFleet, clean: SimFleet) -> None:
    whole = generate(fleet.urls[0])
    word = f" {whole['output_ids'][2]:x}"
    got = generate(fleet.urls[0], stop=[word])
    assert got["output_ids"] == whole["output_ids"][:3]
    assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
    assert word not in got["text"] and whole["text"].startswith(got["text"])


def test_the_scheduler_clamps_a_limit_that_just_fits_the_context(fleet: SimFleet, clean: SimFleet) -> None:
    got = generate(fleet.urls[0], [5] * 8100, ignore_eos=True, max_new_tokens=92)
    assert got["meta_info"]["finish_reason"] == {"type": "length", "length": 90}
    assert len(got["output_ids"]) == 90


# Timing


def test_slots_queue_and_disconnects() -> None:
    config = {"max_running_requests": 8, "mamba_slots": 10, "time_scale": 5.0, "styles": {"loop": 1.0}}
    with SimFleet(1, config) as fleet, ThreadPoolExecutor(5) as pool:
        url = fleet.urls[0]
        waiting = [pool.submit(generate, url, [i + 1], max_new_tokens=400) for i in range(3)]
        fleet.wait_for(
            lambda: fleet.stats(0)["running"] == 2 and fleet.stats(0)["queued"] == 1, "two slots and a queue"
        )
        gone = socket.create_connection(("127.0.0.1", fleet.configs[0]["port"]))
        body = json.dumps({"input_ids": [9], "sampling_params": {"max_new_tokens": 8000}}).encode()
        gone.sendall(b"POST /generate HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        fleet.wait_for(lambda: fleet.stats(0)["queued"] == 2, "a fourth request")
        gone.close()
        fleet.wait_for(lambda: fleet.stats(0)["queued"] == 1, "the disconnect to be noticed", 2.0)
        latencies = sorted(one.result(20)["meta_info"]["e2e_latency"] for one in waiting)
        two_at_once, alone = 400 * (0.02 + 2 * 0.0006), 400 * (0.02 + 0.0006)
        assert latencies[0] == pytest.approx(two_at_once, rel=0.1)
        assert latencies[2] == pytest.approx(two_at_once + alone, rel=0.1)
        assert [line["outcome"] for line in fleet.log(0) if line["event"] == "done"].count("gone") == 1


def test_speculation_makes_it_as_much_faster_as_it_accepts() -> None:
    config = {"time_scale": 50.0, "styles": {"loop": 1.0}, "accept_sd": 0.0, "accept_mean": 3.0}
    with SimFleet(2, config, [{"mtp": False}, {"mtp": True}]) as fleet:
        slow, fast = (generate(url, max_new_tokens=4000)["meta_info"]["e2e_latency"] for url in fleet.urls)
    assert slow / fast == pytest.approx(3.0, rel=0.1)


# Faults


def test_every_refusal(clean: SimFleet) -> None:
    url = clean.urls[0]
    for kind in REFUSAL_KINDS:
        clean.faults(0, {"kind": kind, "times": 1})
        if kind in ("reset_before", "close_before", "hang_request"):
            expected: type[Exception] = {
                "reset_before": ConnectionResetError,
                "close_before": http.client.RemoteDisconnected,
                "hang_request": TimeoutError,
            }[kind]
            with pytest.raises(expected):
                generate(url, timeout=0.3)
        else:
            status, headers, body = call(url, "/generate", {"input_ids": PROMPT, "sampling_params": GREEDY})
            assert status == {
                "error_500": 500, "error_500_text": 500, "queue_full": 503, "waiting_timeout": 503, "rate_limited": 429,
                "error_400": 400, "error_400_string": 400, "error_400_object": 400, "unauthorized": 401,
                "forbidden": 403, "not_found": 404, "html_502": 502, "html_504": 504, "abort_queued": 200,
            }[kind]  # fmt: skip
            if kind == "error_400_string":
                assert isinstance(json.loads(body)["error"], str)
            elif kind == "rate_limited":
                assert headers["retry-after"] == "1"
            elif kind.startswith("html"):
                assert body.startswith(b"<html>")
            elif kind == "abort_queued":
                meta = json.loads(body)["meta_info"]
                assert meta["finish_reason"]["type"] == "abort" and "prompt_tokens" not in meta
        assert generate(url)["output_ids"], kind  # once only


def _is_spoilt(kind: str, body: dict[str, Any], ids: list[int], took: float) -> bool:
    """Whether an answer to PROMPT under 60 new tokens, which should be `ids`, is spoilt as `kind` says."""
    meta: Any = body.get("meta_info")
    got: Any = body.get("output_ids")
    checks: dict[str, Callable[[], Any]] = {
        "stale_close": lambda: got == ids,
        "slow": lambda: got == ids and took > 0.2,
        "abort": lambda: meta["finish_reason"]["type"] == "abort" and got == ids[: len(got)] and meta["prompt_tokens"],
        "nan": lambda: meta["finish_reason"] == {"type": "stop", "matched": "NaN happened"},
        "junk_after_eos": lambda: got[: len(ids)] == ids and len(got) == len(ids) + 3
        and meta["finish_reason"] == {"type": "length", "length": len(got)},
        "zero_loop": lambda: got == [0] * 60 and meta["spec_accept_length"] == 1.0,
        "cycle_loop": lambda: len(got) == 60 and got[-8:-4] == got[-4:],
        "empty_output": lambda: got == [] and meta["completion_tokens"] == 0,
        "missing_output_ids": lambda: "output_ids" not in body,
        "null_output_ids": lambda: got is None and "output_ids" in body,
        "bad_type_ids": lambda: got == [str(i) for i in ids],
        "nested_ids": lambda: got == [ids],
        "no_meta": lambda: meta is None and got == ids,
        "null_finish": lambda: meta["finish_reason"] is None,
        "unknown_finish": lambda: meta["finish_reason"]["type"] not in ("stop", "length", "abort"),
        "wrong_counts": lambda: meta["completion_tokens"] != len(got) == len(ids),
        "wrong_prompt_tokens": lambda: meta["prompt_tokens"] != len(PROMPT),
        "out_of_range": lambda: max(got) >= 49152,
        "negative_id": lambda: min(got) < 0,
        "missing_stop": lambda: got == ids[:-1] and meta["finish_reason"]["type"] == "stop",
        "wrong_id": lambda: meta["id"] == "0" * 32,
        "spec_missing": lambda: got == ids and "spec_accept_length" not in meta,
        "spec_null": lambda: got == ids and meta["spec_accept_length"] is None,
    }  # fmt: skip
    return bool(checks[kind]())


def test_every_spoilt_answer(clean: SimFleet) -> None:
    url, right = clean.urls[1], generate(clean.urls[1], max_new_tokens=60)
    ids: list[int] = right["output_ids"]
    assert right["meta_info"]["finish_reason"]["type"] == "stop"
    seen = set()
    for kind in ANSWER_KINDS:
        clean.faults(1, {"kind": kind, "times": 1, "seconds": 0.2})
        if kind == "reset_mid":
            with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
                generate(url)
        elif kind in ("half_body", "half_chunked"):
            with pytest.raises(http.client.IncompleteRead):
                generate(url)
        else:
            begun = time.monotonic()
            status, _, raw = call(
                url, "/generate", {"input_ids": PROMPT, "sampling_params": GREEDY | {"max_new_tokens": 60}}
            )
            took = time.monotonic() - begun
            assert status == 200
            if kind in ("cut_json", "html_200", "text_200", "empty_200"):
                with pytest.raises(ValueError):
                    json.loads(raw)
                seen.add(kind)
                continue
            body = json.loads(raw)
            if kind in ("list_200", "error_200"):
                assert "output_ids" not in body
                seen.add(kind)
                continue
            assert _is_spoilt(kind, body, ids, took), (kind, body)
        seen.add(kind)
        assert generate(url, max_new_tokens=60)["output_ids"] == ids, kind
    assert seen == set(ANSWER_KINDS)


def test_rules_fire_where_their_conditions_say(clean: SimFleet) -> None:
    url, bad = clean.urls[0], [7, 7, 7]

    def statuses(n: int, ids: list[int] = PROMPT) -> list[int]:
        return [call(url, "/generate", {"input_ids": ids})[0] for _ in range(n)]

    n = clean.stats(0)["requests"]
    clean.faults(0, [{"kind": "error_500", "at": [n + 2]}, {"kind": "queue_full", "prompts": [prompt_hash(bad)]}])
    assert statuses(3) == [200, 500, 200]
    assert statuses(2, bad) == [503, 503]
    clean.faults(0, {"kind": "error_500", "times": 2})
    assert statuses(3) == [500, 500, 200]
    clean.faults(0, {"kind": "error_500", "after_s": 0.3, "until_s": 0.8})
    first = statuses(1)
    time.sleep(0.4)
    middle = statuses(1)
    time.sleep(0.6)
    assert (first, middle, statuses(1)) == ([200], [500], [200])
    clean.faults(0, {"kind": "error_500", "p": 0.3})
    assert 15 < statuses(100).count(500) < 50
    clean.faults(0, {"kind": "error_500", "p": 0.5, "sticky": True})
    for start in range(6):
        assert len(set(statuses(3, [start, start]))) == 1
    assert clean.stats(0)["fired"]["error_500"] > 20
    with pytest.raises(ValueError, match="fault kind"):
        clean.faults(0, {"kind": "meltdown"})
    with pytest.raises(ValueError, match="unknown probability"):
        clean.faults(0, {"kind": "error_500", "probability": 1})


def test_hangs_with_either_health(clean: SimFleet) -> None:
    url = clean.urls[0]
    for health in (200, 503):
        clean.faults(0, [{"kind": "hang", "health": health}])
        with pytest.raises(TimeoutError):
            generate(url, timeout=0.3)
        if health == 200:
            assert call(url, "/health")[0] == 200
        else:  # it takes health_timeout_s, 20 s
            with pytest.raises(TimeoutError):
                call(url, "/health", timeout=0.3)
        clean.faults(0, [])
        assert generate(url)["output_ids"]


def test_what_hung_goes_on_when_the_hang_ends(clean: SimFleet) -> None:
    clean.faults(0, {"kind": "hang", "seconds": 0.5})
    begun = time.monotonic()
    assert generate(clean.urls[0])["output_ids"]
    assert time.monotonic() - begun > 0.3


@pytest.mark.parametrize("kind", ["refuse", "outage"])
def test_a_closed_listener_comes_back(clean: SimFleet, kind: str) -> None:
    clean.faults(0, {"kind": kind, "seconds": 0.6})
    clean.wait_for(lambda: any(line["event"] == kind for line in clean.log(0)), "the listener to close")
    with pytest.raises(ConnectionRefusedError):
        generate(clean.urls[0])
    clean.wait_for(lambda: clean.log(0)[-1]["event"] in ("back", "ready"), "the listener to come back")
    time.sleep(0.1)
    assert generate(clean.urls[0])["output_ids"]


def test_what_an_outage_and_a_refusal_do_to_requests_in_flight() -> None:
    with SimFleet(1, {"styles": {"loop": 1.0}}) as fleet, ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, fleet.urls[0], max_new_tokens=40)
        fleet.wait_for(lambda: fleet.stats(0)["running"] == 1, "the request to run")
        fleet.faults(0, {"kind": "refuse"})
        assert len(running.result(10)["output_ids"]) == 40
        fleet.faults(0, [])
        time.sleep(0.1)
        running = pool.submit(generate, fleet.urls[0], max_new_tokens=4000)
        fleet.wait_for(lambda: fleet.stats(0)["running"] == 1, "the request to run")
        fleet.faults(0, {"kind": "outage", "seconds": 0.1})
        with pytest.raises(ConnectionResetError):
            running.result(10)
        outcomes = [line["outcome"] for line in fleet.log(0) if line["event"] == "done"]
        assert outcomes == ["answered", "lost"]
        assert fleet.stats(0)["running"] == 0


@pytest.mark.parametrize("ids", [[5, 49152], [5, -1]], ids=["out of the vocabulary", "negative"])
def test_a_bad_id_in_a_request_kills_the_server(ids: list[int]) -> None:
    with SimFleet(1, {"instant": True, "kill_delay_s": 0.3}) as fleet:
        begun = time.monotonic()
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            generate(fleet.urls[0], ids)
        assert time.monotonic() - begun > 0.25
        assert fleet.process(0).wait(10) == -signal.SIGKILL
        with pytest.raises(ConnectionRefusedError):
            generate(fleet.urls[0])


def test_death_at_a_request_and_by_a_prompt_and_back_again() -> None:
    poison = [13, 13]
    faults = [{"kind": "die", "at": [3], "starts": [1]}, {"kind": "die", "prompts": [prompt_hash(poison)]}]
    with SimFleet(1, {"instant": True, "faults": faults}) as fleet:
        url = fleet.urls[0]
        for _ in range(2):
            generate(url)
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            generate(url)
        assert fleet.process(0).wait(10) == -signal.SIGKILL
        for _ in range(2):
            fleet.start(0)
            for _ in range(4):
                generate(url)
            with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
                generate(url, poison)
            fleet.process(0).wait(10)
        events = [line["event"] for line in fleet.log(0)]
        assert events.count("start") == 3 and events.count("die") == 3
        assert fleet.received()[prompt_hash(PROMPT)] == 11 and fleet.answered()[prompt_hash(PROMPT)] == 10
        assert fleet.received()[prompt_hash(poison)] == 2 and fleet.answered()[prompt_hash(poison)] == 0


def test_a_crash_hangs_first_and_takes_everything_along() -> None:
    with SimFleet(1, {"kill_delay_s": 0.4, "styles": {"loop": 1.0}}) as fleet, ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, fleet.urls[0], max_new_tokens=20)  # it would take 0.41 s
        fleet.wait_for(lambda: fleet.stats(0)["running"] == 1, "the request to run")
        fleet.faults(0, {"kind": "crash"})
        assert call(fleet.urls[0], "/model_info")[0] == 200
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            running.result(10)
        assert fleet.process(0).wait(10) == -signal.SIGKILL


def test_a_start_that_never_listens_and_a_server_that_stays() -> None:
    with SimFleet(1, {"faults": [{"kind": "start_hang"}, {"kind": "ignore_sigterm"}]}, wait=False) as fleet:
        fleet.wait_for(lambda: any(line["event"] == "start" for line in fleet.log(0)), "the start")
        time.sleep(0.3)
        with pytest.raises(ConnectionRefusedError):
            call(fleet.urls[0], "/health")
        fleet.process(0).terminate()
        time.sleep(0.3)
        assert fleet.alive(0)
        fleet.faults(0, [])
        fleet.kill(0, signal.SIGTERM)


def test_slow_and_failing_starts() -> None:
    faults = [{"kind": "start_fail", "every": 2, "code": 3}, {"kind": "start_slow", "seconds": 0.5, "starts": [3]}]
    with SimFleet(1, {"instant": True, "warmup_s": 0.3, "faults": faults}) as fleet:
        fleet.kill(0, signal.SIGTERM)
        assert fleet.process(0).returncode == 0
        with pytest.raises(RuntimeError, match="ended with 3"):
            fleet.start(0)
        fleet.start(0, wait=False)
        fleet.wait_for(lambda: any(line.get("start") == 3 for line in fleet.log(0)), "the third start")
        with pytest.raises(ConnectionRefusedError):
            call(fleet.urls[0], "/health")

        def health() -> int:
            try:
                return call(fleet.urls[0], "/health")[0]
            except ConnectionRefusedError:
                return 0

        seen = [health()]
        deadline = time.monotonic() + 20
        while seen[-1] != 200 and time.monotonic() < deadline:
            time.sleep(0.02)
            seen.append(health())
        assert list(dict.fromkeys(seen)) == [0, 503, 200]


def test_the_accept_length_decays(clean: SimFleet) -> None:
    clean.faults(1, {"kind": "accept_decay", "half_requests": 5})
    lengths = [generate(clean.urls[1])["meta_info"]["spec_accept_length"] for _ in range(30)]
    assert lengths[0] > 1.8 and lengths[-1] < 1.1
    assert lengths == sorted(lengths, reverse=True)


def test_health_metrics_and_keys(clean: SimFleet) -> None:
    url = clean.urls[0]
    clean.faults(0, [{"kind": "health", "status": 503, "until_s": 0.5}, {"kind": "metrics_missing"}])
    assert call(url, "/health")[0] == 503 and call(url, "/metrics")[0] == 404
    time.sleep(0.6)
    assert call(url, "/health")[0] == 200
    clean.faults(0, [])
    assert call(url, "/metrics")[0] == 200
    with SimFleet(1, {"instant": True, "api_key": "secret"}) as locked:
        assert call(locked.urls[0], "/model_info")[0] == 401
        assert json.loads(call(locked.urls[0], "/generate", {"input_ids": [5]})[2]) == {"error": "Unauthorized"}
        assert call(locked.urls[0], "/model_info", authorization="Bearer secret")[0] == 200


def test_idle_connections_are_closed_as_uvicorn_does() -> None:
    with SimFleet(1, {"instant": True, "keep_alive_s": 0.3}) as fleet:
        connection = http.client.HTTPConnection(fleet.urls[0].removeprefix("http://"), timeout=5)
        connection.request("GET", "/ready")
        connection.getresponse().read()
        assert connection.sock is not None
        assert connection.sock.recv(1) == b""
        connection.close()


# Processes


def test_the_death_of_its_scheduler_ends_the_server() -> None:
    with SimFleet(1, {"instant": True, "child": True, "kill_delay_s": 0.2}) as fleet:
        os.kill(fleet.stats(0)["child"], signal.SIGKILL)
        assert fleet.process(0).wait(10) == -signal.SIGKILL


def _alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")


def test_a_killed_test_leaves_no_server_behind() -> None:
    script = """
import time
from simserver import SimFleet
fleet = SimFleet(2, {"instant": True, "child": True})
fleet.__enter__()
print(*[fleet.stats(i)[name] for i in range(2) for name in ("pid", "child")], flush=True)
time.sleep(60)
"""
    test = subprocess.Popen([sys.executable, "-c", script], env=python_environment(), stdout=subprocess.PIPE, text=True)
    assert test.stdout is not None
    pids = [int(pid) for pid in test.stdout.readline().split()]
    assert len(pids) == 4 and all(map(_alive, pids))
    test.kill()
    test.wait(10)
    SimFleet.wait_for(lambda: not any(map(_alive, pids)), "the servers to die with their test", 10.0)


def test_it_can_be_started_with_sglangs_own_flags(tmp_path: Path) -> None:
    log = tmp_path / "{gpu}.jsonl"
    command = write_command(
        tmp_path, {"log": str(log), "by_gpu": {"3": {"faults": [{"kind": "start_fail", "code": 9}]}}}
    )
    assert "0.5.23" in subprocess.run([command, "version"], capture_output=True, text=True, check=True).stdout
    base = [
        str(command), "serve", "--model-path", "m", "--served-model-name", "Qwen", "--host", "127.0.0.1", "--port", "1",
        "--max-running-requests", "48", "--enable-metrics", "--speculative-algorithm", "NEXTN", "--disable-radix-cache",
    ]  # fmt: skip
    failing = subprocess.run(base, env={**os.environ, "CUDA_VISIBLE_DEVICES": "3"}, capture_output=True, text=True)
    assert failing.returncode == 9
    assert (tmp_path / "3.jsonl").exists()
    old_flag = subprocess.run([*base, "--mamba-scheduler-strategy", "no_buffer"], capture_output=True, text=True)
    assert old_flag.returncode == 2 and "--mamba-scheduler-strategy" in old_flag.stderr
    old = write_command(tmp_path / "old", {"version": "0.5.11"})
    launch = [str(old), "-m", "sglang.launch_server", *base[2:-1]]
    refused = subprocess.run(launch, capture_output=True, text=True)
    assert refused.returncode == 1 and "extra_buffer" in refused.stderr


def test_its_own_command_line(tmp_path: Path) -> None:
    rules = [{"kind": "error_500", "p": 0.1}]
    (tmp_path / "config.json").write_text(json.dumps({"port": 5, "seed": 3, "eos_ids": [7]}))
    words = [
        "--version",
        "0.5.11",
        "--config",
        str(tmp_path / "config.json"),
        "--seed",
        "4",
        "--style",
        "think",
        "--mtp",
    ]
    config = parse([*words, "--faults", json.dumps(rules), "--special-ids", "0,7", "--mamba-slots", "none"])
    assert (config.port, config.seed, config.version, config.mtp, config.instant) == (5, 4, "0.5.11", True, False)
    assert (config.styles, config.faults, config.eos_ids, config.special_ids) == ({"think": 1.0}, rules, (7,), (0, 7))
    assert config.effective_max_running == 48
    for wrong in ({"prot": 1}, {"styles": {"poem": 1}}, {"version": "0.4"}):
        with pytest.raises(ValueError):
            parse(["--config", json.dumps(wrong)])
    got = subprocess.run(
        [sys.executable, "-m", "tests.simserver", "version"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert "0.5.23" in got.stdout


def test_a_burst_of_requests_on_few_connections_is_answered_in_full() -> None:
    """Not a matter of time: that nothing is lost or mixed up when many clients keep their connections open."""
    with SimFleet(1, {"instant": True, "length_mean": 400.0}) as fleet:
        wrong: list[int] = []

        def client(number: int) -> None:
            connection = http.client.HTTPConnection(fleet.urls[0].removeprefix("http://"), timeout=20)
            for at in range(100):
                ids = [number + 1, at + 1]
                connection.request("POST", "/generate", json.dumps({"input_ids": ids, "sampling_params": GREEDY}))
                body = json.loads(connection.getresponse().read())
                if body["output_ids"] != answer(SimConfig(length_mean=400.0), ids, GREEDY, 32).ids:
                    wrong.append(number)
            connection.close()

        threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert sum(fleet.answered().values()) == 400 and set(fleet.answered().values()) == {1}


def test_every_fault_of_the_list_is_known_to_a_test() -> None:
    """A new kind has to be added to a test above before this passes."""
    text = Path(__file__).read_text()
    assert [kind for kind in KINDS if f'"{kind}"' not in text] == []
