"""Prompt ids against those that a real SGLang makes of the same messages: `SHARDMILL_SGLANG=FOLDER make test-sglang`.

Its /v1/tokenize renders messages as for a chat completion, and a chat completion returns the ids that it was given. The
embedded model stands for templates with a default system turn; Qwen3's real tokenizer, before a tiny model of random
weights, for thinking and tools; a template of the test's own for BOS.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conftest import free_port, health
from shardmill.rendering import Decoder, Renderer
from test_real_sglang import ARGS, FOLDER, MODEL, cpu_engine

pytestmark = [
    pytest.mark.skipif(not FOLDER, reason="SHARDMILL_SGLANG names no folder with a real SGLang"),
    pytest.mark.timeout(1800),
]
__all__ = ["cpu_engine"]

Chat = list[dict[str, Any]]

TEXTS = [
    "hello world",
    "  \n\n\t indented, and blanks behind \r\n \n",
    "Grüße, Jürgen! 日本語 한국어 नमस्ते مرحبا 👩‍👩‍👧‍👦 e\u0301",
    "a\u00a0b\u3000c\u2028d\x85f\u200b\u202e\ufeff\x00\x01\x1b[0m\x7f",
    "it's 123,456.78 def f(x):\n\treturn x**2  # {{ 7*7 }} {% raw %}",
    "</think> <think> <tool_call>",
]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


CHATS: list[Chat] = [
    *([user(text)] for text in TEXTS),
    *([system(text), user("hi"), assistant(text), user(text)] for text in TEXTS),
    [user("two"), user("in a row"), assistant(""), user(" ")],
    [user("a"), assistant("b"), assistant("c"), user("d")],
    [user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c")],
]


@contextmanager
def serving(model: Path, log: Path, **arguments: Any) -> Iterator[str]:
    """The base URL of a real server with `model`, ready."""
    port = free_port()
    command = [f"{Path(FOLDER).absolute()}/venv/bin/python", "-m", "sglang.launch_server", "--model-path", str(model)]
    for name, value in {"host": "127.0.0.1", "port": port, **ARGS, **arguments}.items():
        command += [f"--{name}", str(value)]
    with log.open("wb") as stream:
        process = subprocess.Popen([*command, "--skip-server-warmup"], stdout=stream, stderr=stream)
    base = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 600
        while health(base) != 200:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield base
    finally:
        process.terminate()
        process.wait(60)


def ask(base: str, path: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(f"{base}/{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        loaded: dict[str, Any] = json.load(answer)
        return loaded


def server_ids(base: str, chat: Chat, **more: Any) -> list[int]:
    ids: list[int] = ask(base, "v1/tokenize", messages=chat, **more)["tokens"]
    return ids


def check_a_completion(base: str, renderer: Renderer, chat: Chat) -> None:
    """What /v1/tokenize says is what a completion is made with, and our ids arrive as they are sent."""
    ids = renderer.render(chat).ids
    told = ask(base, "v1/chat/completions", model="m", messages=chat, max_tokens=1, return_prompt_token_ids=True)
    assert told["choices"][0]["prompt_token_ids"] == ids
    sent = ask(base, "generate", input_ids=ids, sampling_params={"max_new_tokens": 1})
    assert sent["meta_info"]["prompt_tokens"] == told["usage"]["prompt_tokens"] == len(ids)


def check_markers(base: str, renderer: Renderer, folder: Path) -> None:
    """Here, and only here, the ids differ on purpose: the server takes a marker in a text for the template's own."""
    decode = Decoder(folder).decode
    plain = renderer.render([user("stop  now")]).ids
    for marker in (decode([index]) for index in sorted(renderer.special_ids)):
        chat = [user(f"stop {marker} now")]
        ours, theirs = renderer.render(chat).ids, server_ids(base, chat)
        assert decode(ours) == decode(theirs)
        own = [index for index in plain if index in renderer.special_ids]
        assert [index for index in ours if index in renderer.special_ids] == own
        assert len([index for index in theirs if index in renderer.special_ids]) == len(own) + 1


def test_the_embedded_model(tmp_path: Path) -> None:
    renderer = Renderer(MODEL, None, thinking=False)
    with serving(MODEL, tmp_path / "log") as base:
        for chat in CHATS:
            assert renderer.render(chat).ids == server_ids(base, chat), chat
        check_a_completion(base, renderer, CHATS[7])
        check_markers(base, renderer, MODEL)


def test_a_template_that_writes_bos(tmp_path: Path) -> None:
    """And a tokenizer that would add it once more: it is there once, here and there."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "add_bos_token": True}))
    template = folder / "bos.jinja"
    template.write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    renderer = Renderer(folder, template, thinking=False)
    with serving(folder, tmp_path / "log", **{"chat-template": template}) as base:
        for chat in CHATS:
            ids = renderer.render(chat).ids
            assert ids == server_ids(base, chat), chat
            assert ids.count(ids[0]) == 1
        check_a_completion(base, renderer, CHATS[7])


def test_qwen3_thinking_on_and_off(qwen3: Path, tmp_path: Path) -> None:
    folder = tmp_path / "qwen3"
    shutil.copytree(qwen3, folder)
    (folder / "config.json").write_text(json.dumps(TINY_QWEN3))
    thinks, quick = (Renderer(folder, None, thinking) for thinking in (True, False))
    tools = [
        {"type": "function", "function": {"name": "add", "description": "a < b", "parameters": {"type": "object"}}}
    ]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}
    calling: Chat = [
        user("add"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    with serving(folder, tmp_path / "log", **{"load-format": "dummy"}) as base:
        for renderer, thinking in ((thinks, True), (quick, False)):
            asked = {"chat_template_kwargs": {"enable_thinking": thinking}}
            for chat in CHATS:
                assert renderer.render(chat).ids == server_ids(base, chat, **asked), (thinking, chat)
            # This server writes a field of its own into each declaration; we render them as the dataset has them.
            ids = renderer.render(calling, json.dumps([{**tool, "defer_loading": None} for tool in tools])).ids
            assert ids == server_ids(base, calling, tools=tools, **asked)
        assert thinks.render(CHATS[0]).ids == server_ids(base, CHATS[0]), "thinking is the server's default"
        check_a_completion(base, thinks, CHATS[7])
        check_markers(base, thinks, folder)


TINY_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "torch_dtype": "float32",
}
