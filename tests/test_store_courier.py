"""Progress and logs go to the store while a run is at work, and never in its way."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from s3proxy import S3Proxy, wait_until
from s3servers import BUCKET, Server, store_settings
from shardmill import courier
from shardmill.courier import Courier, start_courier
from shardmill.files import write_json
from shardmill.home import Home
from shardmill.paths import BuildPaths
from shardmill.settings import Settings
from shardmill.status.elsewhere import machines_elsewhere
from shardmill.status.gather import gather
from shardmill.status.words import lines
from storebuilds import NAME, make_build

LOG = "generate/shard-00000-of-00008.log"


@pytest.fixture(autouse=True)
def folder(s3_credentials: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    # botocore's waits between attempts at a store that answers 503.
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda seconds: None)


@pytest.fixture
def settings(proxy: S3Proxy, tmp_path: Path) -> Settings:
    return store_settings(proxy.url, prefix=f"courier/{tmp_path.name}")


@pytest.fixture
def build(tmp_path: Path, settings: Settings) -> BuildPaths:
    """A build with a log of a job, one of a server, and a shard that is being generated."""
    build = make_build(tmp_path / "results", made=1)
    write(build.logs / LOG, "answered\n")
    write(Home.of(settings).logs / "gpu-0.log", "The server is fired up\n")
    going = {"state": "running", "shard": "shard-00003-of-00008", "updated_at": time.time(), "done": 7}
    write_json(build.progress("shard-00003-of-00008"), going)
    return build


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@contextmanager
def running(settings: Settings, build: BuildPaths, every_s: float = 0.1) -> Iterator[Courier]:
    at_work = Courier(settings, build, every_s)
    at_work.start()
    try:
        yield at_work
    finally:
        at_work.stop()


def stored(moto: Server, settings: Settings) -> dict[str, bytes]:
    """What lies under the build's logs/ and progress/, the machine left out of the names."""
    client, root = moto.client(), f"{settings.s3.prefix}/{NAME}/"
    keys = [item["Key"] for item in client.list_objects_v2(Bucket=BUCKET, Prefix=root).get("Contents", [])]
    short = {key: key[len(root) :].split("/", 2) for key in keys}
    return {
        "/".join([parts[0], *parts[2:]]): client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        for key, parts in short.items()
    }


def puts(proxy: S3Proxy, name: str) -> int:
    return sum(operation == "PutObject" and name in key for operation, key in proxy.log)


def test_progress_and_logs_are_there_while_the_run_is_at_work(
    moto: Server, proxy: S3Proxy, settings: Settings, build: BuildPaths
) -> None:
    with running(settings, build):
        wait_until(lambda: puts(proxy, "/progress/") >= 3, 30)
        found = stored(moto, settings)
        assert found[f"logs/{LOG}"] == b"answered\n"
        assert found["logs/servers/gpu-0.log"] == b"The server is fired up\n"
        progress = json.loads(found["progress"])
        assert progress["state"] == "running" and progress["build"] == NAME
        assert progress["shards"] == {"published": 0, "answered": 1, "generating": 1, "begun": 0, "waiting": 6}
        assert [job["done"] for job in progress["jobs"]] == [7]
        # Only what has changed is sent again.
        assert puts(proxy, LOG) == puts(proxy, "gpu-0.log") == 1
        write(build.logs / LOG, "answered\nand more\n")
        wait_until(lambda: puts(proxy, LOG) == 2, 30)
        write(build.logs / "report.log", "last words\n")
    found = stored(moto, settings)
    assert found[f"logs/{LOG}"] == b"answered\nand more\n" and found["logs/report.log"] == b"last words\n"
    assert json.loads(found["progress"])["state"] == "ended"
    # The next run goes on from there.
    proxy.log.clear()
    with running(settings, build):
        pass
    assert puts(proxy, "/logs/") == 0 and puts(proxy, "/progress/") == 1


def test_status_shows_the_other_machines(
    moto: Server, settings: Settings, build: BuildPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for shard, going in (("shard-00003-of-00008", 5), ("shard-00004-of-00008", 6)):
        progress = {"state": "running", "shard": shard, "updated_at": time.time(), "in_flight": going}
        write_json(build.progress(shard), {**progress, "tokens_per_s": 1000.5})
    other = make_build(tmp_path / "other", made=2)
    # Another version's is passed over.
    moto.client().put_object(Bucket=BUCKET, Key=f"{settings.s3.prefix}/{NAME}/progress/odd.json", Body=b'{"new": 1}')
    with running(settings, build, 0.1), running(settings, other, 0.1):
        wait_until(lambda: [machine.generating for machine in machines_elsewhere(other)] == [2], 30)
        (seen,) = machines_elsewhere(other)
        assert (seen.at_work, seen.in_flight, seen.tokens_per_s, seen.published) == (True, 11, 2001.0, 0)
        assert abs(seen.seen - time.time()) < 5 and seen.name != Courier(settings, other)._machine
        wait_until(lambda: len(machines_elsewhere(build)) == 1, 30)
    with running(settings, other, 60):
        pass
    (seen,) = machines_elsewhere(other)
    assert not seen.at_work
    assert "its run is over, 0 finished shards there" in next(
        v for n, v in lines(gather(settings, other)) if n == "also"
    )


def test_of_a_long_log_the_ends_are_sent(
    moto: Server, settings: Settings, build: BuildPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier, "_HEAD_BYTES", 10)
    monkeypatch.setattr(courier, "_TAIL_BYTES", 20)
    write(build.logs / LOG, "0123456789" + "x" * 1000 + "01234567890123456789")
    with running(settings, build, 60):
        pass
    middle = b"\n[... 1000 bytes are left out here ...]\n"
    assert stored(moto, settings)[f"logs/{LOG}"] == b"0123456789" + middle + b"01234567890123456789"


def test_a_store_that_refuses_is_told_of_once_and_gets_all_when_it_is_well(
    moto: Server, proxy: S3Proxy, settings: Settings, build: BuildPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.add("status", operation="PutObject", status=403, code="AccessDenied")
    with running(settings, build):
        wait_until(lambda: puts(proxy, "") >= 4, 30)
        assert stored(moto, settings) == {}
        proxy.clear()
        wait_until(lambda: puts(proxy, "/progress/") >= 1, 30)
    said = capsys.readouterr().err
    assert said.count("don't reach the store") == 1 == said.count("\n") and "403 AccessDenied" in said
    assert stored(moto, settings)[f"logs/{LOG}"] == b"answered\n"


def test_without_a_bucket_there_is_none(build: BuildPaths) -> None:
    assert start_courier(store_settings("http://127.0.0.1:9", bucket=None), build) is None
    assert start_courier(store_settings("http://127.0.0.1:9", offline=True), build) is None
