"""Shards queried in place over HTTP, with DuckDB's httpfs extension out of a registry's package.

The extension has to be of DuckDB's own version, and there is no package for every one: this uses an environment of its
own, made once in the tests' cache, and skips where it can't be had.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3proxy import s3_proxy
from s3servers import BUCKET, KEY, SECRET, Server, moto_server, python_package, store_settings
from shardmill.paths import shard_names
from shardmill.store.publish import publish_shard
from storebuilds import NAME, make_build

VERSION = "1.5.5"
SHARDS = shard_names(8)
# The way of docs/s3.md, given the store by arguments.
SCRIPT = f"""
import sys, json, duckdb, duckdb_extension_httpfs, pathlib
endpoint, root, key, secret, retries = sys.argv[1:]
folder = pathlib.Path(duckdb_extension_httpfs.__file__).parent
connection = duckdb.connect(config={{"allow_unsigned_extensions": "true"}})
connection.execute(f"LOAD '{{folder}}/extensions/v{VERSION}/httpfs.duckdb_extension'")
connection.execute(f"SET http_retries = {{retries}}; SET http_retry_wait_ms = 10")
connection.execute(f\"\"\"CREATE SECRET mill (TYPE s3, KEY_ID '{{key}}', SECRET '{{secret}}', REGION 'us-east-1',
    ENDPOINT '{{endpoint}}', URL_STYLE 'path', USE_SSL false)\"\"\")
connection.execute(f\"\"\"SET VARIABLE files = (SELECT list('s3://{BUCKET}/' || object.key)
    FROM (SELECT unnest(objects) AS object FROM read_json('{{root}}/manifests/*.json'))
    WHERE object.kind = 'tokens')\"\"\")
print(json.dumps(connection.execute(
    "SELECT count(*), sum(len(input_ids)), count(DISTINCT filename) "
    "FROM read_parquet(getvariable('files'), filename=true)"
).fetchone()))
"""


@pytest.fixture(scope="module")
def moto() -> Iterator[Server]:
    with moto_server() as server:
        # moto keeps one state a process: what other tests published under the same name must not be counted.
        for item in server.client().list_objects_v2(Bucket=BUCKET).get("Contents", []):
            server.client().delete_object(Bucket=BUCKET, Key=item["Key"])
        yield server


def query(url: str, retries: int = 5) -> subprocess.CompletedProcess[str]:
    python = python_package("duckdb-httpfs", f"duckdb=={VERSION}", f"duckdb-extension-httpfs=={VERSION}") / "python"
    arguments = [url.removeprefix("http://"), f"s3://{BUCKET}/team/builds/{NAME}", KEY, SECRET, str(retries)]
    return subprocess.run(
        [str(python), "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_shards_are_queried_in_place_by_their_manifests(
    moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    settings = store_settings(moto.url)
    build = make_build(tmp_path)
    for shard in SHARDS:
        publish_shard(settings, build, shard)
    # What no manifest names, such as another machine's upload that was killed, is not read.
    moto.client().upload_file(
        str(build.tokens(SHARDS[0])), BUCKET, f"team/builds/{NAME}/tokens/{SHARDS[0]}.0123456789abcdef.parquet"
    )
    with s3_proxy(moto.url) as proxy:
        done = query(proxy.url)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [32, 32 * 23, 8]

        # Case 217: a 503 is asked again, and when it stays, an error and never "0 rows".
        proxy.add("status", operation="GetObject", key="tokens/", times=2)
        done = query(proxy.url)
        assert done.returncode == 0 and json.loads(done.stdout) == [32, 32 * 23, 8], done.stderr
        for operation, key in (("GetObject", "tokens/"), ("GetObject", "manifests/"), ("ListObjectsV2", "")):
            proxy.clear()
            proxy.add("status", operation=operation, key=key)
            done = query(proxy.url, retries=1)
            assert done.returncode != 0 and "503" in done.stderr and not done.stdout, (operation, done.stdout)
