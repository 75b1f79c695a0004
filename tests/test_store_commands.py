"""`shardmill verify`, `inventory` and `pull`, as a person calls them, over HTTP."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from s3proxy import s3_proxy
from s3servers import BUCKET, Server, registry_server, store_settings
from shardmill.cli import cli
from shardmill.errors import ShardmillError, UsageError
from shardmill.files import write_json
from shardmill.paths import BuildPaths, shard_names
from shardmill.plan import make_plan
from shardmill.redo import discard_shard
from shardmill.settings import Settings
from shardmill.store.client import Store
from shardmill.store.listing import published
from shardmill.store.publish import publish_files, publish_shard
from storebuilds import NAME, files_of, make_build

pytestmark = pytest.mark.usefixtures("s3_credentials")

SHARDS = shard_names(8)
FIRST = SHARDS[0]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def settings(moto: Server, request: pytest.FixtureRequest) -> Settings:
    return store_settings(moto.url, prefix=f"t/{abs(hash(request.node.name))}")


@pytest.fixture
def build(settings: Settings, tmp_path: Path) -> BuildPaths:
    """A whole build, published, with the settings that it ran with."""
    build = make_build(tmp_path / "results")
    for shard in SHARDS:
        publish_shard(settings, build, shard)
    publish_files(settings, build, [build.build_json, build.rejects])
    write_json(build.settings, settings.as_dict())
    return build


def call(*arguments: str, expect: int = 0, answer: str | None = None) -> Result:
    done = CliRunner().invoke(cli, list(arguments), input=answer)
    if isinstance(done.exception, ShardmillError):
        assert done.exception.exit_code == expect, done.exception
    else:
        assert done.exit_code == expect, (done.output, done.exception)
    return done


def configfile(settings: Settings, folder: Path) -> str:
    path = folder / "store.yaml"
    s3 = settings.as_dict()["s3"]
    path.write_text(yaml.safe_dump({"s3": s3, "cost": {"usd_per_gb_month": 0.5}}, allow_unicode=True))
    return str(path)


def test_a_right_build_verifies(build: BuildPaths) -> None:
    for flags in ((), ("--deep",)):
        done = call("verify", "--build", str(build.root), *flags)
        assert done.output == f"{NAME}: 8 of 8 shards are whole here, 8 are in the store: all right.\n"


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda build: build.tokens(FIRST).unlink(), rf"here: missing: tokens/{FIRST}\.parquet"),
        (lambda build: _truncate(build.tokens(FIRST)), rf"here: size: tokens/{FIRST}\.parquet"),
        (lambda build: _flip(build.completions(FIRST)), rf"here: hash: completions/{FIRST}\.parquet"),
        (lambda build: _truncate(build.manifest(FIRST)), rf"here: unreadable: manifests/{FIRST}\.json"),
        (
            lambda build: (build.root / "tokens" / "shard-00000-of-00009.parquet").write_bytes(b"x"),
            r"here: extra: tokens/shard-00000-of-00009\.parquet",
        ),
        (
            lambda build: build.manifest(FIRST).write_bytes(
                build.manifest(FIRST).read_bytes().replace(b'"prompts": 6', b'"prompts": 7')
            ),
            rf"here: counts: completions/{FIRST}\.parquet.*(.|\n)*store: differs: .*{FIRST}\.json",
        ),
    ],
)
def test_damage_here_is_listed(damage: Callable[[BuildPaths], object], expected: str, build: BuildPaths) -> None:
    damage(build)
    done = call("verify", "--build", str(build.root), expect=1)
    assert re.search(expected, done.output), done.output
    listed = json.loads(call("verify", "--json", "--build", str(build.root), expect=1).output)
    assert len(listed["problems"]) == len(done.stdout.splitlines()) - 1
    assert "the next run" in done.stderr or "harms nothing" in done.stderr


def test_a_file_that_is_no_parquet_is_listed_though_its_hash_is_right(build: BuildPaths) -> None:
    import hashlib

    for content, kind in ((b"PAR1 no", "unreadable"), (build.completions(FIRST).read_bytes(), "unreadable")):
        values = json.loads(build.manifest(FIRST).read_bytes())
        build.tokens(FIRST).write_bytes(content)
        values["objects"][1] |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        write_json(build.manifest(FIRST), values)
        done = call("verify", "--build", str(build.root), expect=1)
        assert f"here: {kind}: tokens/{FIRST}.parquet" in done.output


def test_damage_in_the_store_is_listed(build: BuildPaths, settings: Settings, moto: Server) -> None:
    client, root = moto.client(), settings.s3.root(NAME)
    by_kind = {
        shard: {item["kind"]: item for item in json.loads(build.manifest(shard).read_bytes())["objects"]}
        for shard in SHARDS
    }
    missing, short, other = (by_kind[shard]["tokens"]["key"] for shard in SHARDS[1:4])
    client.delete_object(Bucket=BUCKET, Key=missing)
    client.put_object(Bucket=BUCKET, Key=short, Body=b"short")
    client.put_object(Bucket=BUCKET, Key=other, Body=b"x" * by_kind[SHARDS[3]]["tokens"]["size"])
    client.put_object(Bucket=BUCKET, Key=f"{root}tokens/{SHARDS[4]}.0123456789abcdef.parquet", Body=b"left")
    client.delete_object(Bucket=BUCKET, Key=f"{root}manifests/{SHARDS[5]}.json")
    client.put_object(Bucket=BUCKET, Key=f"{root}manifests/shard-00000-of-00009.json", Body=b"{}")
    client.put_object(Bucket=BUCKET, Key=f"{root}manifests/{SHARDS[6]}.json", Body=b"{}")
    lines = call("verify", "--build", str(build.root), expect=1).stdout.splitlines()
    found = {tuple(line.split(": ")[:3]) for line in lines[:-1]}
    expected = {
        ("store", "missing", missing),
        ("store", "size", short),
        ("store", "extra", f"{root}tokens/{SHARDS[4]}.0123456789abcdef.parquet"),
        ("store", "missing", f"manifests/{SHARDS[5]}.json"),
        ("store", "extra", f"{root}manifests/shard-00000-of-00009.json"),
        ("store", "unreadable", f"{root}manifests/{SHARDS[6]}.json"),
    }
    # What the unreadable manifest named is nobody's now; it is not called extra, since nothing says so.
    assert found == expected
    deep = call("verify", "--deep", "--build", str(build.root), expect=1).output
    assert f"store: hash: {other}" in deep

    # What is whole here goes up again; what concerns the manifests is for the next run.
    done = call("verify", "--deep", "--repair", "--build", str(build.root), expect=1)
    assert [line for line in done.stderr.splitlines() if line.endswith(": uploaded again")] == [
        f"{shard}: uploaded again" for shard in SHARDS[1:4]
    ]
    left = {tuple(line.split(": ")[:3]) for line in done.stdout.splitlines()[:-1]}
    assert left == expected - {("store", "missing", missing), ("store", "size", short)}
    assert "The next run of snakemake publishes what the store lacks" in done.stderr
    plan = make_plan(settings, build, lambda: published(settings, build))
    assert plan.publish == (SHARDS[5], SHARDS[6]) and plan.restore == ()
    for shard in plan.publish:
        publish_shard(settings, build, shard)
    assert make_plan(settings, build, lambda: published(settings, build)).publish == ()


def test_a_repaired_shard_is_the_same_to_other_machines(build: BuildPaths, settings: Settings, moto: Server) -> None:
    manifest = build.manifest(FIRST).read_bytes()
    key = json.loads(manifest)["objects"][0]["key"]
    moto.client().delete_object(Bucket=BUCKET, Key=key)
    time.sleep(1.1)  # a manifest's time is to the second
    assert "uploaded again" in call("verify", "--repair", "--build", str(build.root)).output
    stored = (
        moto.client().get_object(Bucket=BUCKET, Key=f"{settings.s3.root(NAME)}manifests/{FIRST}.json")["Body"].read()
    )
    assert build.manifest(FIRST).read_bytes() == stored == manifest


def test_verify_says_of_a_copy_that_it_was_taken_out(build: BuildPaths, settings: Settings, tmp_path: Path) -> None:
    other = BuildPaths(tmp_path / "elsewhere" / NAME)
    shutil.copytree(build.root, other.root)
    discard_shard(settings, build, FIRST)
    done = call("verify", "--build", str(other.root), expect=1)
    assert f"discarded: manifests/{FIRST}.json" in done.output and "makes again what was taken out" in done.output
    assert "publishes what the store lacks" not in done.output


def test_no_build_is_deleted_under_a_run(build: BuildPaths, settings: Settings, moto: Server, tmp_path: Path) -> None:
    client, root = moto.client(), settings.s3.root(NAME)
    with s3_proxy(settings.s3.endpoint_url or "") as proxy:
        late = configfile(store_settings(proxy.url, prefix=settings.s3.prefix), tmp_path)
        for state, ahead, deleted in (("running", 0, False), ("running", 300, True), ("ended", 0, True)):
            client.put_object(
                Bucket=BUCKET, Key=f"{root}progress/node.json", Body=json.dumps({"state": state}).encode()
            )
            proxy.clock_s = ahead
            done = call("inventory", "--delete", NAME, "--yes", "--configfile", late, expect=0 if deleted else 1)
            assert deleted or "A run is at work on" in str(done.exception)
            assert ("Contents" not in client.list_objects_v2(Bucket=BUCKET, Prefix=root)) is deleted


def test_verify_of_an_unfinished_build_counts_what_is_there(settings: Settings, tmp_path: Path) -> None:
    build = make_build(tmp_path / "results", made=4)
    for shard in SHARDS[:3]:
        publish_shard(settings, build, shard)
    write_json(build.settings, settings.as_dict())
    said = call("verify", "--build", str(build.root)).output
    left = ", ".join(SHARDS[3:])
    assert f": 3 of 8 shards are whole here, 5 are not finished here ({left}), 3 are in the store: what is" in said


def test_verify_tells_a_wrong_shard_from_one_that_is_not_finished(build: BuildPaths) -> None:
    build.manifest(SHARDS[1]).unlink()
    said = call("verify", "--build", str(build.root)).output
    assert "7 of 8 shards are whole here, 1 is not finished here (shard-00001-of-00008), 8 are in the store" in said
    assert said.endswith(": what is finished is right.\n")
    build.completions(FIRST).unlink()
    last = call("verify", "--build", str(build.root), expect=1).stdout.splitlines()[-1]
    assert "6 of 8 shards are whole here, 1 is wrong (shard-00000-of-00008), 1 is not finished here" in last
    assert last.endswith(": 1 problem.")


def test_pull_brings_a_whole_build_that_later_commands_work_on(
    build: BuildPaths, settings: Settings, tmp_path: Path
) -> None:
    config = configfile(settings, tmp_path)
    done = call("pull", NAME, "--configfile", config, "--results", "elsewhere")
    assert done.output.splitlines()[-1].startswith(f"Pulled whole: 8 of 8 shards and 2 other files of {NAME} are in")
    there = BuildPaths(Path("elsewhere") / NAME)
    for shard in SHARDS:
        assert files_of(there, shard) == files_of(build, shard)
    assert "8 are in the store: all right" in call("verify", "--deep", "--build", str(there.root)).output
    assert json.loads(there.settings.read_bytes())["sampling"]["temperature"] == 0.5
    with s3_proxy(settings.s3.endpoint_url or "") as proxy:
        again = configfile(store_settings(proxy.url, prefix=settings.s3.prefix), tmp_path)
        call("pull", NAME, "--configfile", again, "--results", "elsewhere")
        assert not [key for _, key in proxy.log if ".parquet" in key and "rejects" not in key]


def test_pull_that_is_broken_off_says_what_came_and_goes_on(
    build: BuildPaths, settings: Settings, tmp_path: Path
) -> None:
    with s3_proxy(settings.s3.endpoint_url or "") as proxy:
        config = configfile(store_settings(proxy.url, prefix=settings.s3.prefix), tmp_path)
        bad = proxy.add("flip", operation="GetObject", key=f"tokens/{SHARDS[2]}")
        done = call("pull", NAME, "--configfile", config, "--results", "elsewhere", expect=1)
        last = done.stdout.splitlines()[-1]
        assert (
            last.startswith("Pulled in part: 7 of 8 shards") and "all have a manifest in the store, 1 problem." in last
        )
        assert f"Error: {SHARDS[2]}: " in done.stderr and bad.hits == 5
        there = BuildPaths(Path("elsewhere") / NAME)
        assert not there.manifest(SHARDS[2]).exists()
        proxy.clear()
        call("pull", NAME, "--configfile", config, "--results", "elsewhere")
        assert {key.rpartition("/")[2][: len(FIRST)] for _, key in proxy.log if "/tokens/" in key} == {SHARDS[2]}
    assert files_of(there, SHARDS[2]) == files_of(build, SHARDS[2])


def test_pull_of_a_partial_build_says_so(settings: Settings, tmp_path: Path) -> None:
    here = make_build(tmp_path / "results", made=3)
    for shard in SHARDS[:3]:
        publish_shard(settings, here, shard)
    done = call("pull", NAME, "--configfile", configfile(settings, tmp_path), "--results", "elsewhere", expect=1)
    assert "Pulled in part: 3 of 8 shards" in done.output and "3 are published, 0 problems" in done.output


def test_pull_of_what_is_not_there(settings: Settings, build: BuildPaths, tmp_path: Path) -> None:
    config = configfile(settings, tmp_path)
    done = call("pull", NAME[:-1], "--configfile", config, "--results", "elsewhere", expect=1)
    assert f"There is no build {NAME[:-1]} in s3://" in str(done.exception)
    assert f"did you mean {NAME}?" in str(done.exception)
    done = call("pull", "zebra", "--configfile", config, "--results", "elsewhere", expect=1)
    assert "`shardmill inventory` lists" in str(done.exception)
    for name in ("../other", "latest", ".."):
        assert isinstance(call("pull", name, "--configfile", config, expect=2).exception, UsageError)
    assert not Path("elsewhere").exists()


def test_inventory_shows_everything_and_deletes_only_what_is_named(
    build: BuildPaths, settings: Settings, moto: Server, tmp_path: Path
) -> None:
    client, prefix, root = moto.client(), settings.s3.prefix, settings.s3.root(NAME)
    left = f"{root}tokens/{FIRST}.0123456789abcdef.parquet"
    client.put_object(Bucket=BUCKET, Key=left, Body=b"l" * 1000)
    for name in (f"{NAME}0", "old-9876543210"):  # a neighbour of the name, which is no build's, and an old build
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}/build.json", Body=b"{}")
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}/quality/report.json", Body=b"{}")
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/notes.txt", Body=b"mine")
    for name in ("progress/node-1.json", "logs/node-1/prompts.log", "claims/x.json", "discarded/x"):
        client.put_object(Bucket=BUCKET, Key=root + name, Body=b"{}")
    # A run that has made nothing else yet.
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/new-0000000000/progress/node-1.json", Body=b"{}")
    client.put_object(Bucket=BUCKET, Key=f"{prefix}10/{NAME}/build.json", Body=b"{}")
    upload = client.create_multipart_upload(Bucket=BUCKET, Key=f"{root}tokens/large.parquet")["UploadId"]
    client.upload_part(Bucket=BUCKET, Key=f"{root}tokens/large.parquet", UploadId=upload, PartNumber=1, Body=b"p" * 500)
    config = configfile(settings, tmp_path)

    def keys() -> set[str]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {item["Key"] for page in pages for item in page.get("Contents", ())}

    # Another program's: nothing of it is a left-over of ours.
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/webapp/build.json", Body=b"{}")
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/webapp/tokens/colors.json", Body=b"{}")
    client.put_object(Bucket=BUCKET, Key=f"{root}tokens/notes.parquet", Body=b"mine")

    before = keys()
    shown = call("inventory", "--configfile", config).output
    for part in (NAME, "old-9876543210", "not a build", left, "--delete unnamed", "large.parquet", "a month"):
        assert part in shown, shown
    told = json.loads(call("inventory", "--json", "--configfile", config).output)
    assert told["unnamed"] == [left]
    assert [(item["key"], item["bytes"]) for item in told["unfinished_uploads"]] == [
        (f"{root}tokens/large.parquet", 500)
    ]
    sizes = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")["Contents"]
    assert told["bytes"] == sum(item["Size"] for item in sizes) + 500
    assert told["usd_per_month"] == pytest.approx(told["bytes"] / 1e9 * 0.5)
    assert {item["build"]: item["published_shards"] for item in told["builds"]} == {
        NAME: 8,
        "old-9876543210": 0,
        "new-0000000000": 0,
    }
    kinds = {group["kind"] for group in told["groups"] if group["build"] == NAME}
    shards = {"completions", "tokens", "manifests"}
    assert kinds == {*shards, "prompts", "build files", "progress", "logs", "claims", "discarded"}
    assert keys() == before

    call("inventory", "--delete", "nonsense", "--configfile", config, expect=2)
    call("inventory", "--delete", "unnamed", "--configfile", config)  # too young
    call("inventory", "--delete", "unnamed", "--older-than", "0", "--configfile", config, expect=1, answer="n\n")
    assert keys() == before
    call("inventory", "--delete", "unnamed", "--older-than", "0", "--configfile", config, answer="y\n")
    assert keys() == before - {left}
    call("inventory", "--delete", "uploads", "--older-than", "0", "--yes", "--configfile", config)
    assert not client.list_multipart_uploads(Bucket=BUCKET, Prefix=root).get("Uploads")
    call("inventory", "--delete", NAME, "--yes", "--configfile", config)
    assert keys() == {key for key in before if not key.startswith(root)}
    call("inventory", "--delete", "old-9876543210", "--yes", "--configfile", config)
    assert f"{prefix}/{NAME}0/build.json" in keys() and f"{prefix}10/{NAME}/build.json" in keys()


@pytest.mark.parametrize("operation", ["ListMultipartUploads", "ListParts"])
def test_inventory_needs_no_right_to_look_into_uploads(
    operation: str, build: BuildPaths, settings: Settings, tmp_path: Path
) -> None:
    key = f"{settings.s3.root(NAME)}tokens/large"
    with s3_proxy(settings.s3.endpoint_url or "") as proxy:
        store = Store(store_settings(proxy.url, prefix=settings.s3.prefix).s3)
        upload = store.begin(key, "0" * 64)
        proxy.add("status", operation=operation, status=403, code="AccessDenied")
        config = configfile(store_settings(proxy.url, prefix=settings.s3.prefix), tmp_path)
        shown = call("inventory", "--configfile", config).output
        assert ("s3:ListBucketMultipartUploads" if operation == "ListMultipartUploads" else "size not told") in shown
        store.abort(key, upload)
        store.abort(key, upload)  # ended already, which is all that was wanted


def test_inventory_leaves_out_an_upload_that_ends_meanwhile(
    build: BuildPaths, settings: Settings, tmp_path: Path
) -> None:
    with s3_proxy(settings.s3.endpoint_url or "") as proxy:
        store = Store(store_settings(proxy.url, prefix=settings.s3.prefix).s3)
        store.begin(f"{settings.s3.root(NAME)}tokens/large", "0" * 64)
        proxy.add("status", operation="ListParts", status=404, code="NoSuchUpload")
        config = configfile(store_settings(proxy.url, prefix=settings.s3.prefix), tmp_path)
        assert json.loads(call("inventory", "--json", "--configfile", config).output)["unfinished_uploads"] == []


def test_inventory_takes_nothing_for_unnamed_where_a_manifest_cannot_be_read(
    build: BuildPaths, settings: Settings, moto: Server, tmp_path: Path
) -> None:
    moto.client().put_object(Bucket=BUCKET, Key=f"{settings.s3.root(NAME)}manifests/{FIRST}.json", Body=b"torn")
    told = json.loads(call("inventory", "--json", "--configfile", configfile(settings, tmp_path)).output)
    assert told["unnamed"] == [] and len(told["unreadable_manifests"]) == 1


def test_inventory_fails_where_a_manifest_cannot_be_fetched(
    build: BuildPaths, settings: Settings, tmp_path: Path
) -> None:
    with s3_proxy(settings.s3.endpoint_url or "") as proxy:
        proxy.add("status", operation="GetObject", key=f"manifests/{FIRST}", status=403, code="AccessDenied")
        config = configfile(store_settings(proxy.url, prefix=settings.s3.prefix), tmp_path)
        call("inventory", "--delete", "unnamed", "--older-than", "0", "--yes", "--configfile", config, expect=1)
        assert not [operation for operation in proxy.seen if operation.startswith("Delete")]


def test_a_build_is_deleted_manifests_first(build: BuildPaths, settings: Settings, tmp_path: Path) -> None:
    with s3_proxy(settings.s3.endpoint_url or "") as proxy:
        proxy.add("status", operation="DeleteObjects", status=501, code="NotImplemented")
        config = configfile(store_settings(proxy.url, prefix=settings.s3.prefix), tmp_path)
        call("inventory", "--delete", NAME, "--yes", "--configfile", config)
        deleted = [key for operation, key in proxy.log if operation == "DeleteObject"]
    assert len(deleted) == 26 and all("/manifests/" in key for key in deleted[:8])
    assert not any("/manifests/" in key for key in deleted[8:])


@pytest.mark.parametrize("name", ["localbucket", "nanio"])
def test_the_commands_at_other_servers(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    with registry_server(name, folder) as server:
        settings = store_settings(server.url)
        build = make_build(tmp_path / "results")
        for shard in SHARDS:
            publish_shard(settings, build, shard)
        publish_files(settings, build, [build.build_json])
        write_json(build.settings, settings.as_dict())
        assert "8 are in the store: all right" in call("verify", "--deep", "--build", str(build.root)).output
        config = configfile(settings, tmp_path)
        call("pull", NAME, "--configfile", config, "--results", "elsewhere")
        assert f"{NAME}: 8 shards published" in call("inventory", "--configfile", config).output
        call("inventory", "--delete", NAME, "--yes", "--configfile", config)
        assert json.loads(call("inventory", "--json", "--configfile", config).output)["groups"] == []


@pytest.mark.parametrize("command", ["inventory", "verify"])
def test_a_build_and_a_config_at_once_are_refused(command: str, build: BuildPaths, settings: Settings) -> None:
    done = call(command, "--build", str(build.root), "--configfile", configfile(settings, Path()), expect=2)
    assert "not both" in str(done.exception)


def test_without_a_store_these_commands_say_so(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    path.write_text("name: x\n")
    for arguments in (("inventory",), ("pull", NAME)):
        done = call(*arguments, "--configfile", str(path), expect=2)
        assert "s3.bucket" in str(done.exception)
