"""Whole-build checks at scale: makes a build of the size of the known run (or a fraction), checks it, deletes it.

    python benchmarks/quality_scale.py [--fraction 0.05] [--folder /tmp]

At --fraction 1 it is 1,828 shards of 500 rows, 914,000 rows and about 1.6 billion tokens, and needs some
8 GB of disk.
The answers are random words and ids with the lengths of real ones: they compress worse than real text, so that times
are on the careful side. Figures are of a fresh process with two threads; the page cache is warm, as after a real run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.files import write_json
from shardmill.paths import BuildPaths, shard_name
from shardmill.schemas import COMPLETIONS, PROMPTS, REJECTS, TOKENS, write_table
from shardmill.settings import resolve

SHARDS, ROWS = 1828, 500
VOCABULARY, STOP, CLOSE = 248_320, 248_046, 248_069
MEAN_PROMPT, MEAN_ANSWER = 300, 1495
SETTINGS = {
    "prompts": {"shards": SHARDS},
    "model": {"name": "Qwen/Qwen3.6-27B", "thinking": True, "context": 32768},
    "sampling": {"max_new_tokens": 8192},
    "servers": {"engine": "sglang", "endpoints": ["http://127.0.0.1:30000"]},
    "cost": {"usd_per_gpu_hour": 3.8},
}
MEASURE = """
import json, resource, sys, time
from pathlib import Path
import duckdb
from shardmill.files import read_json
from shardmill.paths import BuildPaths
from shardmill.quality.run import check_build
from shardmill.report import write_report
from shardmill.settings import resolve
build = BuildPaths(Path(sys.argv[1]))
settings = resolve(read_json(build.settings))
begin = time.perf_counter()
check_build(build, settings) if sys.argv[2] == "checks" else write_report(build, settings)
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"seconds": time.perf_counter() - begin, "cpu_seconds": used.ru_utime + used.ru_stime,
                  "peak_mb": used.ru_maxrss / 1024}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fraction", type=float, default=0.02, help="of the known run's shards")
    parser.add_argument("--folder", type=Path, default=None, help="where the build is made for the time being")
    parser.add_argument("--mean-answer", type=int, default=MEAN_ANSWER, help="tokens; small for memory by rows alone")
    options = parser.parse_args()
    shards = max(1, round(SHARDS * options.fraction))
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="quality-scale-") as folder:
        build = BuildPaths(Path(folder) / "scale-0123456789")
        begin = time.perf_counter()
        tokens = make_build(build, shards, options.mean_answer)
        made = time.perf_counter() - begin
        size = sum(path.stat().st_size for path in build.root.rglob("*.parquet"))
        print(
            f"{shards:,} shards, {shards * ROWS:,} rows, {tokens:,} tokens, {size / 1e9:.2f} GB, made in {made:.0f} s"
        )
        for what in ("checks", "report"):
            found = measure(build, what)
            share = shards / SHARDS
            line = (
                f"{what}: {found['seconds']:.1f} s, {found['cpu_seconds']:.1f} CPU-s, peak {found['peak_mb']:,.0f} MB"
            )
            if share < 1:
                minutes = [found[key] / share / 60 for key in ("seconds", "cpu_seconds")]
                line += f"; times {1 / share:.0f} for the whole run: {minutes[0]:.1f} min, {minutes[1]:.1f} CPU-min"
            print(line, flush=True)


