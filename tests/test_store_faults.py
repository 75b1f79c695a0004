"""The store under what networks and stores do, through a proxy: retried where that helps, else one plain sentence."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from s3proxy import S3Proxy
from s3servers import BUCKET, KEY, SECRET, Server, registry_server, store_settings
from shardmill.errors import StoreError
from shardmill.paths import BuildPaths, shard_names
from shardmill.settings import Settings
from shardmill.store import claims, patience, transfer
from shardmill.store.client import Store, open_store
from shardmill.store.listing import published
from shardmill.store.publish import publish_shard
from shardmill.store.restore import restore_shard
from storebuilds import NAME, assert_manifest_is_right, files_of, make_build

pytestmark = pytest.mark.usefixtures("s3_credentials")

SHARDS = shard_names(8)
FIRST = SHARDS[0]
SOAK = os.environ.get("SHARDMILL_SOAK") == "1"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """botocore's waits between attempts, cut to nothing; what they would have been is kept."""
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        time.sleep(min(seconds, 0.01))

    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=sleep))
    # What comes after them is in test_store_patience.py.
    monkeypatch.setattr(patience._Process, "patience_s", 0.0)
    return waits


@pytest.fixture
def settings(proxy: S3Proxy, request: pytest.FixtureRequest) -> Settings:
    return store_settings(proxy.url, prefix=f"t/{abs(hash(request.node.name))}")


@pytest.fixture
def build(tmp_path: Path) -> BuildPaths:
    return make_build(tmp_path / "a", made=2)


def assert_round_trip(settings: Settings, build: BuildPaths, tmp_path: Path) -> None:
    publish_shard(settings, build, FIRST)
    there = BuildPaths(tmp_path / "there" / NAME)
    restore_shard(settings, there, FIRST)
    assert files_of(there, FIRST) == files_of(build, FIRST)


def said_by(action: object) -> str:
    with pytest.raises(StoreError) as caught:
        action()  # type: ignore[operator]
    said = str(caught.value)
    assert "\n" not in said and said.endswith(".") and SECRET not in said and KEY not in said, said
    return said


def test_slow_down_is_waited_for(
    proxy: S3Proxy, settings: Settings, build: BuildPaths, tmp_path: Path, short_waits: list[float]
) -> None:
    """Case 201, the first half: six 503 to one upload, and HEADs whose 503 has no body."""
    proxy.add("status", operation="PutObject", key="completions/", times=6)
    proxy.add("status", operation="HeadObject", key="completions/", times=6, code="")
    assert_round_trip(settings, build, tmp_path)
    assert proxy.faults[0].hits > 6 and sum(short_waits) > 5


