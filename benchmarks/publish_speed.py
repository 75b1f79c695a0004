"""How fast shards are published and restored, beside plain boto3 transfers of the same bytes in the same run.

    python benchmarks/publish_speed.py [--shards 200] [--mb 4] [--jobs 8] [--line-mb-s 50 --round-trip-ms 20]

Against a real S3 server (localbucket, a process of its own; --store moto for moto's) behind a line of 50 MB/s each way
with 20 ms a round trip (line.py), as a store across a network has one; `--line-mb-s 0`: on loopback without it, where
a request costs nothing but CPU, the store's and ours on the same cores. A shard is two objects, completions and tokens,
of `--mb` together. The plain transfers are boto3's put_object and download_file with its default client and as many
threads, with no digest, no check and no manifest. Both take turns, `CHUNK` shards each, so that they meet the same
machine; a shard's bytes lie there once, linked. Requests are counted by a proxy, over 20 more shards. Prints JSON:
seconds are sums over all turns, the ratios shardmill's rate over the plain one, CPU milliseconds those of this process
(the store's and the line's are their own).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from line import Line, line_to  # noqa: E402
from s3proxy import s3_proxy  # noqa: E402
from s3servers import BUCKET, KEY, SECRET, Server, client_of, moto_server, registry_server, store_settings  # noqa: E402
from shardmill.paths import BuildPaths, shard_names  # noqa: E402
from shardmill.schemas import COMPLETIONS, TOKENS, write_table  # noqa: E402
from shardmill.store.publish import publish_shard, unpublish_shard  # noqa: E402
from shardmill.store.restore import restore_shard  # noqa: E402

NAME = "bench-0123456789"
COUNTED = 20
CHUNK = 200
ROW_IDS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--mb", type=float, default=4.0)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--line-mb-s", type=float, default=50.0, help="0: no line, loopback alone")
    parser.add_argument("--round-trip-ms", type=float, default=20.0)
    parser.add_argument("--store", choices=["localbucket", "moto"], default="localbucket")
    options = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET, AWS_EC2_METADATA_DISABLED="true")
    with tempfile.TemporaryDirectory(prefix="publish-speed-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "server").mkdir()
        server = moto_server() if options.store == "moto" else registry_server(options.store, folder / "server")
        near = stack.enter_context(server)
        url = near.url
        if options.line_mb_s:
            line = Line(options.round_trip_ms / 1000, options.line_mb_s * 1e6)
            url = stack.enter_context(line_to(near.url, line))
        print(json.dumps(measure(near, url, folder, options), indent=2))


@dataclass
class Spent:
    seconds: float = 0.0
    cpu: float = 0.0


def measure(server: Server, url: str, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """`url`: the server's, or that of the line before it."""
    shards = shard_names(options.shards)
    here, there = BuildPaths(folder / "here" / NAME), BuildPaths(folder / "there" / NAME)
    size = make_shards(here, shards, options.mb)
    settings = store_settings(url, shards=options.shards)
    plain, near = client_of(url, server.key, server.secret), server.client()
    copies = folder / "plain"
    copies.mkdir()

    def put(shard: str) -> None:
        for path in (here.completions(shard), here.tokens(shard)):
            with path.open("rb") as body:
                plain.put_object(Bucket=BUCKET, Key=f"plain/{path.parent.name}/{path.name}", Body=body)

    def get(shard: str) -> None:
        for kind in ("completions", "tokens"):
            copy = copies / f"{kind}-{shard}"
            plain.download_file(BUCKET, f"plain/{kind}/{shard}.parquet", str(copy))

    def forget(shard: str) -> None:
        for kind in ("completions", "tokens"):
            near.delete_object(Bucket=BUCKET, Key=f"plain/{kind}/{shard}.parquet")
            (copies / f"{kind}-{shard}").unlink()
        there.completions(shard).unlink()
        there.tokens(shard).unlink()

    actions: dict[str, Callable[[str], None]] = {
        "plain_up": put,
        "publish": lambda shard: publish_shard(settings, here, shard),
        "plain_down": get,
        "restore": lambda shard: restore_shard(settings, there, shard),
    }
    # Imports and connections are not what is measured: a process has them once.
    for action in actions.values():
        action(shards[0])
    forget(shards[0])
    unpublish_shard(settings, here, shards[0])
    spent = {what: Spent() for what in actions}
    for start in range(0, len(shards), CHUNK):
        chunk = shards[start : start + CHUNK]
        for what, action in actions.items():
            timed(action, chunk, options.jobs, spent[what])
        for shard in chunk:
            forget(shard)
    return {
        "store": server.name,
        "shards": options.shards,
        "mb": round(size / 1e6, 1),
        "jobs": options.jobs,
        "line": {"mb_per_s": options.line_mb_s, "round_trip_ms": options.round_trip_ms} if options.line_mb_s else None,
        "seconds": {what: round(of.seconds, 2) for what, of in spent.items()},
        "mb_per_s": {what: round(size / 1e6 / of.seconds, 1) for what, of in spent.items()},
        "cpu_ms_per_shard": {what: round(1000 * of.cpu / options.shards, 1) for what, of in spent.items()},
        "publish_ratio": round(spent["plain_up"].seconds / spent["publish"].seconds, 2),
        "restore_ratio": round(spent["plain_down"].seconds / spent["restore"].seconds, 2),
        **requests(server, folder, options.mb),
    }


def timed(action: Callable[[str], None], shards: Iterable[str], jobs: int, spent: Spent) -> None:
    began, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(action, shards))
    spent.seconds += time.perf_counter() - began
    spent.cpu += time.process_time() - cpu


def requests(server: Server, folder: Path, mb: float) -> dict[str, float]:
    """Requests of a shard, up and down, over `COUNTED` more of them."""
    shards = shard_names(COUNTED)
    here, there = BuildPaths(folder / "counted" / NAME), BuildPaths(folder / "counted-there" / NAME)
    make_shards(here, shards, mb)
    with s3_proxy(server.url) as proxy:
        settings = store_settings(proxy.url, prefix="counted", shards=COUNTED)
        for shard in shards:
            publish_shard(settings, here, shard)
        published = proxy.requests
        for shard in shards:
            restore_shard(settings, there, shard)
        return {
            "requests_per_publish": published / COUNTED,
            "requests_per_restore": (proxy.requests - published) / COUNTED,
        }


def make_shards(build: BuildPaths, shards: list[str], mb: float) -> int:
    """Random ids don't compress: `mb` on disk. Returns bytes in all."""
    dice = random.Random(1)
    first = shards[0]
    rows = max(1, round(mb * 1e6 / (2 * ROW_IDS * 2.1)))
    ids = [[dice.randrange(49152) for _ in range(ROW_IDS)] for _ in range(rows)]
    write_table(
        build.completions(first),
        COMPLETIONS,
        ({"prompt_id": str(n), "status": "ok", "output_ids": row} for n, row in enumerate(ids)),
    )
    write_table(build.tokens(first), TOKENS, ({"prompt_id": str(n), "input_ids": row} for n, row in enumerate(ids)))
    for shard in shards[1:]:
        for place in (build.completions, build.tokens):
            place(shard).hardlink_to(place(first))
    return sum(place(shard).stat().st_size for shard in shards for place in (build.completions, build.tokens))


if __name__ == "__main__":
    main()
