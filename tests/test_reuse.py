"""Reuse between builds through Snakemake: what a changed setting costs, counted in the requests that a server got."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from s3servers import BUCKET, KEY, SECRET, moto_server
from shardmill.paths import shard_name
from shardmill.schemas import read_rows
from simserver import SimFleet, prompt_hash
from workspace import Workspace

RECORDS = 120
Row = dict[str, Any]
Key = tuple[str, int]


def record(number: int, turns: int = 1) -> dict[str, Any]:
    chat = []
    for turn in range(turns):
        chat.append({"from": "human", "value": f"Question {turn} about subject number {number}: what is it?"})
        chat.append({"from": "gpt", "value": f"An answer of another model, {number}.{turn}."})
    return {"id": f"record-{number}", "conversations": chat}


class Mill:
    """A workspace with its dataset and one simulated server, and what the server was asked since the last look."""

    def __init__(self, root: Path, fleet: SimFleet, shards: int = 1) -> None:
        self._fleet = fleet
        self._seen = len(fleet.logs())
        self._prompts: set[str] = set()
        self.workspace = Workspace(
            root,
            {
                "dataset": {"path": "data.json"},
                "prompts": {"shards": shards},
                "sampling": {"max_new_tokens": 30},
                "servers": {"engine": "sglang", "endpoints": fleet.urls},
                "generate": {"pilot_shards": 0},
                "quality": {"override": ["all"]},
            },
        )

    def write(self, records: list[dict[str, Any]]) -> None:
        (self.workspace.root / "data.json").write_text(json.dumps(records))

    def build(self, config: Mapping[str, Any] | None = None) -> tuple[str, dict[Key, Row]]:
        """Runs under the config so far with `config` over it; the build's name, and its rows."""
        self.workspace.configure(config or {})
        self.workspace.snakemake("--until", "publish")
        rows = rows_of(self.workspace.results)
        self._prompts.update(prompt_hash(row["prompt_ids"]) for row in rows.values())
        return self.workspace.results.name, rows

    def asked(self) -> int:
        """Requests for rows of this folder's builds since the last call (the fleet has a probe of its own)."""
        lines = self._fleet.logs()
        new, self._seen = lines[self._seen :], len(lines)
        return sum(line["event"] == "received" and line["prompt"] in self._prompts for line in new)


def rows_of(build: Path) -> dict[Key, Row]:
    rows = [row for path in sorted((build / "completions").glob("*.parquet")) for row in read_rows(path)]
    found = {(row["conversation_id"], row["turn"]): row for row in rows}
    assert len(found) == len(rows) and all(row["status"] == "ok" for row in rows)
    return found


def cut(rows: Mapping[Key, Row]) -> int:
    return sum(row["finish_reason"] == "length" for row in rows.values())


def check(rows: Mapping[Key, Row], expected: Mapping[Key, tuple[str, Row] | None]) -> None:
    """Each row is the expected one of the build that is named, in every column, or a new one (None)."""
    assert rows.keys() == expected.keys()
    for key, row in rows.items():
        earlier = expected[key]
        if earlier is None:
            assert row["reused_from"] is None
        else:
            assert row == {**earlier[1], "reused_from": earlier[0]}


@pytest.fixture(scope="module")
def fleet() -> Iterator[SimFleet]:
    with SimFleet(1, {"instant": True, "length_mean": 40.0, "length_sigma": 0.8, "eos_ids": [2]}) as fleet:
        yield fleet


def test_a_changed_build_pays_only_for_what_is_new(fleet: SimFleet, tmp_path: Path) -> None:
    mill = Mill(tmp_path, fleet)
    mill.write([record(number) for number in range(RECORDS)])
    first, at_30 = mill.build()
    assert mill.asked() == RECORDS and 30 < cut(at_30) < 100
    assert all(row["reused_from"] is None for row in at_30.values())

    # Raised: only rows that the old limit cut.
    second, at_60 = mill.build({"sampling": {"max_new_tokens": 60}})
    assert second != first and mill.asked() == cut(at_30)
    ended = {key: (first, row) for key, row in at_30.items() if row["finish_reason"] == "stop"}
    check(at_60, {key: ended.get(key) for key in at_30})

    # 1% appended: only the new prompts. What the second build took from the first one is still the first one's.
    mill.write([record(number) for number in range(RECORDS + 2)])
    third, appended = mill.build()
    assert mill.asked() == 2 and len(appended) == RECORDS + 2
    check(appended, {key: ended.get(key) or (second, at_60[key]) if key in at_60 else None for key in appended})
    mill.write([record(number) for number in range(RECORDS)])

    # Lowered: rows that are longer are not shortened. Those of just this length, which 30 cut, are right.
    fourth, at_20 = mill.build({"sampling": {"max_new_tokens": 20}})
    short = {key: source for key, source in ended.items() if source[1]["completion_tokens"] <= 20}
    assert mill.asked() == RECORDS - len(short) > 0
    check(at_20, {key: short.get(key) for key in at_20})

    # Another sampling: nothing.
    _, warmer = mill.build({"sampling": {"temperature": 0.9}})
    assert mill.asked() == RECORDS
    assert all(row["reused_from"] is None for row in warmer.values())

    # Other shards, and a limit that four builds have rows for: those cut at 60 are all that is asked.
    sampling = {"temperature": 0.7, "max_new_tokens": 400}
    _, at_400 = mill.build({"sampling": sampling, "prompts": {"shards": 2}})
    assert mill.asked() == cut(at_60)
    makers = {row["reused_from"] for row in at_400.values()}
    assert makers <= {None, first, second, fourth} and third not in makers

    # Without the old builds everything stays as it is.
    for name in (first, second, third, fourth):
        shutil.rmtree(tmp_path / "results" / name)
    assert "generate" not in mill.workspace.plan()
    assert rows_of(mill.workspace.results) == at_400 and mill.asked() == 0


