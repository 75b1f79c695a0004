"""The store over HTTP, against several S3 servers: publish, list, restore, claims, and two machines at once."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from s3proxy import s3_proxy
from s3servers import BUCKET, REGISTRY, Server, registry_server, store_settings
from shardmill.errors import DataError, SettingsError, StoreError
from shardmill.files import write_json
from shardmill.order import places
from shardmill.paths import BuildPaths, shard_names
from shardmill.plan import Plan, make_plan
from shardmill.settings import Settings
from shardmill.store import claims, transfer
from shardmill.store.client import Store, check_access
from shardmill.store.listing import Published, published
from shardmill.store.manifest import Manifest, manifest_matches, read_manifest
from shardmill.store.publish import publish_files, publish_shard, unpublish_shard
from shardmill.store.restore import restore_facts, restore_shard
from shardmill.store.uploads import read_upload
from storebuilds import NAME, assert_manifest_is_right, files_of, make_build, make_shard

pytestmark = pytest.mark.usefixtures("s3_credentials")

SHARDS = shard_names(8)
FIRST = SHARDS[0]


@pytest.fixture(scope="module", params=["moto", *REGISTRY])
def any_server(
    request: pytest.FixtureRequest, moto: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    if request.param == "moto":
        yield moto
        return
    with registry_server(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.fixture
def settings(any_server: Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", any_server.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", any_server.secret)
    return store_settings(any_server.url, prefix=f"t/{abs(hash(request.node.name))}")


@pytest.fixture
def on_moto(moto: Server, request: pytest.FixtureRequest) -> Settings:
    return store_settings(moto.url, prefix=f"t/{abs(hash(request.node.name))}")


def put_directly(key: str) -> None:
    """An object straight into moto, which runs in this process: thousands by HTTP take a while."""
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(BUCKET, key, b"{}")


def keys(server: Server, settings: Settings) -> list[str]:
    found = server.client().list_objects_v2(Bucket=BUCKET, Prefix=settings.s3.root(NAME)).get("Contents", [])
    return [item["Key"] for item in found]


def test_what_is_published_comes_back_byte_for_byte(any_server: Server, settings: Settings, tmp_path: Path) -> None:
    here = make_build(tmp_path / "a", made=2)
    for shard in SHARDS[:2]:
        publish_shard(settings, here, shard)
    assert published(settings, here).shards == set(SHARDS[:2])
    noted = read_upload(here.upload(FIRST))
    assert noted is not None and noted.seconds > 0 and 0 < noted.behind_s < 600
    assert noted.bytes == here.completions(FIRST).stat().st_size + here.tokens(FIRST).stat().st_size

    there = BuildPaths(tmp_path / "b" / NAME)
    restore_shard(settings, there, SHARDS[1])
    assert files_of(there, SHARDS[1]) == files_of(here, SHARDS[1])
    assert manifest_matches(there, SHARDS[1])

    manifest = json.loads(here.manifest(FIRST).read_bytes())
    assert manifest["rows"] == {"prompts": 6, "ok": 4, "failed": 2}
    client = any_server.client()
    for item in manifest["objects"]:
        body = client.get_object(Bucket=BUCKET, Key=item["key"])
        content = body["Body"].read()
        assert hashlib.sha256(content).hexdigest() == item["sha256"]
        # localbucket keeps no metadata; there the ETag alone was checked.
        assert any_server.name == "localbucket" or body["Metadata"]["sha256"] == item["sha256"]
        assert item["sha256"][:16] in item["key"] and len(content) == item["size"]


def test_the_first_to_publish_wins_and_the_loser_takes_its_files(
    any_server: Server, settings: Settings, tmp_path: Path
) -> None:
    winner, loser = make_build(tmp_path / "a", made=1), make_build(tmp_path / "b", made=1, seed=1)
    publish_shard(settings, winner, FIRST)
    loser.journal(FIRST).parent.mkdir(parents=True)
    loser.journal(FIRST).write_text("row\n")
    publish_shard(settings, loser, FIRST)
    assert files_of(loser, FIRST) == files_of(winner, FIRST)
    assert not loser.journal(FIRST).exists()
    # Nothing of the loser is left to be found by a glob over the store.
    assert len(keys(any_server, settings)) == 3


def test_two_machines_publish_at_the_same_moment(any_server: Server, settings: Settings, tmp_path: Path) -> None:
    builds = [make_build(tmp_path / str(seed), made=1, seed=seed) for seed in range(4)]
    barrier = threading.Barrier(len(builds))

    def publish(build: BuildPaths) -> None:
        barrier.wait()
        publish_shard(settings, build, FIRST)

    threads = [threading.Thread(target=publish, args=(build,)) for build in builds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for build in builds:
        assert_manifest_is_right(build, FIRST)
    stored = any_server.client().get_object(Bucket=BUCKET, Key=f"{settings.s3.root(NAME)}manifests/{FIRST}.json")
    manifest = json.loads(stored["Body"].read())
    names = set(keys(any_server, settings))
    assert {item["key"] for item in manifest["objects"]} <= names
    if any_server.name == "moto":  # conditional writes: all agree, at once
        assert len({build.manifest(FIRST).read_bytes() for build in builds}) == 1


def test_publishing_again_what_is_published_changes_nothing(
    any_server: Server, settings: Settings, tmp_path: Path
) -> None:
    build = make_build(tmp_path, made=1)
    publish_shard(settings, build, FIRST)
    before = files_of(build, FIRST)
    build.manifest(FIRST).unlink()  # killed between the store's manifest and the local one
    publish_shard(settings, build, FIRST)
    assert files_of(build, FIRST) == before


def test_an_upload_in_parts_is_whole_and_an_older_broken_one_goes(
    moto: Server, on_moto: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 207. moto refuses parts under 5 MiB."""
    monkeypatch.setattr(transfer, "PART_BYTES", 5 << 20)
    path = tmp_path / "large"
    path.write_bytes(b"0123456789abcdef" * (11 << 16))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    client = moto.client()
    left = client.create_multipart_upload(Bucket=BUCKET, Key="large")["UploadId"]
    client.upload_part(Bucket=BUCKET, Key="large", UploadId=left, PartNumber=1, Body=b"x" * 100)
    transfer.upload_file(Store(on_moto.s3), "large", path, sha256)
    got = client.get_object(Bucket=BUCKET, Key="large")
    assert hashlib.sha256(got["Body"].read()).hexdigest() == sha256 == got["Metadata"]["sha256"]
    assert got["ETag"].endswith('-3"')
    assert not client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")


