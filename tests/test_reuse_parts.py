"""Reuse between builds, its parts: which rows are right, which builds are looked at, who gets which answer."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from s3proxy import s3_proxy
from s3servers import BUCKET, KEY, SECRET, Server, moto_server
from shardmill.errors import ShardmillError, StoreError
from shardmill.files import sha256_file, write_bytes, write_json
from shardmill.identity import build_identity, prompt_id, sampling_identity
from shardmill.paths import BuildPaths, shard_name
from shardmill.plan import make_plan
from shardmill.redo import discard_shard
from shardmill.reuse.count import count_reusable
from shardmill.reuse.limits import Limits, still_right
from shardmill.reuse.lookup import Find, open_lookup
from shardmill.schemas import COMPLETIONS, PROMPTS, TOKENS, write_table
from shardmill.settings import Settings, resolve
from shardmill.store import patience
from shardmill.store.listing import Published
from shardmill.store.manifest import describe_shard
from shardmill.store.publish import publish_files, publish_shard
from shardmill.store.restore import restore_shard

STOP = 2
START = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
lengths = st.integers(1, 60)
limits = st.builds(Limits, lengths, st.integers(40, 100))


def outcome(limits: Limits, prompt_tokens: int, natural: int) -> tuple[int, str]:
    """What a model makes that would stop by itself after `natural` ids, the stop id among them."""
    most = limits.most(prompt_tokens)
    return (natural, "stop") if natural <= most else (most, "length")


@hypothesis_settings(max_examples=400)
@given(old=limits, new=limits, prompt_tokens=st.integers(1, 39), natural=lengths)
def test_a_row_is_right_exactly_when_it_would_come_out_the_same(
    old: Limits, new: Limits, prompt_tokens: int, natural: int
) -> None:
    made = outcome(old, prompt_tokens, natural)
    assert still_right(old, new, prompt_tokens, *made) == (made == outcome(new, prompt_tokens, natural))


def test_a_row_cut_early_for_speculation_is_right_where_the_limits_are_the_same() -> None:
    same = Limits(96, 100)
    assert still_right(same, same, 20, 64, "length")
    assert still_right(Limits(96, 100), Limits(500, 100), 20, 64, "length")  # the context cuts both at 80
    assert not still_right(Limits(96, 100), Limits(96, 110), 20, 64, "length")


# Builds in a results folder, made by hand.


def of(results: Path, **sections: Any) -> Settings:
    config: dict[str, Any] = {"name": "made", "results": str(results), "prompts": {"shards": 2}}
    config["sampling"] = {"max_new_tokens": 50}
    for name, values in sections.items():
        config[name] = {**config[name], **values} if isinstance(config.get(name), dict) else values
    return resolve(config)


def sampled(settings: Settings) -> bytes:
    return sampling_identity(settings, [STOP])


def row(
    settings: Settings, number: int, owner: str | None = None, length: int = 9, finish: str = "stop", **changes: Any
) -> dict[str, Any]:
    """A finished row; `number` decides its prompt. Its last ids tell one answer from another."""
    prompt = [100 + number, 7, 8]
    output = [1000 + number] * (length - 1) + [STOP if finish == "stop" else 5]
    return {
        "prompt_id": prompt_id(prompt, sampled(settings)),
        "conversation_id": owner or f"conversation-{number}",
        "source_id": f"source-{number}",
        "turn": 0,
        "status": "ok",
        "reason": None,
        "prompt_ids": prompt,
        "output_ids": output,
        "text": "…",
        "finish_reason": finish,
        "prompt_tokens": len(prompt),
        "completion_tokens": length,
        "accept_length": 2.5,
        "attempts": 1,
        "server": "http://127.0.0.1:30000",
        "latency_s": 1.25,
        "finished_at": START + timedelta(seconds=number, milliseconds=len(owner or "")),
        "reused_from": None,
        **changes,
    }


def make_build(settings: Settings, name: str, rows: Sequence[dict[str, Any]], shards: int = 2) -> BuildPaths:
    """A finished build, its rows dealt out to its shards in order."""
    build = BuildPaths(Path(settings.results) / name)
    write_json(build.build_json, {"build": name, "identity": build_identity(settings, "d" * 64, "t" * 64, None)})
    for index in range(shards):
        shard = shard_name(index, shards)
        write_table(build.completions(shard), COMPLETIONS, rows[index::shards])
        write_table(build.tokens(shard), TOKENS, [])
        write_bytes(build.manifest(shard), describe_shard(settings.s3, build, shard).to_bytes())
    return build


def new_build(settings: Settings, name: str = "made-new") -> BuildPaths:
    """A build about to generate all its shards."""
    build = BuildPaths(Path(settings.results) / name)
    write_json(build.build_json, {"build": name, "identity": build_identity(settings, "e" * 64, "t" * 64, None)})
    make_plan(settings, build, Published).save(build.plan)
    return build


class Job:
    """A lookup, asked as a job asks."""

    def __init__(self, lookup: Find, settings: Settings) -> None:
        self.lookup = lookup
        self._settings = settings

    def take(self, number: int, owner: str | None = None) -> tuple[list[int], str] | None:
        wanted = row(self._settings, number, owner)
        found = self.lookup(wanted["conversation_id"], 0, wanted["prompt_id"])
        return None if found is None else (list(found[0]["output_ids"]), found[1])


@pytest.fixture
def opened() -> Iterator[Any]:
    """Opens jobs of a build, and closes them at the end."""
    with ExitStack() as stack:
        yield lambda settings, build, shard="shard-00000-of-00002": Job(
            stack.enter_context(open_lookup(settings, build, shard)), settings
        )


def test_each_turn_gets_its_own_answer_with_all_that_is_told_of_it(tmp_path: Path, opened: Any) -> None:
    settings = of(tmp_path)
    rows = [row(settings, number) for number in range(7)]
    make_build(settings, "made-old", rows, shards=3)
    job = opened(settings, new_build(settings))
    for number in range(7):
        assert job.take(number) == (rows[number]["output_ids"], "made-old")
    assert job.take(7) is None
    found, _ = job.lookup("conversation-3", 0, rows[3]["prompt_id"])
    told = ("finish_reason", "accept_length", "attempts", "server", "latency_s", "finished_at", "reused_from")
    assert {name: found[name] for name in told} == {name: rows[3][name] for name in told}


def test_only_rows_that_are_right_are_given(tmp_path: Path, opened: Any) -> None:
    settings = of(tmp_path, sampling={"max_new_tokens": 20})
    old = of(tmp_path, sampling={"max_new_tokens": 30})
    rows = [
        row(old, 0, length=20),
        row(old, 1, length=21),
        row(old, 2, length=30, finish="length"),
        row(old, 3, length=20, finish="length"),
        row(old, 4, status="failed"),
    ]
    make_build(old, "made-old", rows)
    job = opened(settings, new_build(settings))
    assert [number for number in range(5) if job.take(number) is not None] == [0, 3]


@pytest.mark.parametrize(
    "change",
    [
        {"sampling": {"temperature": 0.5}},
        {"sampling": {"top_k": 5}},
        {"sampling": {"seed": 1}},
        {"sampling": {"stop_token_ids": [7]}},
        {"model": {"revision": "main"}},
        {"model": {"name": "another", "tokenizer": "t"}, "servers": {"engine": "sglang", "endpoints": ["http://h:1"]}},
    ],
    ids=lambda change: next(iter(next(iter(change.values())))),
)
def test_a_build_with_other_answers_is_not_looked_at(tmp_path: Path, change: dict[str, Any], opened: Any) -> None:
    settings = of(tmp_path)
    old = make_build(of(tmp_path, **change), "made-old", [row(settings, 0)])
    assert opened(settings, new_build(settings)).take(0) is None
    # …though its row would have been found by its prompt_id: it is the build that speaks against it.
    write_json(old.build_json, {"identity": build_identity(settings, "d" * 64, "t" * 64, None)})
    (BuildPaths(tmp_path / "made-new").reuse / "index.json").unlink()
    assert opened(settings, new_build(settings)).take(0) is not None


def test_an_answer_serves_its_own_conversation_and_one_more(tmp_path: Path, opened: Any) -> None:
    settings = of(tmp_path)
    twins = [row(settings, 0, owner, length=length) for owner, length in (("a", 5), ("bb", 6))]
    make_build(settings, "made-old", twins)
    build = new_build(settings)
    job, other_job = opened(settings, build), opened(settings, build)
    own = {owner: job.take(0, owner) for owner in ("a", "bb")}
    assert [len(own[owner][0]) for owner in ("a", "bb")] == [5, 6]
    strangers = {owner: (job, other_job)[index % 2].take(0, owner) for index, owner in enumerate(("x", "y", "z"))}
    given_out = [taken for taken in strangers.values() if taken is not None]
    assert sorted(len(output) for output, _ in given_out) == [5, 6]
    assert {owner: other_job.take(0, owner) for owner in strangers} == strangers  # asked again, the same
    assert {owner: job.take(0, owner) for owner in own} == own


def test_an_answer_that_two_builds_have_is_one_answer_and_keeps_its_maker(tmp_path: Path, opened: Any) -> None:
    settings = of(tmp_path)
    first = row(settings, 0, "a")
    make_build(settings, "made-1", [first])
    make_build(settings, "made-2", [{**first, "conversation_id": "b", "reused_from": "made-1"}])
    job = opened(settings, new_build(settings))
    assert job.take(0, "a") is not None and job.take(0, "b") is not None
    taken = [job.take(0, owner) for owner in ("x", "y")]
    assert [answer is not None for answer in taken] == [True, False]
    found, build = job.lookup("b", 0, first["prompt_id"])
    assert (found["reused_from"], build) == ("made-1", "made-2")


def spoil_torn(build: BuildPaths) -> None:
    path = build.completions(shard_name(0, 2))
    path.write_bytes(path.read_bytes()[:-40])


def spoil_flipped(build: BuildPaths) -> None:
    path = build.completions(shard_name(0, 2))
    content = bytearray(path.read_bytes())
    content[200] ^= 0xFF
    path.write_bytes(content)


def spoil_foreign(build: BuildPaths) -> None:
    """Parquet of another program, under a manifest that agrees with it."""
    shard = shard_name(0, 2)
    path, manifest = build.completions(shard), orjson.loads(build.manifest(shard).read_bytes())
    write_table(path, PROMPTS, [])
    manifest["objects"][0] |= {"size": path.stat().st_size, "sha256": sha256_file(path)}
    build.manifest(shard).write_bytes(orjson.dumps(manifest))


def spoil_manifest(build: BuildPaths) -> None:
    build.manifest(shard_name(0, 2)).write_bytes(b'{"format": 1')


def spoil_gone(build: BuildPaths) -> None:
    build.completions(shard_name(0, 2)).unlink()


@pytest.mark.parametrize("spoil", [spoil_torn, spoil_flipped, spoil_foreign, spoil_manifest, spoil_gone])
def test_a_broken_shard_gives_nothing_and_the_others_all(
    tmp_path: Path, spoil: Any, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = of(tmp_path)
    old = make_build(settings, "made-old", [row(settings, number) for number in range(40)])
    spoil(old)
    with caplog.at_level(logging.WARNING):
        job = opened(settings, new_build(settings))
        assert [number for number in range(40) if job.take(number)] == list(range(1, 40, 2))
    assert "shard-00000-of-00002" in caplog.text and "is reused of" in caplog.text


def test_a_build_without_a_manifest_or_without_an_identity_is_no_source(
    tmp_path: Path, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = of(tmp_path)
    shutil.rmtree(make_build(settings, "made-1", [row(settings, 0)]).root / "manifests")
    write_bytes(make_build(settings, "made-2", [row(settings, 1)]).build_json, b"{}")
    write_bytes(make_build(settings, "made-3", [row(settings, 2)]).build_json, b'{"identity": [1]}')
    (tmp_path / "latest").symlink_to("made-1")
    (tmp_path / "a file").touch()
    job = opened(settings, new_build(settings))
    assert [job.take(number) for number in range(3)] == [None] * 3
    assert "made-2" in caplog.text and "made-3" in caplog.text


def test_a_file_that_goes_while_the_job_runs_is_a_miss(tmp_path: Path, opened: Any) -> None:
    settings = of(tmp_path)
    old = make_build(settings, "made-old", [row(settings, number) for number in range(4)])
    job = opened(settings, new_build(settings))
    shutil.rmtree(old.root)
    assert [job.take(number) for number in range(4)] == [None] * 4


def test_the_index_is_made_once_a_run_and_again_when_something_came(tmp_path: Path, opened: Any) -> None:
    settings = of(tmp_path)
    make_build(settings, "made-1", [row(settings, 0)])
    build = new_build(settings)
    job = opened(settings, build)
    index = build.reuse / "index.sqlite"
    inode = index.stat().st_ino
    make_build(settings, "made-2", [row(settings, 1)])
    assert opened(settings, build).take(1) is None and index.stat().st_ino == inode  # the same run
    new_build(settings)
    assert opened(settings, build).take(1) is not None and index.stat().st_ino != inode
    assert job.take(0) is not None  # a job that outlives its run goes on with what it has
    inode = index.stat().st_ino
    new_build(settings)
    assert opened(settings, build).take(1) is not None and index.stat().st_ino == inode


def test_a_broken_index_is_one_sentence_and_deleting_it_helps(tmp_path: Path, opened: Any) -> None:
    settings = of(tmp_path)
    make_build(settings, "made-old", [row(settings, 0)])
    build = new_build(settings)
    opened(settings, build)
    for name in ("index.sqlite", "claims.sqlite"):
        (build.reuse / name).write_bytes(b"no database at all" * 500)
        with pytest.raises(ShardmillError, match="delete that folder"):
            opened(settings, build)
        shutil.rmtree(build.reuse)
        assert opened(settings, build).take(0) is not None


# What `shardmill plan` says.


def ask(build: BuildPaths, settings: Settings, asked: Sequence[tuple[int, str | None]]) -> None:
    """Prompts of a new build; every second one in the second shard."""
    for index in range(2):
        made = [row(settings, *item) for item in asked[index::2]]
        rows = [
            {**{name: item.get(name) for name in PROMPTS.names}, "max_new_tokens": 50, "messages": "[]", "tools": None}
            for item in made
        ]
        later = {**rows[0], "turn": 1, "prompt_id": None, "prompt_ids": None, "prompt_tokens": None}
        write_table(build.prompts(shard_name(index, 2)), PROMPTS, [*rows, {**later, "max_new_tokens": None}])


def test_the_plan_counts_what_the_jobs_then_take(tmp_path: Path, opened: Any) -> None:
    settings = of(tmp_path)
    rows = [row(settings, number) for number in range(6)] + [row(settings, 9, owner) for owner in ("a", "bb")]
    make_build(settings, "made-old", rows)
    build = new_build(settings)
    identity = build_identity(settings, "e" * 64, "t" * 64, None)
    shards = [shard_name(index, 2) for index in range(2)]
    assert count_reusable(settings, build, identity, shards) is None
    assert count_reusable(settings, build, identity, []) == 0
    # Own ones, strangers one by one, three strangers to two answers, and prompts that nobody had.
    asked = [(0, None), (1, None), (2, "x"), (2, "y"), (9, "a"), (9, "x"), (9, "y"), (9, "z"), (20, None), (21, None)]
    ask(build, settings, asked)
    counted = count_reusable(settings, build, identity, shards)
    assert not build.reuse.exists()  # a plan changes nothing
    job = opened(settings, build)
    assert counted == sum(job.take(*item) is not None for item in asked) == 6
    assert count_reusable(settings, build, identity, shards) == 6


def finish(settings: Settings, build: BuildPaths, shard: str) -> None:
    write_table(build.completions(shard), COMPLETIONS, [])
    write_table(build.tokens(shard), TOKENS, [])
    publish_shard(settings, build, shard)


def test_a_discarded_shard_takes_nothing_of_older_builds_until_it_is_finished(tmp_path: Path, opened: Any) -> None:
    settings = of(tmp_path)
    make_build(settings, "made-old", [row(settings, number) for number in range(4)])
    build = new_build(settings)
    identity = build_identity(settings, "e" * 64, "t" * 64, None)
    first, second = shard_name(0, 2), shard_name(1, 2)
    ask(build, settings, [(number, None) for number in range(4)])
    assert count_reusable(settings, build, identity, [first, second]) == 4
    discard_shard(settings, build, first)
    assert count_reusable(settings, build, identity, [first, second]) == 2
    assert count_reusable(settings, build, identity, [first]) == 0
    assert opened(settings, build, first).take(0) is None and opened(settings, build, second).take(1) is not None
    # A stop in between changes nothing; its end does.
    assert opened(settings, build, first).take(0) is None
    finish(settings, build, first)
    assert opened(settings, build, first).take(0) is not None


# Rows in the store alone.


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with moto_server() as server:
        yield server


@pytest.fixture
def stored(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings with a prefix of the test's own."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    s3 = {"bucket": BUCKET, "prefix": tmp_path.name, "endpoint_url": server.url, "region": "us-east-1"}
    return of(tmp_path, s3=s3, prompts={"shards": 4}, generate={"pilot_shards": 0})


def send(settings: Settings, build: BuildPaths, shards: int) -> None:
    """Publishes a build, and takes it away here."""
    publish_files(settings, build, [build.build_json])
    for index in range(shards):
        publish_shard(settings, build, shard_name(index, shards))
    shutil.rmtree(build.root)


def fetched(build: BuildPaths) -> int:
    return len(list((build.reuse / "objects").glob("*.parquet")))


def test_rows_come_from_the_store_and_only_shards_that_can_matter_are_fetched(
    stored: Settings, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [row(stored, number) for number in range(8)]
    send(stored, make_build(stored, "made-old", rows, shards=4), 4)
    cold = of(Path(stored.results), sampling={"temperature": 0.0})
    send(stored, make_build(cold, "made-cold", [row(cold, 0)]), 2)
    send(stored, make_build(stored, "made-bare", []), 0)
    build = new_build(stored)
    for index in (0, 3):  # those are finished
        write_table(build.completions(shard_name(index, 4)), COMPLETIONS, [])
    make_plan(stored, build, Published).save(build.plan)
    with caplog.at_level(logging.WARNING):
        job = opened(stored, build)
    assert fetched(build) == 2  # shards 1 and 2 of the build of as many shards, nothing of the cold one
    assert [number for number in range(8) if job.take(number)] == [1, 2, 5, 6]
    assert job.take(5) == (rows[5]["output_ids"], "made-old")
    assert caplog.text == ""


def test_an_object_that_is_not_what_its_manifest_says_is_left_out(
    stored: Settings, server: Server, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    send(stored, make_build(stored, "made-old", [row(stored, number) for number in range(8)], shards=4), 4)
    client, prefix = server.client(), f"{stored.s3.prefix}/made-old/"
    keys = [item["Key"] for item in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]]
    first, second = (next(key for key in keys if f"completions/{shard_name(index, 4)}" in key) for index in range(2))
    body = client.get_object(Bucket=BUCKET, Key=first)["Body"].read()
    client.put_object(Bucket=BUCKET, Key=first, Body=body[:-1] + b"!")
    client.delete_object(Bucket=BUCKET, Key=second)
    client.put_object(Bucket=BUCKET, Key=f"{prefix}manifests/{shard_name(2, 4)}.json", Body=b"{")
    job = opened(stored, new_build(stored))
    assert [number for number in range(8) if job.take(number)] == [3, 7]
    assert all(f"of shard-0000{index}-of-00004" in caplog.text for index in range(3))


def test_a_store_that_goes_away_meanwhile_costs_no_answer(
    stored: Settings, server: Server, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out, as a wrong object is, its rows would be paid for again."""
    monkeypatch.setattr(patience._Process, "patience_s", 0.0)
    send(stored, make_build(stored, "made-old", [row(stored, number) for number in range(8)], shards=4), 4)
    with s3_proxy(server.url) as proxy:
        through = of(Path(stored.results), s3={**vars_of(stored), "endpoint_url": proxy.url}, prompts={"shards": 4})
        build = new_build(through)
        for trouble in ("manifests/", "completions/"):
            proxy.add("status", operation="GetObject", key=trouble, status=501, code="NotNow")
            with pytest.raises(StoreError):
                opened(through, build)
            proxy.clear()
        assert [number for number in range(8) if opened(through, build).take(number)] == [*range(8)]


