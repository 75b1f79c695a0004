"""Small datasets for the tests of reading, and one call that reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from shardmill.files import write_json
from shardmill.paths import BuildPaths, shard_names
from shardmill.prompts import make_prompts
from shardmill.reading import Conversation, ReadCounts, Reader, Reject
from shardmill.settings import resolve
from shardmill.wording import NOTES

CASES = Path(__file__).resolve().parents[2] / "shared" / "cases"


@dataclass
class Read:
    conversations: list[Conversation]
    rejects: list[Reject]
    counts: ReadCounts

    @property
    def texts(self) -> list[list[tuple[str, str]]]:
        return [[(message.role, message.content) for message in each.messages] for each in self.conversations]

    @property
    def reasons(self) -> list[str]:
        return [str(reject.reason) for reject in self.rejects]

    @property
    def ids(self) -> list[str]:
        return [each.source_id for each in self.conversations]


def read(files: Path | Sequence[Path], spool: Path, **options: Any) -> Read:
    """Reads to the end and checks what always holds; broken syntax is rejected unless an option says otherwise."""
    reader = Reader([files] if isinstance(files, Path) else files, spool, **{"bad_records": "reject", **options})
    conversations: list[Conversation] = []
    rejects: list[Reject] = []
    for each in reader.conversations():
        if isinstance(each, Reject):
            rejects.append(each)
        else:
            conversations.append(each)
    counts = reader.counts
    assert counts.balanced
    assert counts.notes.keys() <= NOTES.keys()
    assert (counts.conversations, counts.rejected) == (len(conversations), len(rejects))
    assert sum(counts.rejects.values()) == counts.rejected
    assert len({each.conversation_id for each in conversations}) == len(conversations)
    for each in conversations:
        assert any(message.role == "user" for message in each.messages)
        "".join(message.content for message in each.messages).encode()
    return Read(conversations, rejects, counts)


def turns(*texts: str, first: str = "human") -> list[dict[str, str]]:
    """Alternating turns, a human's first."""
    speakers = ("human", "gpt") if first == "human" else ("gpt", "human")
    return [{"from": speakers[number % 2], "value": text} for number, text in enumerate(texts)]


def record(name: str | None, *texts: str, first: str = "human", **more: Any) -> dict[str, Any]:
    named = {} if name is None else {"id": name}
    return {**named, "conversations": turns(*texts, first=first), **more}


def lines(records: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(each, ensure_ascii=False).encode() + b"\n" for each in records)


def array(records: Iterable[Any], indent: int | None = None) -> bytes:
    return json.dumps(list(records), ensure_ascii=False, indent=indent).encode()


def from_bytes(content: bytes, tmp_path: Path, name: str = "data.json", **options: Any) -> Read:
    path = tmp_path / name
    path.write_bytes(content)
    return read(path, tmp_path / "spool", **options)


def from_records(records: list[Any], tmp_path: Path, **options: Any) -> Read:
    return from_bytes(lines(records), tmp_path, **options)


def case(number: str, tmp_path: Path, file: str | None = None, **options: Any) -> Read:
    if not CASES.is_dir():
        pytest.skip(f"the cases are not at {CASES}")
    folder = next(CASES.glob(f"{number}-*"))
    return read(folder / file if file else next(folder.glob("input.*")), tmp_path / "spool", **options)


def case_input(number: str) -> str:
    return str(next(CASES.glob(f"{number}-*/input.*")))


def prompts_step(folder: Path, files: Sequence[str], processes: int = 1, **config: Any) -> BuildPaths:
    """The prompts step over `files` as its rule runs it, in a new build, of 4 shards where `config` doesn't say."""
    config["dataset"] = {"path": list(files), **config.get("dataset", {})}
    config["prompts"] = {"shards": 4, **config.get("prompts", {})}
    settings = resolve(config)
    build = BuildPaths(folder)
    build.run.mkdir(parents=True)
    write_json(build.build_json, {"identity": {}, "counts": None})
    make_prompts(settings, build, shard_names(settings.prompts.shards), workers=processes)
    return build


def prompt_rows(build: BuildPaths) -> list[dict[str, Any]]:
    """All rows of all prompts shards."""
    shards = sorted((build.root / "prompts").glob("shard-*.parquet"))
    return [row for path in shards for row in pq.read_table(path).to_pylist()]