def test_regenerated_turns_are_walked(fleet: SimFleet, tmp_path: Path) -> None:
    mill = Mill(tmp_path, fleet)
    mill.write([record(number, turns=3) for number in range(30)])
    first, short = mill.build({"prompts": {"turns": "regenerate"}})
    assert mill.asked() == len(short) == 90
    _, long = mill.build({"sampling": {"max_new_tokens": 500}})
    # A turn is reused where its prompt came out the same and its answer was whole: after whole turns always, and after
    # a cut one hardly ever (where nothing but the stop id had been cut off).
    ended = {key: row["finish_reason"] == "stop" for key, row in short.items()}
    whole = {key for key in short if all(ended[key[0], turn] for turn in range(key[1] + 1))}
    reused = {key for key in short if ended[key] and long[key]["prompt_id"] == short[key]["prompt_id"]}
    assert whole <= reused and len(reused - whole) < 5 and {turn for _, turn in whole} == {0, 1, 2}
    check(long, {key: (first, short[key]) if key in reused else None for key in short})
    assert mill.asked() == 90 - len(reused)


def test_the_plan_says_how_many_prompts_need_not_be_asked(fleet: SimFleet, tmp_path: Path) -> None:
    mill = Mill(tmp_path, fleet)
    mill.write([record(number) for number in range(40)])
    _, rows = mill.build()
    mill.workspace.configure({"sampling": {"max_new_tokens": 300}})
    told = mill.workspace.shardmill("plan", "--configfile", "overlay.yaml").stdout
    assert "reusable   not known yet" in told
    mill.workspace.snakemake("--until", "make_prompts")
    told = mill.workspace.shardmill("plan", "--json", "--configfile", "overlay.yaml").stdout
    plan = json.loads(told)
    assert plan["known"]["prompts_to_generate"] == 40 and plan["reusable"] == 40 - cut(rows)
    mill.asked()
    mill.build()
    assert mill.asked() == cut(rows)


def test_another_machine_reuses_what_is_in_the_store(
    fleet: SimFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with moto_server() as store:
        s3 = {"bucket": BUCKET, "prefix": "p", "endpoint_url": store.url, "region": "us-east-1"}
        machines = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            machines.append(Mill(tmp_path / name, fleet, shards=2))
            machines[-1].write([record(number) for number in range(60)])
        first, short = machines[0].build({"s3": s3})
        machines[1].asked()
        _, long = machines[1].build({"s3": s3, "sampling": {"max_new_tokens": 200}})
        paid = machines[1].asked()
        # A shard that is discarded is asked anew, though the older build still has rows for it.
        discarded = machines[1].workspace.results / "completions" / f"{shard_name(0, 2)}.parquet"
        thrown_away = {(row["conversation_id"], row["turn"]) for row in read_rows(discarded)}
        assert any(long[key]["reused_from"] == first for key in thrown_away)
        machines[1].workspace.shardmill("discard", shard_name(0, 2), "--yes")
        _, again = machines[1].build()
    assert machines[1].asked() == len(thrown_away) < len(long)
    assert all((row["reused_from"] is None) if key in thrown_away else row == long[key] for key, row in again.items())
    ended = {key: (first, row) for key, row in short.items() if row["finish_reason"] == "stop"}
    check(long, {key: ended.get(key) for key in short})
    assert paid == cut(short)
    # Nothing of the other machine's build stays here.
    assert not (machines[1].workspace.root / "results" / first).exists()
    assert not (machines[1].workspace.results / "run" / "reuse").exists()
