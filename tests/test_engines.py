"""Engines against what real servers answered (shared/golden), and against every way of failing on the wire."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from shardmill.engines import (
    Answer,
    Engine,
    Fault,
    PromptRefused,
    Refusal,
    Request,
    SamplingParams,
    ServerFault,
    engine,
    new_session,
    prometheus,
)
from shardmill.errors import SettingsError, SetupFault
from simserver import SimFleet, free_ports

SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, top_k=-1, min_p=0.05, stop_token_ids=(2, 5), seed=11)
REQUEST = Request("asked", [1, 9690, 198], 32, SAMPLING)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _golden() -> Path | None:
    places = [os.environ.get("SHARDMILL_SHARED"), Path(__file__).resolve().parents[2] / "shared", "/work/shared"]
    return next((Path(place) / "golden" for place in places if place and (Path(place) / "golden").is_dir()), None)


GOLDEN = _golden()
needs_golden = pytest.mark.skipif(GOLDEN is None, reason="the recorded answers of real servers are not here")


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(app) as server, new_session() as session:
        yield session, str(server.make_url("")).rstrip("/")


def replaying(version: str, name: str) -> Handler:
    """Answers as the real server did, but under the id that was asked for."""
    assert GOLDEN is not None
    folder = GOLDEN / f"sglang-{version}"
    status = json.loads((folder / f"{name}.request.json").read_text())["status"] if name != "err_queue_full" else 503
    (path,) = folder.glob(f"{name}.body.*")

    async def handler(request: web.Request) -> web.Response:
        body = path.read_bytes()
        if path.suffix == ".json" and body.startswith(b'{"text"'):
            loaded = orjson.loads(body)
            loaded["meta_info"]["id"] = orjson.loads(await request.read())["rid"]
            body = orjson.dumps(loaded)
        return web.Response(status=status, body=body)

    return handler


def answering(status: int, body: bytes, content_type: str = "application/json") -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, content_type=content_type)

    return handler


async def asked(handler: Handler, name: str = "sglang", request: Request = REQUEST, timeout_s: float = 5.0) -> Answer:
    async with serving(handler) as (session, url):
        return await engine(name).generate(session, url, request, timeout_s)


# Against the recorded answers


@needs_golden
@pytest.mark.parametrize("version", ["0.5.11", "0.5.23"])
async def test_real_answers_are_understood(version: str) -> None:
    greedy = await asked(replaying(version, "generate_ids_greedy"))
    assert greedy.finish in ("stop", "length")
    assert greedy.completion_tokens == len(greedy.output_ids) > 3
    assert greedy.prompt_tokens == (37 if version == "0.5.23" else 15)
    assert greedy.accept_length is None
    cut = await asked(replaying(version, "generate_length"))
    assert (cut.finish, len(cut.output_ids), cut.matched) == ("length", 3, None)


@needs_golden
async def test_the_matched_stop_id_is_the_last_one() -> None:
    for name, last in (("generate_ids_greedy", 2), ("generate_stop_token_ids", 4649)):
        answer = await asked(replaying("0.5.23", name))
        assert (answer.finish, answer.matched, answer.output_ids[-1]) == ("stop", last, last)


@needs_golden
@pytest.mark.parametrize("version", ["0.5.11", "0.5.23"])
@pytest.mark.parametrize(
    ("name", "refusal"),
    [("err_prompt_too_long", Refusal.TOO_LONG), ("err_prompt_plus_new_too_long", Refusal.NO_ROOM)],
)
async def test_real_refusals_are_the_prompts(version: str, name: str, refusal: Refusal) -> None:
    with pytest.raises(PromptRefused) as caught:
        await asked(replaying(version, name))
    assert caught.value.refusal is refusal


@needs_golden
@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("0.5.23", "err_unknown_sampling_key"),
        ("0.5.23", "err_wrong_type"),
        ("0.5.11", "err_wrong_type"),
        ("0.5.23", "err_invalid_json"),
        ("0.5.11", "err_invalid_json"),
        ("0.5.23", "err_neg_temperature"),
        ("0.5.23", "err_404"),
    ],
)
async def test_real_answers_to_a_wrong_set_up_stop_the_run(version: str, name: str) -> None:
    with pytest.raises(SetupFault) as caught:
        await asked(replaying(version, name))
    assert str(caught.value).count("\n") == 0 and str(caught.value).endswith(".")


@needs_golden
@pytest.mark.parametrize(
    ("version", "name", "fault"),
    [
        ("0.5.23", "generate_aborted", Fault.ABORTED),
        ("0.5.11", "generate_aborted", Fault.ABORTED),
        ("0.5.23", "err_queue_full", Fault.QUEUE_FULL),
        ("0.5.23", "dup_rid_second", Fault.SERVER_ERROR),
        ("0.5.11", "err_unknown_sampling_key", Fault.SERVER_ERROR),  # a 500 without a word: no one can tell
        ("0.5.23", "generate_batch", Fault.NOT_JSON),
    ],
)
async def test_real_faults_are_the_servers(version: str, name: str, fault: Fault) -> None:
    with pytest.raises(ServerFault) as caught:
        await asked(replaying(version, name))
    assert caught.value.fault is fault


@needs_golden
@pytest.mark.parametrize(("version", "context"), [("0.5.11", 4096), ("0.5.23", 8192)])
async def test_real_server_info_and_load(version: str, context: int) -> None:
    assert GOLDEN is not None
    folder = GOLDEN / f"sglang-{version}"

    async def handler(request: web.Request) -> web.Response:
        found = list(folder.glob(f"{request.path.strip('/').replace('/', '_')}.body.*"))
        return web.Response(body=found[0].read_bytes()) if found else web.json_response({"detail": "no"}, status=404)

    async with serving(handler) as (session, url):
        info = await engine("sglang").info(session, url)
        load = await engine("sglang").load(session, url)
    assert (info.model_name, info.version, info.context) == ("test", version, context)
    assert (info.running_cap, info.requested_cap, info.cap_reason) == (16, 16, None)
    assert (load.running, load.queued, load.accept_length) == (1 if version == "0.5.11" else 0, 0, None)
    assert load.kv_use is not None and 0 <= load.kv_use < 0.01


@needs_golden
async def test_a_server_of_several_data_parallel_ranks_has_the_room_of_all() -> None:
    assert GOLDEN is not None
    (body,) = (GOLDEN / "sglang-0.5.23").glob("server_info.body.*")
    server = orjson.loads(body.read_bytes())
    server |= {"internal_states": 8 * server["internal_states"], "max_running_requests": 128}

    async def handler(request: web.Request) -> web.Response:
        return web.json_response(server if request.path == "/server_info" else {})

    async with serving(handler) as (session, url):
        info = await engine("sglang").info(session, url)
        assert (info.running_cap, info.requested_cap, info.cap_reason) == (128, 128, None)
        server["max_running_requests"] = 256
        info = await engine("sglang").info(session, url)
    assert (info.running_cap, info.requested_cap) == (128, 256) and info.cap_reason is not None


# What is sent


async def test_every_parameter_is_sent_and_the_key_too() -> None:
    seen: list[tuple[str, str | None, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers.get("Authorization"), orjson.loads(await request.read())))
        return web.Response(status=500)

    for name in ("sglang", "llamacpp"):
        async with serving(handler) as (session, url):
            with pytest.raises(ServerFault):
                await engine(name, "secret").generate(session, url, REQUEST, 5.0)
    (sglang_path, key, sglang), (llama_path, _, llama) = seen
    assert (sglang_path, llama_path, key) == ("/generate", "/completion", "Bearer secret")
    assert (sglang["rid"], sglang["input_ids"], sglang["stream"]) == ("asked", [1, 9690, 198], False)
    assert sglang["sampling_params"] == {
        "max_new_tokens": 32,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.05,
        "stop": None,
        "stop_token_ids": [2, 5],
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "n": 1,
        "ignore_eos": False,
        "skip_special_tokens": False,
        "sampling_seed": 11,
    }
    assert (llama["prompt"], llama["n_predict"], llama["top_k"], llama["min_p"]) == ([1, 9690, 198], 32, 0, 0.05)
    assert (llama["seed"], llama["repeat_penalty"], llama["cache_prompt"]) == (11, 1.0, False)


async def test_no_key_shows_in_an_error() -> None:
    for status in (401, 403):
        async with serving(answering(status, b'{"error":"Unauthorized"}')) as (session, url):
            with pytest.raises(SetupFault) as caught:
                await engine("sglang", "s3cret").generate(session, url, REQUEST, 5.0)
            assert "s3cret" not in repr(caught.value) + str(caught.value.__cause__) + str(caught.value.__context__)
            assert "servers.api_key_env" in str(caught.value)


# Case 122 and other answers of proxies and broken servers


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (429, b"", Fault.QUEUE_FULL),
        (503, b'{"object":"error","message":"The request queue is full.","code":503}', Fault.QUEUE_FULL),
        (503, b'{"message":"Request waiting timeout reached.","object":"error"}', Fault.QUEUE_FULL),
        (503, b"", Fault.SERVER_ERROR),
        (500, b"Internal Server Error", Fault.SERVER_ERROR),
        (502, b"<html>bad gateway</html>", Fault.SERVER_ERROR),
        (302, b"", Fault.SERVER_ERROR),
        (400, b"<html>bad request</html>", Fault.NOT_JSON),
        (200, b"<html>bad gateway</html>", Fault.NOT_JSON),
        (200, b"", Fault.NOT_JSON),
        (200, b"[]", Fault.NOT_JSON),
        (200, b'{"error":{"message":"no"}}', Fault.ERROR_BODY),
        (200, b"{}", Fault.NO_IDS),
    ],
)
@pytest.mark.parametrize("name", ["sglang", "llamacpp"])
async def test_answers_that_are_none_are_the_servers_fault(name: str, status: int, body: bytes, fault: Fault) -> None:
    with pytest.raises(ServerFault) as caught:
        await asked(answering(status, body), name)
    assert caught.value.fault is fault
    assert "\n" not in str(caught.value)


def sglang_body(**changes: Any) -> bytes:
    meta = {
        "id": "asked",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "spec_accept_length": 3.4,
        **changes.pop("meta", {}),
    }
    return json.dumps({"text": "x", "output_ids": [7, 2], "meta_info": meta, **changes}).encode()


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (sglang_body(output_ids=None), Fault.NO_IDS),
        (sglang_body(output_ids=["7", "2"]), Fault.BAD_IDS),
        (sglang_body(output_ids=[7.0, 2]), Fault.BAD_IDS),
        (sglang_body(output_ids=[True, 2]), Fault.BAD_IDS),
        (sglang_body(output_ids=[[7, 2]]), Fault.BAD_IDS),
        (sglang_body(meta={"finish_reason": None}), Fault.BAD_FINISH),
        (sglang_body(meta={"finish_reason": {"type": "paused"}}), Fault.BAD_FINISH),
        (sglang_body(meta={"finish_reason": {"type": "stop", "matched": "NaN happened"}}), Fault.NAN),
        (sglang_body(meta={"finish_reason": {"type": "abort", "message": "in queue"}}), Fault.ABORTED),
        (sglang_body(meta={"completion_tokens": None}), Fault.COUNTS_DISAGREE),
        (sglang_body(meta={"id": "another"}), Fault.WRONG_ID),
    ],
)
async def test_broken_answers_of_sglang(body: bytes, fault: Fault) -> None:
    with pytest.raises(ServerFault) as caught:
        await asked(answering(200, body))
    assert caught.value.fault is fault


async def test_text_that_is_no_unicode_and_numbers_that_are_none_do_no_harm() -> None:
    body = sglang_body(text="\ud800").replace(b"3.4", b"NaN")
    answer = await asked(answering(200, body))
    assert (answer.output_ids, answer.accept_length) == ([7, 2], None)
    assert (await asked(answering(200, sglang_body()))).accept_length == 3.4


# The wire


async def test_nobody_listening_is_refused() -> None:
    async with new_session() as session:
        with pytest.raises(ServerFault) as caught:
            await engine("sglang").generate(session, f"http://127.0.0.1:{free_ports(1)[0]}", REQUEST, 5.0)
    assert caught.value.fault is Fault.REFUSED


@pytest.mark.parametrize(
    ("sent", "fault"),
    [
        (b"", Fault.RESET),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", Fault.HALF_SENT),
        (b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"te', Fault.HALF_SENT),
        (b"hello, this is no HTTP\r\n\r\n", Fault.NOT_JSON),
    ],
)
async def test_a_broken_connection(sent: bytes, fault: Fault) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, new_session() as session:
        with pytest.raises(ServerFault) as caught:
            await engine("sglang").generate(session, f"http://127.0.0.1:{port}", REQUEST, 5.0)
    assert caught.value.fault is fault


async def test_a_timeout_closes_the_connection() -> None:
    closed = asyncio.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass
        closed.set()
        writer.close()

    server = await asyncio.start_server(never, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, new_session() as session:
        started = time.monotonic()
        with pytest.raises(ServerFault) as caught:
            await engine("sglang").generate(session, f"http://127.0.0.1:{port}", REQUEST, 0.3)
        assert caught.value.fault is Fault.TIMEOUT and time.monotonic() - started < 2
        await asyncio.wait_for(closed.wait(), 2)


async def test_abort_and_health_never_raise_for_a_servers_fault() -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    async with new_session() as session:
        for name in ("sglang", "llamacpp"):
            await engine(name).abort(session, url, "asked")
            assert not await engine(name).health(session, url)


def test_an_unknown_engine_is_a_wrong_setting() -> None:
    with pytest.raises(SettingsError, match=r"servers\.engine"):
        engine("vllm")


# Against the simulated server


async def test_a_probe_and_an_abort_at_a_server() -> None:
    with SimFleet(1, {"mtp": True, "length_mean": 400}) as fleet:
        url, sglang = fleet.urls[0], engine("sglang")
        async with new_session() as session:
            assert await sglang.health(session, url)
            assert len((await sglang.probe(session, url)).output_ids) == 2
            long = Request("to-abort", [5] * 10, 4000, SAMPLING)
            asking = asyncio.create_task(sglang.generate(session, url, long, 30))
            await asyncio.sleep(0.3)
            await sglang.abort(session, url, "to-abort")
            with pytest.raises(ServerFault) as caught:
                await asking
            assert caught.value.fault is Fault.ABORTED


async def test_the_cap_and_why() -> None:
    config = {"mtp": True, "max_running_requests": 48, "mamba_slots": 80, "mamba_slots_per_request": 5}
    with SimFleet(1, config) as fleet:
        async with new_session() as session:
            info = await engine("sglang").info(session, fleet.urls[0])
            load = await engine("sglang").load(session, fleet.urls[0])
            fleet.faults(0, {"kind": "metrics_missing"})
            without = await engine("sglang").load(session, fleet.urls[0])
    assert (info.running_cap, info.requested_cap) == (16, 48)
    assert info.cap_reason is not None and "80 Mamba state slots // 5 a request = 16" in info.cap_reason
    assert (load.running, load.queued) == (0, 0)
    assert (without.running, without.queued) == (None, None)


# llama.cpp


def llama_body(**changes: Any) -> bytes:
    body = {"tokens": [7, 2], "stop_type": "eos", "tokens_predicted": 2, "tokens_evaluated": 3, **changes}
    return json.dumps(body).encode()


async def test_answers_of_llamacpp() -> None:
    answer = await asked(answering(200, llama_body()), "llamacpp")
    assert (answer.output_ids, answer.finish, answer.matched, answer.prompt_tokens) == ([7, 2], "stop", 2, 3)
    assert (await asked(answering(200, llama_body(stop_type="limit")), "llamacpp")).finish == "length"
    with pytest.raises(ServerFault) as caught:
        await asked(answering(200, llama_body(stop_type="none")), "llamacpp")
    assert caught.value.fault is Fault.BAD_FINISH


async def test_refusals_of_llamacpp() -> None:
    too_long = (
        b'{"error":{"code":400,"message":"request (3000 tokens) exceeds the available context size (2048 tokens), '
        b'try increasing it","type":"exceed_context_size_error","n_prompt_tokens":3000,"n_ctx":2048}}'
    )
    with pytest.raises(PromptRefused) as caught:
        await asked(answering(400, too_long), "llamacpp")
    assert caught.value.refusal is Refusal.TOO_LONG
    loading = b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'
    with pytest.raises(ServerFault) as fault:
        await asked(answering(503, loading), "llamacpp")
    assert fault.value.fault is Fault.SERVER_ERROR


# Prometheus


def test_gauges() -> None:
    text = (
        "# HELP sglang:x no\n# TYPE sglang:x gauge\n"
        'sglang:x{rank="0",why="a } b"} 2.0\nsglang:x{rank="1"} 4 1700000000\nsglang:xy 9\n'
        "sglang:plain 0.5\nsglang:n NaN\n"
    )
    assert prometheus.total(text, "sglang:x") == 6
    assert prometheus.mean(text, "sglang:none", "sglang:x") == 3
    assert prometheus.total(text, "sglang:plain") == 0.5
    assert prometheus.total(text, "sglang:n") is None


def test_engines_are_named_as_in_the_settings() -> None:
    engines: list[Engine] = [engine(name) for name in ("sglang", "llamacpp")]
    assert [found.name for found in engines] == ["sglang", "llamacpp"]
