"""Real S3 servers on loopback for tests: moto's, and three from the registries, fetched once into a cache.

Each is another reading of the protocol: moto has conditional writes and deletes in batches, localbucket only
If-None-Match, nanio checks signatures, s3rver ignores conditions silently.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from moto.server import ThreadedMotoServer

from shardmill.settings import Settings, resolve

KEY = "AKIATESTACCESSKEY001"
SECRET = "s3cr3t-th4t-must-not-be-seen-anywhere"
BUCKET = "mill"
IN_CI = os.environ.get("SHARDMILL_CI") == "1"
CACHE = Path(os.environ.get("SHARDMILL_TEST_CACHE", Path.home() / ".cache" / "shardmill-tests"))


@dataclass(frozen=True)
class Server:
    name: str
    url: str
    key: str = KEY
    secret: str = SECRET

    def client(self) -> Any:
        return client_of(self.url, self.key, self.secret)


def client_of(url: str, key: str = KEY, secret: str = SECRET) -> Any:
    """A plain boto3 client, which shares no code with what is tested."""
    config = Config(
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        config=config,
    )


def store_settings(url: str, prefix: str = "team/builds", shards: int = 8, **s3: Any) -> Settings:
    return resolve(
        {
            "prompts": {"shards": shards},
            "generate": {"pilot_shards": 0},
            "s3": {"bucket": BUCKET, "prefix": prefix, "endpoint_url": url, "region": "us-east-1", **s3},
        }
    )


@contextmanager
def moto_server() -> Iterator[Server]:
    import logging

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield _with_bucket("moto", f"http://{host}:{port}")
    finally:
        server.stop()


@contextmanager
def registry_server(name: str, folder: Path) -> Iterator[Server]:
    """A server of `REGISTRY`, or a skip that says why it can't be had."""
    port = _free_port()
    command = REGISTRY[name](folder, port)
    environment = {**os.environ, "NANIO_ACCESS_KEY": KEY, "NANIO_SECRET_KEY": SECRET}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        _wait_for(port, process, folder / "server.log")
        yield _with_bucket(name, f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def python_package(name: str, *packages: str) -> Path:
    """bin/ of a cached environment with `packages`, made by pip at the first call.

    Where that can't be it is a skip, and in CI (.ci/run), which has a package index, a failure.
    """
    folder = CACHE / name
    if not (folder / ".done").exists():
        _make(folder, [sys.executable, "-m", "venv", str(folder)])
        _make(folder, [str(folder / "bin" / "pip"), "install", "--quiet", *packages])
        (folder / ".done").touch()
    return folder / "bin"


def _localbucket(folder: Path, port: int) -> list[str]:
    return [str(python_package("localbucket", "localbucket==1.2.1") / "localbucket"), "--port", str(port), str(folder)]


def _nanio(folder: Path, port: int) -> list[str]:
    command = str(python_package("nanio", "nanio==0.1.7") / "nanio")
    return [command, "serve", "--data-dir", str(folder), "--host", "127.0.0.1", "--port", str(port), "--no-access-log"]


def _s3rver(folder: Path, port: int) -> list[str]:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("s3rver needs node and npm")
    cache = CACHE / "s3rver"
    if not (cache / ".done").exists():
        cache.mkdir(parents=True, exist_ok=True)
        _make(cache, [npm, "install", "--silent", "--prefix", str(cache), "s3rver@3.7.1"])
        (cache / ".done").touch()
    script = str(cache / "node_modules" / "s3rver" / "bin" / "s3rver.js")
    flags = ["--address", "127.0.0.1", "--port", str(port), "--silent", "--allow-mismatched-signatures"]
    return [node, script, "-d", str(folder), *flags]


REGISTRY: dict[str, Callable[[Path, int], list[str]]] = {
    "localbucket": _localbucket,
    "nanio": _nanio,
    "s3rver": _s3rver,
}


def _make(folder: Path, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no word why"])[-1]
        shutil.rmtree(folder, ignore_errors=True)
        missing = pytest.fail if IN_CI and command[0] != shutil.which("npm") else pytest.skip
        missing(f"{folder.name} can't be had here: {last}")


def _with_bucket(name: str, url: str) -> Server:
    # s3rver knows one account only.
    server = Server(name, url, "S3RVER", "S3RVER") if name == "s3rver" else Server(name, url)
    server.client().create_bucket(Bucket=BUCKET)
    return server


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
