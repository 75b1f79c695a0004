"""A store that is away for a while: jobs wait for it, and nothing is paid for again because of it."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from s3proxy import S3Proxy, s3_proxy
from s3servers import Server, store_settings
from shardmill.errors import StoreError
from shardmill.paths import BuildPaths, shard_names
from shardmill.settings import Settings
from shardmill.store import patience
from shardmill.store.client import Store
from shardmill.store.publish import publish_shard
from shardmill.store.restore import restore_shard
from storebuilds import NAME, files_of, make_build

pytestmark = pytest.mark.usefixtures("s3_credentials")

FIRST = shard_names(8)[0]


@pytest.fixture
def settings(proxy: S3Proxy, tmp_path: Path) -> Settings:
    return store_settings(proxy.url, prefix=tmp_path.name)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a job of a build with generate.patience_s: 60."""
    monkeypatch.setattr(patience._Process, "patience_s", 60.0)


@pytest.fixture(autouse=True)
def no_retries_of_botocores_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when requests of many threads have used up what a client's may take together."""
    monkeypatch.setattr("shardmill.store.connection._ATTEMPTS", 1)


@pytest.mark.parametrize("fault", [{"action": "reset"}, {"action": "status", "status": 500, "code": "InternalError"}])
def test_a_job_waits_for_a_store_that_is_away(
    fault: dict[str, object],
    patient: None,
    proxy: S3Proxy,
    settings: Settings,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    build = make_build(tmp_path / "a", made=1)
    proxy.add(**fault, times=6)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        publish_shard(settings, build, FIRST)
    there = BuildPaths(tmp_path / "there" / NAME)
    restore_shard(settings, there, FIRST)
    assert files_of(there, FIRST) == files_of(build, FIRST)
    told = [line.getMessage() for line in caplog.records]
    assert 1 <= len(told) <= 3 and all("is away" in line and "up to" in line for line in told), told


def test_a_store_that_stays_away_ends_the_wait(
    proxy: S3Proxy, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience._Process, "patience_s", 2.0)
    proxy.add("status", status=503, code="ServiceUnavailable")
    began = time.monotonic()
    with pytest.raises(StoreError, match="still answers 503"):
        Store(settings.s3).head("x")
    assert 1.9 < time.monotonic() - began < 8
    began = time.monotonic()
    with pytest.raises(StoreError), patience.hurried():
        Store(settings.s3).head("x")
    with pytest.raises(StoreError):
        Store(settings.s3, hasty=True).head("x")
    with pytest.raises(StoreError):  # what no waiting mends
        proxy.add("status", status=403, code="AccessDenied")
        proxy.faults.pop(0)
        Store(settings.s3).head("x")
    assert time.monotonic() - began < 8 and proxy.seen["HeadObject"] < 20


def test_a_store_that_comes_up_later_is_found(patient: None, moto: Server, tmp_path: Path) -> None:
    """Nothing listens at first, for requests of eight threads at once."""
    with s3_proxy(moto.url) as proxy:
        address = proxy.url
    store = Store(store_settings(address, prefix=tmp_path.name).s3)
    found: list[object] = []

    def ask(number: int) -> None:
        found.append(store.head(f"key-{number}"))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    assert found == []
    with s3_proxy(moto.url, port=int(address.rpartition(":")[2])):
        for thread in threads:
            thread.join(60)
    assert found == [None] * 8
