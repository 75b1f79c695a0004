"""Builds for the store's tests: small shards, the same content for the same seed."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

from shardmill.files import write_json
from shardmill.paths import BuildPaths, shard_names
from shardmill.schemas import COMPLETIONS, REJECTS, TOKENS, write_table

NAME = "sample-0123456789"


def make_shard(build: BuildPaths, shard: str, seed: int = 0, rows: int = 6, width: int = 20) -> None:
    """Completions (every third one failed) and tokens. Another `seed` is another machine's answers."""
    completions, tokens = [], []
    for number in range(rows):
        prompt = [number, seed, 7]
        output = [int(byte) for byte in _bytes(f"{shard} {seed} {number}", width)]
        ok = number % 3 != 2
        key = {
            "prompt_id": hashlib.sha256(f"{shard} {number}".encode()).hexdigest(),
            "conversation_id": hashlib.sha256(f"c {shard} {number}".encode()).hexdigest(),
            "source_id": f"source-{number}",
            "turn": 0,
        }
        completions.append(
            {
                **key,
                "status": "ok" if ok else "failed",
                "reason": None if ok else "empty",
                "prompt_ids": prompt,
                "output_ids": output if ok else [],
                "text": "text" if ok else None,
                "finish_reason": "stop" if ok else None,
                "prompt_tokens": 3,
                "completion_tokens": width if ok else 0,
                "attempts": 1,
                "server": "http://127.0.0.1:30000",
                "latency_s": 1.0,
                "finished_at": datetime(2026, 11, 29, tzinfo=UTC),
            }
        )
        if ok:
            tokens.append(
                {
                    **key,
                    "input_ids": prompt + output,
                    "loss_mask": [0] * 3 + [1] * width,
                    "prompt_len": 3,
                    "seq_len": 3 + width,
                    "finish_reason": "stop",
                }
            )
    write_table(build.completions(shard), COMPLETIONS, completions)
    write_table(build.tokens(shard), TOKENS, tokens)


def make_build(results: Path, shards: int = 8, made: int | None = None, seed: int = 0) -> BuildPaths:
    """A build's folder with its first `made` shards, not published."""
    build = BuildPaths(results / NAME)
    for shard in shard_names(shards)[: shards if made is None else made]:
        make_shard(build, shard, seed)
    write_table(build.rejects, REJECTS, [{"source_file": "a.json", "record": 1, "reason": "no_user_turn"}])
    write_json(
        build.build_json,
        {
            "build": NAME,
            "identity": {
                "prompts": {
                    "shards": shards,
                    "turns": "user_only",
                    "rejoin": True,
                    "dedupe": True,
                    "max_prompt_tokens": 1536,
                    "limit": None,
                },
                "sampling": {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "max_new_tokens": 96}
                | {"stop_token_ids": [], "seed": None},
                "model": {"name": "SmolLM2-135M-Instruct", "revision": None, "thinking": False, "context": 2048},
            },
            "model": {"vocab_size": 49152, "stop_ids": [2]},
            "counts": {"records": 10, "prompts": 6 * shards},
        },
    )
    return build


def files_of(build: BuildPaths, shard: str) -> dict[str, bytes]:
    paths = (build.completions(shard), build.tokens(shard), build.manifest(shard))
    return {str(path.relative_to(build.root)): path.read_bytes() for path in paths}


def assert_manifest_is_right(build: BuildPaths, shard: str) -> None:
    """Whoever sees a local manifest finds what it names, by content. Shares no code with what is tested."""
    for item in json.loads(build.manifest(shard).read_bytes())["objects"]:
        content = (build.root / item["path"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (item["size"], item["sha256"]), item["path"]


def _bytes(text: str, count: int) -> bytes:
    content = b""
    while len(content) < count:
        content += hashlib.sha256(f"{text} {len(content)}".encode()).digest()
    return content[:count]