def test_without_a_bucket_there_is_the_local_manifest_alone(tmp_path: Path) -> None:
    settings = store_settings("http://127.0.0.1:9", bucket=None)
    build = make_build(tmp_path, made=1)
    build.journal(FIRST).parent.mkdir(parents=True)
    build.journal(FIRST).write_text("row\n")
    publish_shard(settings, build, FIRST)
    assert_manifest_is_right(build, FIRST)
    assert [item.key for item in read_manifest(build, FIRST).objects] == [None, None]
    assert manifest_matches(build, FIRST) and not build.journal(FIRST).exists()
    publish_files(settings, build, [build.build_json])


def test_a_build_made_without_a_store_is_published_once_it_has_one(on_moto: Settings, tmp_path: Path) -> None:
    build = make_build(tmp_path, shards=8)
    offline = store_settings("http://127.0.0.1:9", bucket=None)
    for shard in SHARDS:
        publish_shard(offline, build, shard)
    assert make_plan(offline, build, Published).publish == ()
    plan = make_plan(on_moto, build, lambda: published(on_moto, build))
    assert plan.publish == tuple(SHARDS) and plan.generate == plan.tokenize == ()


def test_facts_that_neither_machine_nor_store_has_are_found_again(on_moto: Settings, tmp_path: Path) -> None:
    """Made without a store, build.json lost, and then a bucket set: nothing restores what was never sent."""
    build = make_build(tmp_path, shards=8)

    def plan() -> Plan:
        return make_plan(on_moto, build, lambda: published(on_moto, build))

    facts = build.build_json.read_bytes()
    build.build_json.unlink()
    assert plan().facts
    for shard in SHARDS:
        publish_shard(on_moto, build, shard)
    assert plan().facts and plan().publish == ()
    build.build_json.write_bytes(facts)
    publish_files(on_moto, build, [build.build_json])
    build.build_json.unlink()
    assert not plan().facts and plan().quality