def test_slow_down_at_the_beginning_of_an_upload_in_parts(
    proxy: S3Proxy, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 201, the second half."""
    monkeypatch.setattr(transfer, "PART_BYTES", 5 << 20)
    proxy.add("status", operation="CreateMultipartUpload", times=3)
    proxy.add("reset", operation="UploadPart", times=2)
    proxy.add("half_upload", operation="UploadPart", skip=3, times=2)
    path = tmp_path / "large"
    path.write_bytes(random.Random(1).randbytes(11 << 20))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    transfer.upload_file(Store(settings.s3), "large", path, sha256)
    copy = tmp_path / "copy"
    assert transfer.download_file(Store(settings.s3), "large", copy, sha256=sha256) == sha256


def test_a_store_that_refuses_new_checksums(
    proxy: S3Proxy, settings: Settings, build: BuildPaths, tmp_path: Path
) -> None:
    """Case 202."""
    for header in ("x-amz-sdk-checksum-algorithm", "x-amz-checksum-crc32", "x-amz-trailer"):
        proxy.add("status", only_with_header=header, status=400, code="InvalidArgument")
    assert_round_trip(settings, build, tmp_path)


def test_deleting_falls_back_where_the_store_wants_an_md5(proxy: S3Proxy, settings: Settings, moto: Server) -> None:
    """Case 204."""
    proxy.add(
        "status", operation="DeleteObjects", only_without_header="Content-MD5", status=400, code="MissingContentMD5"
    )
    client = moto.client()
    keys = [f"{settings.s3.prefix}/x/{number}" for number in range(3)]
    for key in keys:
        client.put_object(Bucket=BUCKET, Key=key, Body=b"x")
    Store(settings.s3).delete(keys)
    assert proxy.seen["DeleteObject"] == 3
    assert "Contents" not in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{settings.s3.prefix}/x/")


@pytest.mark.parametrize(
    ("action", "how"),
    [
        ("reset", {"operation": "PutObject"}),
        ("reset", {"operation": "GetObject"}),
        ("half_upload", {"operation": "PutObject"}),
        ("lost", {"operation": "PutObject"}),
        ("torn", {"operation": "GetObject"}),
        ("flip", {"operation": "GetObject", "key": ".parquet"}),
        ("status", {"operation": "GetObject", "status": 500, "code": "InternalError"}),
        ("delay", {"seconds": 0.3}),
    ],
)
def test_a_passing_fault_costs_nothing_but_time(
    action: str, how: dict[str, object], proxy: S3Proxy, settings: Settings, build: BuildPaths, tmp_path: Path
) -> None:
    fault = proxy.add(action, times=3, **how)
    assert_round_trip(settings, build, tmp_path)
    assert fault.hits >= 3


def test_an_answer_that_is_lost_after_the_manifest_was_made_is_no_lost_race(
    proxy: S3Proxy, settings: Settings, build: BuildPaths, moto: Server
) -> None:
    """The retry finds our own manifest there: those are the winner's files, and ours."""
    before = build.completions(FIRST).read_bytes()
    proxy.add("lost", operation="PutObject", key="manifests/", times=1)
    publish_shard(settings, build, FIRST)
    assert build.completions(FIRST).read_bytes() == before
    assert_manifest_is_right(build, FIRST)
    listed = moto.client().list_objects_v2(Bucket=BUCKET, Prefix=settings.s3.root(NAME))["Contents"]
    assert len(listed) == 3


def test_storms_of_every_kind_end_in_right_files(proxy: S3Proxy, settings: Settings, tmp_path: Path) -> None:
    """Seeded mixtures: every request may meet a fault, and what comes out is right or a StoreError, never wrong."""
    for seed in range(40 if SOAK else 3):
        dice = random.Random(seed)
        proxy.clear()
        for _ in range(8):
            action = dice.choice(["status", "reset", "half_upload", "lost", "torn", "flip", "delay"])
            proxy.add(action, times=dice.randint(1, 3), skip=dice.randint(0, 6), seconds=0.05)
        proxy.ignore_conditions = dice.random() < 0.3
        stormy = store_settings(proxy.url, prefix=f"{settings.s3.prefix}/{seed}")
        here = make_build(tmp_path / f"a{seed}", made=2, seed=seed)
        there = BuildPaths(tmp_path / f"b{seed}" / NAME)
        for shard in SHARDS[:2]:
            _until_well(partial(publish_shard, stormy, here, shard), here, shard)
            _until_well(partial(restore_shard, stormy, there, shard), there, shard)
            assert files_of(there, shard) == files_of(here, shard)


def _until_well(action: Callable[[], None], build: BuildPaths, shard: str) -> None:
    for _ in range(6):
        try:
            action()
            break
        except StoreError:
            assert not build.manifest(shard).exists()
    assert_manifest_is_right(build, shard)


def test_a_download_that_stays_wrong_is_told_and_leaves_nothing(
    proxy: S3Proxy, settings: Settings, build: BuildPaths, tmp_path: Path
) -> None:
    publish_shard(settings, build, FIRST)
    proxy.add("flip", operation="GetObject", key="tokens/")
    there = BuildPaths(tmp_path / "there" / NAME)
    said = said_by(lambda: restore_shard(settings, there, FIRST))
    assert "sha256" in said and "tokens/" in said and "shardmill verify --deep" in said
    assert not there.manifest(FIRST).exists() and not there.tokens(FIRST).exists()
    assert not list(there.root.rglob("*.tmp"))
    proxy.clear()
    restore_shard(settings, there, FIRST)
    # The half that had come down is not asked for again.
    assert [key for operation, key in proxy.log if "completions/" in key] == []
    assert files_of(there, FIRST) == files_of(build, FIRST)


def test_access_that_ends_amid_a_publish_leaves_no_manifest(
    proxy: S3Proxy, settings: Settings, build: BuildPaths
) -> None:
    proxy.add("status", operation="PutObject", skip=1, status=403, code="AccessDenied")
    said = said_by(lambda: publish_shard(settings, build, FIRST))
    assert "403 AccessDenied" in said and f"s3://{BUCKET}/{settings.s3.prefix}" in said and "s3:PutObject" in said
    assert not build.manifest(FIRST).exists()
    proxy.clear()
    assert published(settings, build).shards == set()
    publish_shard(settings, build, FIRST)
    assert_manifest_is_right(build, FIRST)


def test_credentials_that_expire_are_told(proxy: S3Proxy, settings: Settings, build: BuildPaths) -> None:
    proxy.add("status", operation="PutObject", status=400, code="ExpiredToken")
    assert "have expired (400 ExpiredToken): renew them" in said_by(lambda: publish_shard(settings, build, FIRST))


def test_credentials_that_the_provider_renews_are_used_amid_a_run(
    proxy: S3Proxy, settings: Settings, build: BuildPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """boto3's process provider: what it gave is about to expire at the second request, and is asked for again."""
    script = tmp_path / "provider.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "count = pathlib.Path(sys.argv[1]); n = int(count.read_text() or 0) + 1 if count.exists() else 1\n"
        "count.write_text(str(n))\n"
        "from datetime import datetime, timedelta, timezone\n"
        "end = datetime.now(timezone.utc) + timedelta(minutes=5)\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': f'KEY{n}', 'SecretAccessKey': 's', 'SessionToken': 't',\n"
        "  'Expiration': end.isoformat()}))\n"
    )
    config = tmp_path / "aws-config"
    config.write_text(f"[default]\ncredential_process = {sys.executable} {script} {tmp_path / 'count'}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    open_store.cache_clear()
    publish_shard(settings, build, FIRST)
    used = {headers["authorization"].partition("Credential=")[2].partition("/")[0] for headers in proxy.sent_headers}
    assert len(used) > 1


@pytest.mark.parametrize("operation", ["GetObject", "HeadObject", "ListObjectsV2"])
def test_a_clock_that_is_off_is_told_with_its_offset(
    operation: str, proxy: S3Proxy, settings: Settings, build: BuildPaths
) -> None:
    """Case 212, also where a HEAD's answer has no body and says 403 alone."""
    proxy.clock_s = 20 * 60
    code = "" if operation == "HeadObject" else "RequestTimeTooSkewed"
    proxy.add("status", operation=operation, status=403, code=code)
    if operation == "ListObjectsV2":
        said = said_by(lambda: published(settings, build).shards)
    else:
        said = said_by(lambda: publish_shard(settings, build, FIRST))
    assert "clock" in said and ("20 min 0 s behind" in said or "19 min 59 s behind" in said)
    # Not tried again: a HEAD for each of the two objects.
    assert proxy.seen[operation] == (2 if operation == "HeadObject" else 1)


def test_a_bucket_in_another_region_is_followed_once(
    proxy: S3Proxy, settings: Settings, build: BuildPaths, tmp_path: Path
) -> None:
    """Case 214."""
    region = {"x-amz-bucket-region": "eu-central-1"}
    proxy.add("status", times=1, status=301, code="PermanentRedirect", headers=region)
    assert_round_trip(settings, build, tmp_path)


@pytest.mark.parametrize(
    ("status", "code"),
    [(301, "PermanentRedirect"), (400, "IllegalLocationConstraintException"), (400, "AuthorizationHeaderMalformed")],
)
def test_a_bucket_that_stays_in_another_region_is_told_with_both(
    status: int, code: str, proxy: S3Proxy, settings: Settings, build: BuildPaths
) -> None:
    proxy.add("status", status=status, code=code, headers={"x-amz-bucket-region": "eu-central-1"})
    said = said_by(lambda: published(settings, build).shards)
    assert "eu-central-1" in said and "us-east-1" in said and "s3.region" in said
    said = said_by(lambda: Store(settings.s3).head("x"))
    assert "eu-central-1" in said and "us-east-1" in said


def test_a_list_never_ends_early(proxy: S3Proxy, settings: Settings, build: BuildPaths, moto: Server) -> None:
    for number in range(25):
        moto.client().put_object(
            Bucket=BUCKET, Key=f"{settings.s3.root(NAME)}manifests/shard-{number:05d}-of-00025.json", Body=b"{}"
        )
    proxy.page_size = 4
    proxy.add("status", operation="ListObjectsV2", skip=3, times=2)
    assert len(published(settings, build).shards) == 25
    proxy.faults[0] = proxy.faults[0].__class__("status", operation="ListObjectsV2", skip=4)
    assert "503 SlowDown" in said_by(lambda: published(settings, build).shards)
    proxy.faults[0] = proxy.faults[0].__class__("status", operation="ListObjectsV2", skip=2, status=403, code="Denied")
    assert "403" in said_by(lambda: published(settings, build).shards)


def test_a_store_that_is_not_there_is_told_within_seconds(build: BuildPaths) -> None:
    began = time.monotonic()
    said = said_by(lambda: published(store_settings("http://127.0.0.1:9"), build).shards)
    assert "127.0.0.1:9 cannot be reached" in said and "s3.offline: true" in said
    assert time.monotonic() - began < 20


def test_a_bucket_that_is_missing(settings: Settings, build: BuildPaths) -> None:
    wrong = store_settings(settings.s3.endpoint_url or "", bucket="no-such-mill")
    for action in (lambda: published(wrong, build).shards, lambda: publish_shard(wrong, build, FIRST)):
        assert "There is no bucket no-such-mill" in said_by(action)


def test_credentials_that_are_missing(settings: Settings, build: BuildPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    open_store.cache_clear()
    said = said_by(lambda: published(settings, build).shards)
    assert said.startswith("There are no credentials for the bucket mill")


def test_a_profile_that_is_missing(settings: Settings, build: BuildPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert "profile" in said_by(lambda: published(settings, build).shards).lower()


def test_a_wrong_secret_at_a_store_that_checks(
    tmp_path: Path, build: BuildPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "nanio"
    folder.mkdir()
    with registry_server("nanio", folder) as server:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        said = said_by(lambda: published(store_settings(server.url), build).shards)
        assert "does not accept the credentials" in said and "wrong" not in said


def test_a_server_that_is_no_store(build: BuildPaths) -> None:
    import http.server
    import threading

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"<html><body>Welcome to nginx!</body></html>"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        said = said_by(lambda: published(store_settings(f"http://127.0.0.1:{server.server_address[1]}"), build).shards)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert "S3" in said


def test_a_claim_that_cannot_be_renewed_for_a_while_is_kept(proxy: S3Proxy, settings: Settings, tmp_path: Path) -> None:
    build, other = BuildPaths(tmp_path / "a" / NAME), BuildPaths(tmp_path / "b" / NAME)
    ours = claims.claim(settings, build, FIRST, lease_s=4)
    assert ours is not None
    with ours:
        proxy.add("status", status=403, code="AccessDenied", times=1)
        time.sleep(3.5)
        assert claims.claim(settings, other, FIRST) is None
        assert not ours.lost


def test_a_claim_whose_renewal_was_answered_to_nobody_is_kept(
    proxy: S3Proxy, settings: Settings, tmp_path: Path
) -> None:
    """The write is done, its answer lost; sent again, it is refused over what it wrote itself."""
    build, other = BuildPaths(tmp_path / "a" / NAME), BuildPaths(tmp_path / "b" / NAME)
    ours = claims.claim(settings, build, FIRST, lease_s=2)
    assert ours is not None
    lost = proxy.add("lost", operation="PutObject", only_with_header="If-Match", times=2)
    with ours:
        time.sleep(3.5)
        assert lost.hits >= 2 and not ours.lost and claims.claim(settings, other, FIRST) is None


def test_a_claim_that_may_not_be_deleted_expires(
    proxy: S3Proxy, settings: Settings, build: BuildPaths, tmp_path: Path
) -> None:
    """Without s3:DeleteObject: another machine has published the shard, and its claim is long over."""
    publish_shard(settings, build, FIRST)
    proxy.add("status", operation="DeleteObject", status=403, code="AccessDenied")
    there = make_build(tmp_path / "there", made=0)
    assert claims.claim_or_published(settings, there, FIRST) is None
    restore_shard(settings, there, FIRST)
    ours = claims.claim(settings, there, SHARDS[1])
    assert ours is not None
    with pytest.raises(KeyError), ours:
        raise KeyError("the job failed")


def test_an_upload_in_parts_whose_end_was_answered_to_nobody(
    proxy: S3Proxy, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PART_BYTES", 5 << 20)
    proxy.add("lost", operation="CompleteMultipartUpload", times=1)
    proxy.add("status", operation="CompleteMultipartUpload", skip=1, status=404, code="NoSuchUpload")
    path = tmp_path / "large"
    path.write_bytes(b"x" * (6 << 20))
    transfer.upload_file(Store(settings.s3), "large", path, hashlib.sha256(path.read_bytes()).hexdigest())


def test_a_store_without_conditional_writes_that_says_so(
    proxy: S3Proxy, settings: Settings, build: BuildPaths, tmp_path: Path
) -> None:
    proxy.add("status", operation="PutObject", only_with_header="If-None-Match", status=501, code="NotImplemented")
    proxy.add("status", operation="PutObject", only_with_header="If-Match", status=501, code="NotImplemented")
    assert_round_trip(settings, build, tmp_path)
    loser = make_build(tmp_path / "loser", made=1, seed=9)
    publish_shard(settings, loser, FIRST)
    assert files_of(loser, FIRST) == files_of(build, FIRST)
    ours = claims.claim(settings, build, SHARDS[1])
    assert ours is not None and claims.claim(settings, loser, SHARDS[1]) is None


def test_a_conflict_with_a_write_under_way_is_tried_again(
    proxy: S3Proxy, settings: Settings, build: BuildPaths, tmp_path: Path
) -> None:
    """S3's 409 while another machine's write, which then fails, is under way."""
    proxy.add("status", operation="PutObject", key="manifests/", times=2, status=409, code="ConditionalRequestConflict")
    assert_round_trip(settings, build, tmp_path)


def test_an_upload_in_parts_needs_no_right_to_look_for_earlier_ones(
    proxy: S3Proxy, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PART_BYTES", 5 << 20)
    proxy.add("status", operation="ListMultipartUploads", status=403, code="AccessDenied")
    path = tmp_path / "large"
    path.write_bytes(b"x" * (6 << 20))
    transfer.upload_file(Store(settings.s3), "large", path, hashlib.sha256(path.read_bytes()).hexdigest())


def test_requests_of_a_shard(proxy: S3Proxy, settings: Settings, build: BuildPaths, tmp_path: Path) -> None:
    """Two objects up and checked, the manifest looked for, made and read back, the claim ended; three down."""
    publish_shard(settings, build, FIRST)
    assert dict(proxy.seen) == {"GetObject": 2, "PutObject": 3, "HeadObject": 2, "DeleteObject": 1}
    assert [key.rpartition("/")[2] for operation, key in proxy.log if operation == "PutObject"][-1] == f"{FIRST}.json"
    proxy.clear()
    restore_shard(settings, BuildPaths(tmp_path / "there" / NAME), FIRST)
    assert dict(proxy.seen) == {"GetObject": 3}


def test_a_manifest_that_was_damaged_in_the_store_is_told(settings: Settings, build: BuildPaths, moto: Server) -> None:
    from shardmill.errors import DataError

    publish_shard(settings, build, FIRST)
    key = f"{settings.s3.root(NAME)}manifests/{FIRST}.json"
    content = json.loads(moto.client().get_object(Bucket=BUCKET, Key=key)["Body"].read())
    moto.client().put_object(Bucket=BUCKET, Key=key, Body=json.dumps(content).encode()[:-9])
    with pytest.raises(DataError, match="is not a manifest"):
        restore_shard(settings, build, FIRST)
