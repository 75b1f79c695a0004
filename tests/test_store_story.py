"""One build over three machines, through Snakemake: A is destroyed halfway, B finishes it, C and D only take it."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from s3proxy import S3Proxy
from s3servers import BUCKET, SECRET, Server
from shardmill.files import read_json
from shardmill.paths import shard_names
from simserver import SimFleet
from workspace import Workspace

ANSWERS = {"styles": {"random": 1.0}, "length_mean": 60.0, "length_min": 40, "length_cap": 90, "mamba_slots": None}
SHARDS = shard_names(8)
TOKEN = "FwoGZXIvYXdzE-session-token-that-must-not-be-seen"


@pytest.fixture(autouse=True)
def token(s3_credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)


def machine(
    root: Path, url: str, prefix: str, endpoints: list[str], shards: int = len(SHARDS), **more: Any
) -> Workspace:
    """A fresh clone on a machine of its own: nothing is shared but the store."""
    root.mkdir()
    conversations = [
        {"id": f"c{number}", "conversations": [{"from": "human", "value": f"What is the story of river {number}?"}]}
        for number in range(10 * shards)
    ]
    (root / "data.json").write_text(json.dumps(conversations))
    space = Workspace(
        root,
        {
            "dataset": {"path": "data.json"},
            "prompts": {"shards": shards},
            "servers": {"engine": "sglang", "endpoints": endpoints},
            "quality": {"limits": {"other_script": None}, "override": ["all"]},
            "s3": {"bucket": BUCKET, "prefix": prefix, "endpoint_url": url, "region": "us-east-1"},
            **more,
        },
    )
    return space


def build_root(space: Workspace) -> str:
    return f"results/{json.loads(space.shardmill('plan', '--json', '--configfile', 'overlay.yaml').stdout)['build']}"


def assert_asked_once(fleet: SimFleet, prompts: int) -> None:
    """None of them is sent twice over all machines; a machine may ask a server for a sign of life besides."""
    received = fleet.received()
    assert len(received) >= prompts and sum(count > 1 for count in received.values()) <= 1


@contextmanager
def arguments_watched() -> Iterator[list[str]]:
    """Command lines of all processes that hold a secret, while the block runs."""
    found: list[str] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.1):
            for process in psutil.process_iter():
                try:
                    line = " ".join(process.cmdline())
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
                if SECRET in line or TOKEN in line:
                    found.append(line)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def assert_no_secret(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            assert SECRET.encode() not in content and TOKEN.encode() not in content, path


def test_a_build_over_three_machines(tmp_path: Path, moto: Server, proxy: S3Proxy) -> None:
    with SimFleet(1, ANSWERS | {"time_scale": 30.0}) as fleet, arguments_watched() as seen:
        a = machine(tmp_path / "a", moto.url, "story", fleet.urls)
        root = build_root(a)
        done = a.snakemake("--", *(f"{root}/manifests/{shard}.json" for shard in SHARDS[:5]))
        said = [done.stdout, done.stderr]
        assert_no_secret(tmp_path / "a")
        shutil.rmtree(tmp_path / "a")
        asked = len(fleet.received())

        b = machine(tmp_path / "b", proxy.url, "story", fleet.urls)
        planned = b.plan()
        assert (planned["restore"], planned["generate"], planned["tokenize"], planned["publish"]) == (5, 3, 3, 3)
        assert dict(proxy.seen) == {"ListObjectsV2": 1}
        done = b.snakemake()
        said += [done.stdout, done.stderr]
        rows = sum(len(read_json(path)["objects"]) for path in (b.root / root / "manifests").glob("*.json"))
        assert rows == 16 and len(fleet.received()) > asked
        report = read_json(b.root / root / "quality" / "report.json")
        assert report["accounting"]["balanced"] and report["accounting"]["prompts"] == 80
        # No prompt was answered twice, over both machines.
        assert_asked_once(fleet, 80)
        verified = b.shardmill("verify", "--deep")
        assert "8 of 8 shards are whole here, 8 are in the store: all right" in verified.stdout
        assert b.plan() == {}

    # C has no servers and no dataset, and pulls.
    c = machine(tmp_path / "c", proxy.url, "story", ["http://127.0.0.1:9"])
    name = root.removeprefix("results/")
    pulled = c.shardmill("pull", name, "--configfile", "overlay.yaml")
    assert pulled.stdout.splitlines()[-1].startswith("Pulled whole: 8 of 8 shards")
    counted = c.shardmill("query", "--format", "csv", "--build", root, "select count(*) from tokens")
    assert counted.stdout.split()[-1] == str(report["accounting"]["ok"])

    # D has the config with its pins and restores the whole build by Snakemake.
    identity = read_json(c.root / root / "build.json")["identity"]
    pins = {"path": "data.json", "sha256": identity["dataset_sha256"]}
    d = machine(tmp_path / "d", proxy.url, "story", ["http://127.0.0.1:9"], dataset=pins)
    (d.root / "data.json").unlink()
    assert d.plan()["restore"] == 8 and "generate" not in d.plan() and "make_prompts" not in d.plan()
    # It may only read.
    for operation in ("PutObject", "DeleteObject", "CreateMultipartUpload", "ListMultipartUploads"):
        proxy.add("status", operation=operation, status=403, code="AccessDenied")
    done = d.snakemake()
    assert "The report stays on this machine" in done.stderr and d.plan() == {}
    proxy.clear()
    said += [done.stdout, done.stderr, pulled.stdout, pulled.stderr, verified.stdout]
    assert read_json(d.root / root / "quality" / "report.json")["accounting"]["balanced"]
    for shard in SHARDS:
        for kind in ("completions", "tokens"):
            path = Path(root) / kind / f"{shard}.parquet"
            assert (b.root / path).read_bytes() == (c.root / path).read_bytes() == (d.root / path).read_bytes()

    for folder in ("b", "c", "d"):
        assert_no_secret(tmp_path / folder)
    assert not seen and not [text for text in said if SECRET in text or TOKEN in text]
    # What a node leaves behind when it is thrown away.
    client = moto.client()
    stored = {
        item["Key"].removeprefix(f"story/{name}/")
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"story/{name}/")
        for item in page["Contents"]
    }
    for path in ("build.json", "prompts/rejects.parquet", "quality/report.json", "quality/report.html"):
        assert path in stored
    assert {path.split("/")[2] for path in stored if path.startswith("logs/")} >= {"generate", "publish", "servers"}
    # Of A as well, which was destroyed.
    assert len({path.split("/")[1] for path in stored if path.startswith("logs/")}) == 2
    assert sum(path.startswith("progress/") for path in stored) == 2
    for key in stored:
        body = client.get_object(Bucket=BUCKET, Key=f"story/{name}/{key}")["Body"].read()
        assert SECRET.encode() not in body and TOKEN.encode() not in body, key


def test_two_machines_at_the_same_time(tmp_path: Path, moto: Server) -> None:
    """Both finish, both hold the same files, and claims keep them from answering much twice."""
    with SimFleet(1, ANSWERS | {"time_scale": 10.0}) as fleet:
        spaces = [machine(tmp_path / name, moto.url, "both", fleet.urls, shards=4) for name in ("a", "b")]
        root = build_root(spaces[0])
        failed: list[str] = []

        def run(space: Workspace) -> None:
            try:
                space.snakemake()
            except AssertionError as error:
                failed.append(str(error))

        threads = [threading.Thread(target=run, args=(space,)) for space in spaces]
        for thread in threads:
            thread.start()
            time.sleep(0.5)
        for thread in threads:
            thread.join()
        assert not failed, failed[0]
        for shard in shard_names(4):
            for kind in ("completions", "tokens", "manifests"):
                name = f"{shard}.json" if kind == "manifests" else f"{shard}.parquet"
                one, other = (space.root / root / kind / name for space in spaces)
                assert one.read_bytes() == other.read_bytes()
        for space in spaces:
            assert "4 are in the store: all right" in space.shardmill("verify", "--deep").stdout
        assert_asked_once(fleet, 40)


def test_what_is_whole_here_and_not_in_the_store_is_published(tmp_path: Path, moto: Server) -> None:
    """Made without the store, lost there, or damaged there: the next run plans just that, does it, and is content."""
    client = moto.client()
    client.create_bucket(Bucket="another")
    with SimFleet(1, ANSWERS | {"instant": True}) as fleet:
        space = machine(tmp_path / "a", moto.url, "late", fleet.urls, shards=2)
        space.configure({"s3": {"offline": True}})
        space.snakemake()
        assert space.plan() == {}
        received = fleet.received().total()

        def check() -> None:
            """Both shards are published and nothing else is made; then all is right."""
            planned = space.plan()
            assert planned == {"publish": 2, "check_build": 1, "report": 1, "verdict": 1}
            assert space.build() == planned and space.plan() == {}
            assert (
                "2 of 2 shards are whole here, 2 are in the store: all right"
                in space.shardmill("verify", "--deep").stdout
            )
            assert fleet.received().total() == received

        space.configure({"s3": {"offline": False}})
        check()
        space.configure({"s3": {"bucket": "another"}})
        check()
        root = f"late/{space.results.name}/manifests"
        client.delete_object(Bucket="another", Key=f"{root}/{shard_names(2)[0]}.json")
        client.put_object(Bucket="another", Key=f"{root}/{shard_names(2)[1]}.json", Body=b"garbage")
        check()


def test_a_shard_that_another_machine_made_again_is_taken(tmp_path: Path, moto: Server) -> None:
    with SimFleet(1, ANSWERS | {"instant": True}) as fleet:
        a, b = (machine(tmp_path / name, moto.url, "again", fleet.urls, shards=2) for name in ("a", "b"))
        a.snakemake()
        b.snakemake()
        bad = shard_names(2)[1]
        a.shardmill("discard", bad, "--yes")
        # Until then B's copy doesn't count, and is not published again.
        planned = b.plan()
        assert planned["generate"] == planned["publish"] == 1
        a.snakemake()
        planned = b.plan()
        assert planned["publish"] == 1 and "generate" not in planned and "restore" not in planned
        b.snakemake()
        for kind in ("completions", "tokens"):
            one, other = (space.results / kind / f"{bad}.parquet" for space in (a, b))
            assert one.read_bytes() == other.read_bytes()
        assert "all right" in b.shardmill("verify", "--deep").stdout and b.plan() == {}


@pytest.mark.parametrize("trouble", ["unreachable", "403", "no credentials", "no bucket", "a web page"])
def test_a_store_that_cannot_be_read_plans_nothing(
    trouble: str, tmp_path: Path, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = machine(tmp_path / "a", proxy.url, "trouble", ["http://127.0.0.1:9"])
    if trouble == "unreachable":
        space.configure({"s3": {"endpoint_url": "http://127.0.0.1:9"}})
    elif trouble == "403":
        proxy.add("status", status=403, code="AccessDenied")
    elif trouble == "no credentials":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name)
    elif trouble == "no bucket":
        space.configure({"s3": {"bucket": "no-such-mill"}})
    else:
        proxy.add("status", status=200, code="Welcome")
    done = space.snakemake("-n", expect=1)
    assert [line for line in done.stderr.splitlines() if line.startswith("Error: ")], done.stderr
    assert "Traceback" not in done.stderr and "generate" not in done.stdout
    space.configure({"s3": {"offline": True}})
    assert space.plan()["generate"] == 8