def test_a_manifest_with_a_damaged_file_does_not_match(on_moto: Settings, tmp_path: Path) -> None:
    build = make_build(tmp_path, made=1)
    publish_shard(on_moto, build, FIRST)
    content = build.tokens(FIRST).read_bytes()
    build.tokens(FIRST).write_bytes(content[:-1])
    assert not manifest_matches(build, FIRST)
    build.tokens(FIRST).unlink()
    assert not manifest_matches(build, FIRST)
    restore_shard(on_moto, build, FIRST)
    assert build.tokens(FIRST).read_bytes() == content


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.update(shard=SHARDS[1]),
        lambda values: values.update(build="another-0000000000"),
        lambda values: values["objects"][0].update(path="../../../etc/passwd"),
        lambda values: values["objects"].pop(),
        lambda values: values["objects"][1].update(sha256="short"),
        lambda values: values.update(rows=[]),
        lambda values: values.pop("objects"),
        lambda values: values.update(format=2),
    ],
)
def test_a_manifest_that_is_none_is_refused(change: object, tmp_path: Path) -> None:
    settings = store_settings("http://127.0.0.1:9", bucket=None)
    build = make_build(tmp_path, made=1)
    publish_shard(settings, build, FIRST)
    values = json.loads(build.manifest(FIRST).read_bytes())
    change(values)  # type: ignore[operator]
    content = json.dumps(values).encode()
    with pytest.raises(DataError, match=r"s3://b/m\.json"):
        Manifest.from_bytes(content, NAME, FIRST, "s3://b/m.json")
    build.manifest(FIRST).write_bytes(content)
    assert not manifest_matches(build, FIRST)


@pytest.mark.parametrize(
    "prefix",
    ["a b", "a+b", "100%", "x#y?", "dt=2024-01-01", "ключ/🦆", "run1/.c", "&amp;<x>"],
)
def test_every_character_of_a_prefix_survives(prefix: str, moto: Server, tmp_path: Path) -> None:
    """Case 209."""
    settings = store_settings(moto.url, prefix=prefix)
    build = make_build(tmp_path / "a", made=1)
    publish_shard(settings, build, FIRST)
    publish_files(settings, build, [build.build_json])
    assert published(settings, build).shards == {FIRST}
    there = BuildPaths(tmp_path / "b" / NAME)
    restore_shard(settings, there, FIRST)
    assert files_of(there, FIRST) == files_of(build, FIRST)
    assert f"{prefix}/{NAME}/build.json" in {
        item["Key"] for item in moto.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]
    }


def test_neighbours_of_a_prefix_are_not_seen(any_server: Server, settings: Settings, tmp_path: Path) -> None:
    """Case 216: run1 finds nothing of run10 or run1_old."""
    build = make_build(tmp_path, made=1)
    for neighbour in (f"{NAME}0", f"{NAME}_old"):
        any_server.client().put_object(
            Bucket=BUCKET, Key=f"{settings.s3.prefix}/{neighbour}/manifests/{FIRST}.json", Body=b"{}"
        )
    assert published(settings, build).shards == set()


def test_a_plan_over_1828_shards_takes_two_requests_of_listing(on_moto: Settings, moto: Server, tmp_path: Path) -> None:
    with s3_proxy(moto.url) as proxy:
        settings = store_settings(proxy.url, prefix=on_moto.s3.prefix, shards=1828)
        build = BuildPaths(tmp_path / NAME)
        names = shard_names(1828)
        missing = {names[3], names[1827]}
        for name in names:
            if name not in missing:
                put_directly(f"{settings.s3.root(NAME)}manifests/{name}.json")
        plan = make_plan(settings, build, lambda: published(settings, build))
        assert set(plan.generate) == missing and len(plan.restore) == 1826
        assert proxy.requests == proxy.seen["ListObjectsV2"] == 2
        proxy.clear()
        proxy.page_size = 100
        assert len(published(settings, build).shards) == 1826
        assert proxy.seen["ListObjectsV2"] == 19


def test_the_same_size_but_other_content_is_uploaded(any_server: Server, settings: Settings, tmp_path: Path) -> None:
    """Case 206."""
    build = make_build(tmp_path, made=0)
    write_json(build.pilot_report, {"passed": 1})
    publish_files(settings, build, [build.pilot_report])
    write_json(build.pilot_report, {"passed": 2})
    publish_files(settings, build, [build.pilot_report])
    key = f"{settings.s3.root(NAME)}quality/pilot.json"
    assert any_server.client().get_object(Bucket=BUCKET, Key=key)["Body"].read() == build.pilot_report.read_bytes()


