"""The embedded server as a process: it is ready when it says so, and leaves when it should."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from conftest import free_port, running_server


def ask(base: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = json.dumps({"return_tokens": True, "cache_prompt": False, "temperature": 0, **fields}).encode()
    try:
        with urllib.request.urlopen(f"{base}/completion", body, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_answers_ids_with_ids(llama_server: str) -> None:
    prompt = [1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198]
    status, body = ask(llama_server, prompt=prompt, n_predict=8)
    assert status == 200
    assert (len(body["tokens"]), body["tokens_predicted"], body["tokens_evaluated"]) == (8, 8, len(prompt))
    assert body["stop_type"] == "limit"
    assert ask(llama_server, prompt=prompt, n_predict=8)[1]["tokens"] == body["tokens"]


def test_the_stop_token_is_the_last_id(llama_server: str) -> None:
    _, body = ask(llama_server, prompt=[1, 4093, 198], n_predict=8, logit_bias=[[2, 100.0]])
    assert (body["tokens"], body["stop_type"]) == ([2], "eos")


def test_a_prompt_longer_than_a_slot_is_refused(tmp_path: Path) -> None:
    with running_server(tmp_path / "log", "--slots", "2", "--context-per-slot", "256") as (_, base):
        status, body = ask(base, prompt=[504] * 256, n_predict=1)
        assert (status, body["error"]["type"], body["error"]["n_ctx"]) == (400, "exceed_context_size_error", 256)
        status, body = ask(base, prompt=[504] * 255, n_predict=9)
        assert (status, len(body["tokens"]), body["truncated"]) == (200, 1, True)


def test_an_id_outside_the_vocabulary_is_refused(llama_server: str) -> None:
    assert ask(llama_server, prompt=[1, 49152], n_predict=1)[0] == 400


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_leaves_at_once_when_told_to_also_in_the_middle_of_an_answer(tmp_path: Path, number: signal.Signals) -> None:
    with running_server(tmp_path / "log", "--slots", "1") as (process, base):
        script = (
            f"import urllib.request as u; u.urlopen('{base}/completion', b'{{\"prompt\":[1],\"ignore_eos\":true}}')"
        )
        client = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
        time.sleep(0.7)
        process.send_signal(number)
        assert process.wait(timeout=3) == 0
        assert client.wait(timeout=10) != 0, "the answer was under way"
    assert f"stopping: {number.name}" in (tmp_path / "log").read_text()


def test_leaves_with_its_owner(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with running_server(tmp_path / "log", "--slots", "1", "--die-with", str(owner.pid)) as (process, _):
        time.sleep(1.5)
        assert process.poll() is None
        owner.kill()  # and not waited for: a zombie is gone too
        assert process.wait(timeout=5) == 0
    owner.wait()
    assert str(owner.pid) in (tmp_path / "log").read_text()


def test_what_can_not_start_says_so_in_a_sentence(tmp_path: Path) -> None:
    def start(model: Path) -> tuple[int, str]:
        command = [
            sys.executable,
            "-m",
            "shardmill.servers.embedded",
            "--model",
            str(model),
            "--port",
            str(free_port()),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        # llama.cpp's own log comes from other threads, and may end after our last line.
        ours = [line for line in done.stderr.splitlines() if line.startswith("embedded server: ")]
        return done.returncode, ours[-1]

    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, but not really")
    code, last = start(broken)
    assert code == 1 and "broken.gguf" in last
    code, last = start(tmp_path / "absent.gguf")
    assert code == 1 and "There is no model file" in last
