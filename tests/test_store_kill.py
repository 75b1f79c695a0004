"""kill -9 at random moments of publish and restore: no reader ever sees a manifest whose objects are not right.

A seeded sample here; 50 of each with SHARDMILL_SOAK=1.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from s3proxy import S3Proxy, s3_proxy, wait_until
from s3servers import BUCKET, Server, store_settings
from shardmill.files import write_json
from shardmill.paths import shard_names
from shardmill.settings import Settings
from shardmill.store.publish import publish_shard
from storebuilds import NAME, assert_manifest_is_right, files_of, make_build

pytestmark = pytest.mark.usefixtures("s3_credentials")

SHARDS = shard_names(3)
KILLS = 50 if os.environ.get("SHARDMILL_SOAK") == "1" else 4
WORKER = Path(__file__).with_name("store_worker.py")


@pytest.fixture
def proxy(moto: Server) -> Iterator[S3Proxy]:
    """Every request takes 20 ms, so that a kill is likely to fall into one."""
    with s3_proxy(moto.url) as proxy:
        proxy.add("delay", seconds=0.02)
        yield proxy


def start(action: str, settings: Settings, root: Path, *what: str) -> subprocess.Popen[bytes]:
    file = root.parent / "settings.json"
    write_json(file, settings.as_dict())
    return subprocess.Popen([sys.executable, str(WORKER), action, str(file), str(root), *what])


def killed(process: subprocess.Popen[bytes], proxy: S3Proxy, seconds: float) -> bool:
    """Kills `seconds` after the first request; whether it was still at work then."""
    wait_until(lambda: proxy.requests > 0 or process.poll() is not None, 120)
    time.sleep(seconds)
    at_work = process.poll() is None
    process.kill()
    process.wait()
    return at_work


def assert_store_is_right(client: Any, root: str) -> int:
    """Everything that a manifest in the store names is there, by content; returns how many manifests there are."""
    manifests = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{root}manifests/").get("Contents", [])
    for entry in manifests:
        manifest = json.loads(client.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read())
        for item in manifest["objects"]:
            content = client.get_object(Bucket=BUCKET, Key=item["key"])["Body"].read()
            assert (len(content), hashlib.sha256(content).hexdigest()) == (item["size"], item["sha256"]), item["key"]
    return len(manifests)


def test_publish_killed_at_random_moments(proxy: S3Proxy, moto: Server, tmp_path: Path) -> None:
    dice, at_work = random.Random(5), 0
    for kill in range(KILLS):
        settings = store_settings(proxy.url, prefix=f"kill/{kill}", shards=3)
        here = make_build(tmp_path / str(kill), shards=3, seed=kill)
        contents = {shard: here.completions(shard).read_bytes() for shard in SHARDS}
        proxy.seen.clear()
        root = settings.s3.root(NAME)
        at_work += killed(start("publish", settings, here.root, *SHARDS), proxy, dice.uniform(0, 0.9))
        published = assert_store_is_right(moto.client(), root)
        for shard in SHARDS:
            if here.manifest(shard).exists():
                assert_manifest_is_right(here, shard)
        assert sum(here.manifest(shard).exists() for shard in SHARDS) <= published
        for shard in SHARDS:
            publish_shard(settings, here, shard)
            assert here.completions(shard).read_bytes() == contents[shard]
            assert_manifest_is_right(here, shard)
        assert assert_store_is_right(moto.client(), root) == 3
        # A shard that is published has one object of a kind, whatever was killed before.
        assert len(moto.client().list_objects_v2(Bucket=BUCKET, Prefix=root)["Contents"]) == 9
    assert at_work > 0


def test_restore_killed_at_random_moments(proxy: S3Proxy, moto: Server, tmp_path: Path) -> None:
    dice, at_work = random.Random(6), 0
    settings = store_settings(moto.url, prefix="restore", shards=3)
    slow = store_settings(proxy.url, prefix="restore", shards=3)
    here = make_build(tmp_path / "here", shards=3)
    for shard in SHARDS:
        publish_shard(settings, here, shard)
    for kill in range(KILLS):
        # Every other time over the files of another content, as after a lost race.
        there = make_build(tmp_path / f"there{kill}", shards=3, made=3 * (kill % 2), seed=9)
        for shard in SHARDS if kill % 2 else ():
            publish_shard(store_settings(moto.url, prefix=f"other/{kill}", shards=3), there, shard)
        proxy.seen.clear()
        at_work += killed(start("restore", slow, there.root, *SHARDS), proxy, dice.uniform(0, 0.5))
        for shard in SHARDS:
            if there.manifest(shard).exists():
                assert_manifest_is_right(there, shard)
        process = start("restore", settings, there.root, *SHARDS)
        assert process.wait(60) == 0
        for shard in SHARDS:
            assert files_of(there, shard) == files_of(here, shard)
        assert not list(there.root.rglob(".shard*"))
    assert at_work > 0


def test_a_reader_at_any_moment_of_a_restore_sees_right_files(proxy: S3Proxy, moto: Server, tmp_path: Path) -> None:
    """Reads all the time while files of other content are replaced under it."""
    settings = store_settings(moto.url, prefix="reader", shards=3)
    here, there = make_build(tmp_path / "a", shards=3), make_build(tmp_path / "b", shards=3, seed=2)
    for shard in SHARDS:
        publish_shard(settings, here, shard)
        publish_shard(store_settings(moto.url, prefix="reader-b", shards=3), there, shard)
    stop, torn = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            for shard in SHARDS:
                try:
                    before = there.manifest(shard).read_bytes()
                    assert_manifest_is_right(there, shard)
                except FileNotFoundError:
                    continue
                except AssertionError:
                    # Torn only when the manifest was there all the while.
                    if there.manifest(shard).exists() and there.manifest(shard).read_bytes() == before:
                        torn.append(shard)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        process = start("restore", store_settings(proxy.url, prefix="reader", shards=3), there.root, *SHARDS)
        assert process.wait(60) == 0
    finally:
        stop.set()
        reader.join()
    assert not torn
    for shard in SHARDS:
        assert files_of(there, shard) == files_of(here, shard)


def test_an_upload_in_parts_that_is_killed_is_never_seen_half_written(
    proxy: S3Proxy, moto: Server, tmp_path: Path
) -> None:
    """Case 207: killed after a part, found and aborted by the next run."""
    path = tmp_path / "large"
    path.write_bytes(random.Random(3).randbytes(22 << 20))
    settings = store_settings(proxy.url, shards=3)
    client = moto.client()
    proxy.faults.insert(0, proxy.faults.pop().__class__("delay", operation="UploadPart", skip=2, seconds=30.0))
    process = start("upload", settings, path, "killed-in-parts")
    wait_until(lambda: proxy.seen["UploadPart"] >= 3, 30)
    time.sleep(0.3)
    process.kill()
    process.wait()
    assert len(client.list_multipart_uploads(Bucket=BUCKET, Prefix="killed-in-parts")["Uploads"]) == 1
    assert "Contents" not in client.list_objects_v2(Bucket=BUCKET, Prefix="killed-in-parts")
    proxy.clear()
    process = start("upload", settings, path, "killed-in-parts")
    assert process.wait(60) == 0
    assert not client.list_multipart_uploads(Bucket=BUCKET, Prefix="killed-in-parts").get("Uploads")
    assert client.get_object(Bucket=BUCKET, Key="killed-in-parts")["Body"].read() == path.read_bytes()


def test_two_machines_build_the_same_shards_and_agree(proxy: S3Proxy, moto: Server, tmp_path: Path) -> None:
    """Both publish all shards at once, one is killed and comes again: all end with the same files."""
    settings = store_settings(proxy.url, prefix="two", shards=3)
    builds = [make_build(tmp_path / name, shards=3, seed=seed) for seed, name in enumerate("ab")]
    first = start("publish", settings, builds[0].root, *SHARDS)
    second = start("publish", settings, builds[1].root, *reversed(SHARDS))
    killed(first, proxy, 0.3)
    assert second.wait(60) == 0
    assert start("publish", settings, builds[0].root, *SHARDS).wait(60) == 0
    for shard in SHARDS:
        assert files_of(builds[0], shard) == files_of(builds[1], shard)
        assert_manifest_is_right(builds[0], shard)
    assert assert_store_is_right(moto.client(), settings.s3.root(NAME)) == 3