def test_a_file_that_is_missing_is_named(on_moto: Settings, tmp_path: Path) -> None:
    build = make_build(tmp_path, made=0)
    with pytest.raises(DataError, match=r"report\.html"):
        publish_files(on_moto, build, [build.report_page])


def test_a_shard_is_taken_back_manifest_first(moto: Server, on_moto: Settings, tmp_path: Path) -> None:
    build = make_build(tmp_path, made=2)
    for shard in SHARDS[:2]:
        publish_shard(on_moto, build, shard)
    with s3_proxy(moto.url) as proxy:
        settings = store_settings(proxy.url, prefix=on_moto.s3.prefix)
        unpublish_shard(settings, build, FIRST)
        deleted = [key for operation, key in proxy.log if operation.startswith("Delete")]
    assert deleted[0].endswith(f"manifests/{FIRST}.json")
    assert published(on_moto, build).shards == {SHARDS[1]}
    assert len(keys(moto, on_moto)) == 3 and build.completions(FIRST).exists()
    make_shard(build, FIRST, seed=5)
    publish_shard(on_moto, build, FIRST)
    assert_manifest_is_right(build, FIRST)


def test_counts_and_rejects_come_from_the_store_where_no_dataset_was_read(on_moto: Settings, tmp_path: Path) -> None:
    here = make_build(tmp_path / "a", made=0)
    publish_files(on_moto, here, [here.build_json, here.rejects])
    there = BuildPaths(tmp_path / "b" / NAME)
    write_json(there.build_json, {"build": NAME, "created_at": "now", "counts": None, "model": None})
    restore_facts(on_moto, there)
    facts = json.loads(there.build_json.read_bytes())
    assert facts["counts"]["records"] == 10 and facts["model"]["vocab_size"] == 49152 and facts["created_at"] == "now"
    assert there.rejects.read_bytes() == here.rejects.read_bytes()


def test_an_endpoint_that_contains_the_bucket_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"s3\.endpoint_url contains the bucket"):
        Store(store_settings("http://mill.store.local:9000").s3)


def test_a_custom_endpoint_is_spoken_to_by_path_and_virtual_hosts_are_named(on_moto: Settings) -> None:
    """Case 211: path style by default; an error names the host that was looked up."""
    with s3_proxy(on_moto.s3.endpoint_url or "") as proxy:
        check_access(store_settings(proxy.url, prefix="p"))
        assert all(
            key.startswith("p/.shardmill-check-") for operation, key in proxy.log if operation != "ListObjectsV2"
        )
    virtual = store_settings("http://store.invalid:9000", addressing_style="virtual")
    with pytest.raises(StoreError, match=r"mill\.store\.invalid:9000"):
        published(virtual, BuildPaths(Path(NAME)))


def test_a_claim_keeps_others_out_until_it_ends(any_server: Server, settings: Settings, tmp_path: Path) -> None:
    here, there = BuildPaths(tmp_path / "a" / NAME), BuildPaths(tmp_path / "b" / NAME)
    ours = claims.claim(settings, here, FIRST)
    assert ours is not None
    assert claims.claim(settings, there, FIRST) is None
    other = claims.holder(settings, there, FIRST)
    assert other is not None and 100 < other.seconds_left <= claims.LEASE_S
    with pytest.raises(KeyError), ours:
        raise KeyError("the job failed")
    assert claims.holder(settings, there, FIRST) is None
    theirs = claims.claim(settings, there, FIRST)
    assert theirs is not None
    with theirs:
        pass
    # Generated, and not yet published: the claim stays.
    held = claims.holder(settings, here, FIRST)
    assert held is not None and held.seconds_left > claims.LEASE_S


def test_a_killed_run_in_the_same_folder_has_its_claim_back(on_moto: Settings, tmp_path: Path) -> None:
    build = BuildPaths(tmp_path / NAME)
    first = claims.claim(on_moto, build, FIRST)
    second = claims.claim(on_moto, build, FIRST)
    assert first is not None and second is not None
    with first:
        first._renew(60)
        assert first.lost


