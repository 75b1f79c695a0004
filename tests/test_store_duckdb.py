"""Shards queried in place over HTTP, with DuckDB's httpfs extension out of a registry's package.

The extension has to be of DuckDB's own version, and there is no package for every one: this uses an environment of its
own, made once in the tests' cache, and skips where it can't be had.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from s3proxy import s3_proxy
from s3servers import BUCKET, KEY, SECRET, Server, python_package, store_settings
from shardmill.paths import shard_names
from shardmill.store.publish import publish_shard
from storebuilds import NAME, make_build
from workspace import REPO

VERSION = "1.5.5"
PREFIX = "duckdb"
SHARDS = shard_names(8)
README = (REPO / "README.md").read_text()
# Runs statements with the extension out of the package, and prints what the last one gives.
SCRIPT = f"""
import sys, json, duckdb, duckdb_extension_httpfs, pathlib
retries, *statements = sys.argv[1:]
folder = pathlib.Path(duckdb_extension_httpfs.__file__).parent
connection = duckdb.connect(config={{"allow_unsigned_extensions": "true"}})
connection.execute(f"LOAD '{{folder}}/extensions/v{VERSION}/httpfs.duckdb_extension'")
connection.execute(f"SET http_retries = {{retries}}; SET http_retry_wait_ms = 10")
for statement in statements:
    result = connection.execute(statement)
print(json.dumps(result.fetchone()))
"""


def statements(endpoint: str) -> list[str]:
    """Those of the README, for the test's store and build."""
    found = re.search(r"```duckdb\n(.*?)```", README, re.DOTALL)
    assert found is not None
    text = found[1].replace("our-builds", BUCKET).replace("drafter/<build>", f"{PREFIX}/{NAME}")
    install, load, secret, *others = [part.strip() for part in text.split(";") if part.strip()]
    assert (install, load) == ("INSTALL httpfs", "LOAD httpfs")
    secret = secret.replace("KEY_ID '…'", f"KEY_ID '{KEY}'").replace("SECRET '…'", f"SECRET '{SECRET}'")
    return [f"{secret[:-1]}, ENDPOINT '{endpoint}', URL_STYLE 'path', USE_SSL false)", *others]


def query(url: str, retries: int = 5) -> subprocess.CompletedProcess[str]:
    python = python_package("duckdb-httpfs", f"duckdb=={VERSION}", f"duckdb-extension-httpfs=={VERSION}") / "python"
    arguments = [str(retries), *statements(url.removeprefix("http://"))]
    return subprocess.run(
        [str(python), "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.usefixtures("s3_credentials")
def test_shards_are_queried_in_place_by_their_manifests(moto: Server, tmp_path: Path) -> None:
    settings = store_settings(moto.url, prefix=PREFIX)
    build = make_build(tmp_path)
    for shard in SHARDS:
        publish_shard(settings, build, shard)
    # What no manifest names, such as another machine's upload that was killed, is not read.
    moto.client().upload_file(
        str(build.tokens(SHARDS[0])), BUCKET, f"{PREFIX}/{NAME}/tokens/{SHARDS[0]}.0123456789abcdef.parquet"
    )
    with s3_proxy(moto.url) as proxy:
        done = query(proxy.url)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [32, 32 * 23]

        # Case 217: a 503 is asked again, and when it stays, an error and never "0 rows".
        proxy.add("status", operation="GetObject", key="tokens/", times=2)
        done = query(proxy.url)
        assert done.returncode == 0 and json.loads(done.stdout) == [32, 32 * 23], done.stderr
        for operation, key in (("GetObject", "tokens/"), ("GetObject", "manifests/"), ("ListObjectsV2", "")):
            proxy.clear()
            proxy.add("status", operation=operation, key=key)
            done = query(proxy.url, retries=1)
            assert done.returncode != 0 and "503" in done.stderr and not done.stdout, (operation, done.stdout)