def test_another_build_that_may_not_be_read_is_left_out(
    stored: Settings, server: Server, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("made-old", "made-theirs"):
        send(stored, make_build(stored, name, [row(stored, number) for number in range(4)], shards=4), 4)
    with s3_proxy(server.url) as proxy:
        through = of(Path(stored.results), s3={**vars_of(stored), "endpoint_url": proxy.url}, prompts={"shards": 4})
        proxy.add("status", key="made-theirs/build.json", status=403, code="AccessDenied")
        assert opened(through, new_build(through)).take(1) is not None
    assert "Nothing is reused of the build made-theirs in the store" in caplog.text


def test_shards_of_one_content_are_fetched_once(stored: Settings, opened: Any) -> None:
    """Those without a row have the same bytes."""
    send(stored, make_build(stored, "made-old", [row(stored, 1)], shards=4), 4)
    build = new_build(stored)
    assert opened(stored, build).take(1) is not None
    assert fetched(build) == 2


def test_a_store_that_cannot_be_listed_stops_the_job(stored: Settings, opened: Any) -> None:
    gone = of(Path(stored.results), s3={**vars_of(stored), "bucket": "no-such-bucket"})
    with pytest.raises(StoreError):
        opened(gone, new_build(gone))
    offline = of(Path(stored.results), s3={**vars_of(stored), "bucket": "no-such-bucket", "offline": True})
    assert opened(offline, new_build(offline)).take(0) is None


def vars_of(settings: Settings) -> dict[str, Any]:
    return asdict(settings.s3)


def test_the_plan_does_not_know_what_lies_in_the_store_alone(stored: Settings, opened: Any) -> None:
    settings = of(Path(stored.results), s3=vars_of(stored))
    identity = build_identity(settings, "e" * 64, "t" * 64, None)
    build = new_build(settings)
    ask(build, settings, [(0, None), (1, None)])
    shards = [shard_name(index, 2) for index in range(2)]
    assert count_reusable(settings, build, identity, shards) == 0
    send(settings, make_build(settings, "made-old", [row(settings, 0)]), 2)
    assert count_reusable(settings, build, identity, shards) is None
    opened(settings, build)
    assert count_reusable(settings, build, identity, shards) == 1


def test_another_machine_knows_that_a_shard_was_discarded(
    stored: Settings, server: Server, tmp_path: Path, opened: Any
) -> None:
    send(stored, make_build(stored, "made-old", [row(stored, number) for number in range(4)], shards=4), 4)
    here, there = new_build(stored), BuildPaths(tmp_path / "there" / "made-new")
    shard = shard_name(0, 4)
    finish(stored, here, shard)
    discard_shard(stored, here, shard)
    shutil.copytree(here.root, there.root, ignore=shutil.ignore_patterns("discarded"))
    for index in range(4):
        write_table(there.prompts(shard_name(index, 4)), PROMPTS, [])
    assert count_reusable(stored, there, build_identity(stored, "e" * 64, "t" * 64, None), [shard]) == 0
    assert opened(stored, there, shard).take(0) is None and opened(stored, there, shard_name(1, 4)).take(1) is not None
    finish(stored, there, shard)

    marks = server.client().list_objects_v2(Bucket=BUCKET, Prefix=f"{stored.s3.prefix}/made-new/discarded/")
    assert "Contents" not in marks and not there.discarded(shard).exists() and here.discarded(shard).exists()
    restore_shard(stored, here, shard)
    assert not here.discarded(shard).exists()


def test_nothing_is_discarded_that_the_store_would_forget(stored: Settings) -> None:
    """With a store that refuses, all is as it was: no mark, and nothing gone."""
    gone = of(Path(stored.results), s3={**vars_of(stored), "bucket": "no-such-bucket"})
    build, shard = new_build(stored), shard_name(0, 4)
    finish(stored, build, shard)
    with pytest.raises(StoreError):
        discard_shard(gone, build, shard)
    assert not build.discarded(shard).exists() and build.completions(shard).exists() and build.manifest(shard).exists()