def test_a_copy_of_a_folder_is_another_owner(
    on_moto: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where several nodes start from one snapshot: at another place, or at the same one on another machine."""
    build = make_build(tmp_path / "a", made=0)
    assert claims.claim(on_moto, build, FIRST) is not None
    shutil.copytree(build.root, tmp_path / "b" / NAME)
    assert claims.claim(on_moto, BuildPaths(tmp_path / "b" / NAME), FIRST) is None
    monkeypatch.setattr("platform.node", lambda: "another-node")
    assert claims.claim(on_moto, build, FIRST) is None


def test_an_abandoned_claim_expires_by_the_stores_clock(moto: Server, on_moto: Settings, tmp_path: Path) -> None:
    here, there = BuildPaths(tmp_path / "a" / NAME), BuildPaths(tmp_path / "b" / NAME)
    with s3_proxy(moto.url) as proxy:
        settings = store_settings(proxy.url, prefix=on_moto.s3.prefix)
        assert claims.claim(settings, here, FIRST) is not None
        proxy.clock_s = claims.LEASE_S - 20
        assert claims.claim(settings, there, FIRST) is None
        proxy.clock_s = claims.LEASE_S + 2
        assert claims.claim(settings, there, FIRST) is not None


def test_a_claim_renews_itself(on_moto: Settings, tmp_path: Path) -> None:
    here, there = BuildPaths(tmp_path / "a" / NAME), BuildPaths(tmp_path / "b" / NAME)
    ours = claims.claim(on_moto, here, FIRST, lease_s=2)
    assert ours is not None
    with ours:
        threading.Event().wait(4)
        assert claims.claim(on_moto, there, FIRST) is None and not ours.lost


@pytest.mark.parametrize("ignorant", [False, True])
def test_of_many_machines_one_gets_the_claim(ignorant: bool, moto: Server, on_moto: Settings, tmp_path: Path) -> None:
    with s3_proxy(moto.url) as proxy:
        proxy.ignore_conditions = ignorant
        settings = store_settings(proxy.url, prefix=on_moto.s3.prefix)
        won: list[bool] = []
        barrier = threading.Barrier(4)

        def take(number: int) -> None:
            barrier.wait()
            won.append(claims.claim(settings, BuildPaths(tmp_path / str(number) / NAME), FIRST) is not None)

        threads = [threading.Thread(target=take, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won.count(True) == 1


def test_waiting_for_a_claim_ends_when_the_shard_is_published(on_moto: Settings, tmp_path: Path) -> None:
    here, there = make_build(tmp_path / "a", made=1), make_build(tmp_path / "b", made=0)
    ours = claims.claim(on_moto, here, FIRST)
    assert ours is not None
    answers: list[object] = []
    waiting = threading.Thread(
        target=lambda: answers.append(claims.claim_or_published(on_moto, there, FIRST, poll_s=0.1))
    )
    waiting.start()
    publish_shard(on_moto, here, FIRST)
    waiting.join(20)
    assert answers == [None]
    assert claims.claim_or_published(store_settings("http://127.0.0.1:9", bucket=None), there, FIRST) is not None


def test_machines_on_one_build_take_its_shards_in_orders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first 7 of 1,828 that each of two machines takes, hardly one is the other's."""
    settings = store_settings("http://127.0.0.1:9", shards=1828)
    names = shard_names(1828)

    def first(machine: str, taken: int) -> list[str]:
        monkeypatch.setattr("platform.node", lambda: machine)
        monkeypatch.setattr("uuid.getnode", lambda: 7)
        order = places(settings, BuildPaths(Path("/data/results") / NAME))
        assert sorted(order) == names and sorted(order.values()) == list(range(1828))
        return sorted(order, key=order.__getitem__)[:taken]

    machines = [f"node-{number}" for number in range(10)]
    shared = [len({*first(one, 7)} & {*first(other, 7)}) for one, other in pairwise(machines)]
    assert sum(shared) <= 2  # 49 / 1828 are expected of each pair
    assert first("node-0", 1828) == first("node-0", 1828) != names
    # Alone, they come in their own order.
    alone = store_settings("http://127.0.0.1:9", shards=1828, bucket=None)
    assert list(places(alone, BuildPaths(Path("/data/results") / NAME))) == names
