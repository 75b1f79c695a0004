"""How many completions a generate job handles in a second of its own CPU time, and whether its memory stays flat.

    python benchmarks/client_speed.py [--requests 20000] [--tokens 1800] [--memory]

A whole job as the workflow runs it (prompts from Parquet, the real fleet, HTTP, audit, journal, Parquet) against
simulated servers that answer at once with about 1,800 ids. Servers and fleet are other processes, so that the CPU time
counted is the job's alone; reading the prompts and the imports are not in it. Issue 3 asks for 400 completions a second
and core. `--memory` takes 100,000 requests, of 200 ids unless told otherwise, and samples the resident set over them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from shardmill.files import write_json  # noqa: E402
from shardmill.generate import job as generate_job  # noqa: E402
from shardmill.identity import prompt_id, sampling_identity  # noqa: E402
from shardmill.paths import BuildPaths, shard_name  # noqa: E402
from shardmill.runlock import acquire, myself  # noqa: E402
from shardmill.schemas import PROMPTS, count_rows, write_table  # noqa: E402
from shardmill.settings import Settings, resolve  # noqa: E402
from simserver import SimFleet  # noqa: E402

SHARD = shard_name(0, 1)
VOCABULARY = 49152
PROMPT_TOKENS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=None)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--memory", action="store_true", help="100,000 requests, and the resident set over them")
    options = parser.parse_args()
    requests = options.requests or (100_000 if options.memory else 10_000)
    tokens = options.tokens or (200 if options.memory else 1800)
    config = {"instant": True, "length_mean": tokens, "length_sigma": 0.05, "mtp": True}
    with tempfile.TemporaryDirectory(prefix="client-speed-") as folder, SimFleet(options.servers, config) as servers:
        settings = make_settings(Path(folder), servers.urls)
        build = make_build(settings, requests)
        with acquire(build.lock, myself("client_speed")):
            print(json.dumps(measure(settings, build, requests), indent=2))


def make_settings(folder: Path, urls: list[str]) -> Settings:
    return resolve(
        {
            "results": str(folder / "results"),
            "prompts": {"shards": 1},
            "sampling": {"max_new_tokens": 4096},
            "servers": {"engine": "sglang", "endpoints": urls},
            "generate": {"concurrency": 48},
        }
    )


def make_build(settings: Settings, requests: int) -> BuildPaths:
    build = BuildPaths(Path(settings.results) / "sample-0123456789")
    write_json(build.build_json, {"model": {"vocab_size": VOCABULARY, "stop_ids": [2]}})
    write_json(build.settings, settings.as_dict())
    sampling = sampling_identity(settings, [2])

    def rows() -> Iterator[dict[str, Any]]:
        source = random.Random(1)
        for number in range(requests):
            ids = [source.randrange(10, VOCABULARY) for _ in range(PROMPT_TOKENS)]
            yield {
                "prompt_id": prompt_id(ids, sampling),
                "conversation_id": f"{number:064x}",
                "source_id": str(number),
                "turn": 0,
                "prompt_ids": ids,
                "prompt_tokens": len(ids),
                "max_new_tokens": 4096,
                "messages": "[]",
                "tools": None,
            }

    write_table(build.prompts(SHARD), PROMPTS, rows())
    return build


def measure(settings: Settings, build: BuildPaths, requests: int) -> dict[str, Any]:
    marks: dict[str, float] = {}
    with compaction_marked(marks), resident_set(build) as samples:
        wall, cpu = time.perf_counter(), cpu_seconds()
        generate_job.generate_shard(settings, build, SHARD)
        wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    assert count_rows(build.completions(SHARD)) == requests
    asking = cpu - marks["compaction_cpu"]
    return {
        "requests": requests,
        "completions_per_cpu_s": round(requests / cpu),
        "cpu_ms_each": {
            "asking": round(1000 * asking / requests, 3),
            "compaction": round(1000 * marks["compaction_cpu"] / requests, 3),
        },
        "wall_s": round(wall, 1),
        "resident_mb": samples,
    }


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def compaction_marked(marks: dict[str, float]) -> Iterator[None]:
    """The CPU time of making the Parquet file out of the journal, which comes after the last answer."""
    really = generate_job.write_completions

    def marked(*arguments: Any) -> int:
        before = cpu_seconds()
        written = really(*arguments)
        marks["compaction_cpu"] = cpu_seconds() - before
        return written

    generate_job.write_completions = marked
    try:
        yield
    finally:
        generate_job.write_completions = really


@contextlib.contextmanager
def resident_set(build: BuildPaths) -> Iterator[dict[str, int]]:
    """The resident set in MB by answers done, at about every tenth of them."""
    samples: dict[str, int] = {}
    over = threading.Event()

    def sample() -> None:
        while not over.wait(2.0):
            with contextlib.suppress(OSError, ValueError):
                done = json.loads(build.progress(SHARD).read_bytes())["done"]
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                samples[str(done)] = pages * resource.getpagesize() // 2**20

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
        every = max(1, len(samples) // 10)
        for number, key in enumerate(list(samples)):
            if number % every:
                del samples[key]


if __name__ == "__main__":
    main()