def measure(build: BuildPaths, what: str) -> dict[str, float]:
    """In a process of its own, so that the peak is its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(build.root), what], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def make_build(build: BuildPaths, shards: int, mean_answer: int) -> int:
    random = np.random.default_rng(7)
    words = np.array([f" word{number}"[: random.integers(3, 8)] for number in range(4000)])
    tokens = 0
    by_shard = {}
    for index in range(shards):
        name = shard_name(index, SHARDS)
        tokens += write_shard(build, name, index, random, words, mean_answer)
        by_shard[name] = ROWS
    write_table(build.rejects, REJECTS, [])
    settings = resolve(SETTINGS)
    write_json(build.settings, settings.as_dict())
    rows = shards * ROWS
    counts = {"records": rows, "joined": 0, "rejected": 0, "duplicates": 0, "beyond_limit": 0}
    counts |= {"conversations": rows, "prompts": rows, "prompts_by_shard": by_shard}
    model = {"vocab_size": VOCABULARY, "stop_ids": [STOP, STOP - 1], "think_close_ids": [CLOSE]}
    facts = {"build": build.name, "identity": {}, "versions": {}, "created_at": None}
    write_json(build.build_json, facts | {"model": model, "counts": counts})
    return tokens


def write_shard(
    build: BuildPaths, name: str, index: int, random: np.random.Generator, words: np.ndarray, mean_answer: int
) -> int:
    prompts = lengths(random, MEAN_PROMPT, 8000)
    answers = lengths(random, mean_answer, 8192)
    prompt_ids, output_ids = ids(random, prompts), ids(random, answers)
    ends = np.cumsum(answers)
    output_ids[ends - 1] = STOP
    output_ids[ends - 1 - answers // 3] = CLOSE
    texts = [answer_text(random, words, int(length)) for length in answers]
    conversations = [hashlib.sha256(f"{index} {row}".encode()).hexdigest() for row in range(ROWS)]
    keys = {
        "prompt_id": [hashlib.sha256(key.encode()).hexdigest() for key in conversations],
        "conversation_id": conversations,
        "source_id": [key[:12] for key in conversations],
        "turn": [0] * ROWS,
    }
    started = 1_780_000_000_000 + index * 20_000
    finished = [started + 40 * row for row in range(ROWS)]
    accept = random.normal(3.0, 0.3, ROWS).round(3)
    prompt_lists, output_lists = lists(prompt_ids, prompts), lists(output_ids, answers)
    ask = " ".join(words[random.integers(0, len(words), 250)])
    messages = [json.dumps([{"role": "user", "content": f"{row} {ask}"}]) for row in range(ROWS)]
    none = [None] * ROWS
    put(
        build.prompts(name),
        PROMPTS,
        keys
        | {"prompt_ids": prompt_lists, "prompt_tokens": prompts, "max_new_tokens": [8192] * ROWS}
        | {"messages": messages, "tools": none},
    )
    put(
        build.completions(name),
        COMPLETIONS,
        keys
        | {"status": ["ok"] * ROWS, "reason": none, "prompt_ids": prompt_lists, "output_ids": output_lists}
        | {"text": texts, "finish_reason": ["stop"] * ROWS, "prompt_tokens": prompts, "completion_tokens": answers}
        | {"accept_length": accept, "attempts": [1] * ROWS, "server": [f"http://127.0.0.1:{30000 + index % 7}"] * ROWS}
        | {"latency_s": [60.0] * ROWS, "finished_at": finished, "reused_from": none},
    )
    both = prompts + answers
    joined, mask = np.empty(both.sum(), np.int32), np.zeros(both.sum(), np.uint8)
    starts = np.cumsum(both) - both
    for row, (at, prompt, answer) in enumerate(zip(starts, prompts, answers, strict=True)):
        of_prompt, of_answer = ends_before(prompts, row), ends_before(answers, row)
        joined[at : at + prompt] = prompt_ids[of_prompt : of_prompt + prompt]
        joined[at + prompt : at + prompt + answer] = output_ids[of_answer : of_answer + answer]
        mask[at + prompt : at + prompt + answer] = 1
    put(
        build.tokens(name),
        TOKENS,
        keys
        | {"input_ids": lists(joined, both), "loss_mask": lists(mask, both), "prompt_len": prompts, "seq_len": both}
        | {"finish_reason": ["stop"] * ROWS, "accept_length": accept, "reused_from": none},
    )
    return int(both.sum())


def lengths(random: np.random.Generator, mean: int, most: int) -> np.ndarray:
    spread = 0.9
    drawn = random.lognormal(np.log(mean) - spread**2 / 2, spread, ROWS)
    return np.clip(drawn, 20, most).astype(np.int32)


def ids(random: np.random.Generator, counts: np.ndarray) -> np.ndarray:
    """Ids as often as words are in text: few very often, most of them rarely."""
    drawn = random.zipf(1.1, int(counts.sum()) * 2)
    drawn = drawn[drawn < VOCABULARY - 1000][: counts.sum()]
    return np.resize(drawn, counts.sum()).astype(np.int32)


def answer_text(random: np.random.Generator, words: np.ndarray, tokens: int) -> str:
    text = "".join(words[random.integers(0, len(words), tokens)])
    cut = len(text) * 2 // 3
    return f"{text[:cut]}</think>\n\n{text[cut:]}"


def lists(values: np.ndarray, counts: np.ndarray) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def ends_before(counts: np.ndarray, row: int) -> int:
    return int(counts[:row].sum())


def put(path: Path, schema: pa.Schema, columns: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = [
        column.cast(field.type) if isinstance(column, pa.Array) else pa.array(column, type=field.type)
        for field, column in ((field, columns[field.name]) for field in schema)
    ]
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), path, compression="zstd")


if __name__ == "__main__":
    main()
