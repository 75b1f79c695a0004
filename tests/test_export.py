"""`shardmill export`, through its front door: what goes out, what doesn't and why, and what its readers make of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit import (
    Given,
    make_build,
    read_dataset,
    read_records,
    read_slices,
    read_token_freq,
    specforge_takes,
    tokens_row,
    write_shard,
)
from shardmill.cli import cli
from shardmill.errors import DataError, ShardmillError, UsageError
from shardmill.paths import BuildPaths

SOME = [Given(3, 5), Given(10, 30), Given(4, 2), Given(40, 9), Given(1, 60), Given(7, 7), Given(20, 20)]


def run(trainer: str, build: BuildPaths, out: Path, *options: str) -> Result:
    result = CliRunner().invoke(cli, ["export", trainer, "--build", str(build.root), "--out", str(out), *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def account(trainer: str, build: BuildPaths, out: Path, *options: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(run(trainer, build, out, *options, "--json").stdout)
    return report


def as_pairs(rows: list[dict[str, Any]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return sorted((tuple(row["input_ids"]), tuple(row["loss_mask"])) for row in rows)


def expected(
    rows: list[Given], limit: int | None, longer: str, at_least: int
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """What must come out and what is dropped, by a reading of the rules that shares no code with the export."""
    out, dropped = [], Counter[str]()
    for number, row in enumerate(rows):
        full = tokens_row(number, row)
        end = limit if limit is not None and row.prompt + row.answer > limit else None
        if end is not None and longer == "drop":
            dropped["longer"] += 1
        elif sum(full["loss_mask"][:end]) < at_least:
            dropped["too_few_supervised"] += 1
        else:
            end = None if longer == "keep" else end
            out.append({"input_ids": full["input_ids"][:end], "loss_mask": full["loss_mask"][:end]})
    return out, dropped


@given(
    rows=st.lists(st.builds(Given, st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12),
    limit=st.none() | st.integers(2, 60),
    longer=st.sampled_from(["drop", "cut", "keep"]),
    trainer=st.sampled_from(["specforge", "speculators"]),
    at_least=st.integers(1, 6),
)
@settings(max_examples=25, deadline=None)
def test_every_row_goes_out_or_is_counted(
    rows: list[Given], limit: int | None, longer: str, trainer: str, at_least: int
) -> None:
    out, dropped = expected(rows, limit, longer, at_least)
    options = ["--min-supervised", str(at_least)]
    options += ["--max-length", str(limit), "--longer", longer] if limit is not None else []
    with tempfile.TemporaryDirectory() as name:
        build, folder = make_build(Path(name), rows), Path(name) / "out"
        if not out:
            with pytest.raises(DataError, match="No row of sample-0123456789 is left"):
                account(trainer, build, folder, *options)
            assert not folder.exists()
            return
        report = account(trainer, build, folder, *options)
        written = read_records(folder) if trainer == "specforge" else read_dataset(folder)
        assert as_pairs(written) == as_pairs(out)
        if trainer == "speculators":
            supervised = Counter[int]()
            for row in out:
                supervised.update(i for i, flag in zip(row["input_ids"], row["loss_mask"], strict=True) if flag)
            assert read_token_freq(folder) == supervised
            assert all(row["seq_len"] == len(row["input_ids"]) for row in written)
    assert report["dropped"] == dict(dropped)
    assert report["rows_in"] == len(rows) == report["rows_out"] + sum(report["dropped"].values())
    over = sum(limit is not None and row.prompt + row.answer > limit for row in rows)
    assert report["cut"] + report["kept_longer"] + dropped["longer"] <= over
    part = report["splits"]["train"]
    assert part["tokens"] == sum(len(row["input_ids"]) for row in out)
    assert part["supervised"] == sum(sum(row["loss_mask"]) for row in out)
    assert part["longest"] == max(len(row["input_ids"]) for row in out)


def test_specforge_takes_every_row_that_is_exported_and_none_that_is_not(tmp_path: Path) -> None:
    rows = [Given(prompt, answer) for prompt in (1, 5, 18, 19, 20, 25) for answer in (1, 2, 3, 30)]
    build = make_build(tmp_path, rows)
    for longer in ("cut", "keep"):
        report = account("specforge", build, tmp_path / longer, "--max-length", "20", "--longer", longer)
        written = read_records(tmp_path / longer)
        assert all(specforge_takes(record, 20, 2, True) for record in written)
        taken = [number for number, row in enumerate(rows) if specforge_takes(tokens_row(number, row), 20, 2, True)]
        assert len(written) == len(taken) < len(rows) == report["rows_in"]
        known = {f"{row['conversation_id']}_{row['turn']}" for row in (tokens_row(n, rows[n]) for n in taken)}
        assert {record["id"] for record in written} == known


def test_slices_fit_the_memory_and_are_filled(tmp_path: Path) -> None:
    rows = [Given(100, 100 + number % 50) for number in range(120)]
    run("specforge", make_build(tmp_path, rows), tmp_path / "out", "--memory-gb", "0.0003")
    # 48.6 bytes a token: facts/peers.md (c).
    sizes = [48.6 * sum(len(record["input_ids"]) for record in part) for part in read_slices(tmp_path / "out")]
    assert len(sizes) > 3 and all(size <= 3e5 for size in sizes)
    assert all(size > 2.5e5 for size in sizes[:-1])


def test_a_row_that_fits_no_slice_is_named(tmp_path: Path) -> None:
    build = make_build(tmp_path, [Given(3, 5), Given(500, 2000, "long")])
    with pytest.raises(DataError, match=r"Turn 0 of long has 2500 tokens.*--memory-gb"):
        run("specforge", build, tmp_path / "out", "--memory-gb", "0.0001")
    assert not (tmp_path / "out").exists()


def test_the_summary_names_every_count(tmp_path: Path) -> None:
    rows = [Given(4, 10), Given(4, 30), Given(30, 10), Given(4, 1)]
    summary = run("specforge", make_build(tmp_path, rows), tmp_path / "out", "--max-length", "20").stdout
    assert "4 rows in = 2 out (train 2) + 2 dropped (2 too_few_supervised); 1 cut, 0 longer and kept" in summary
    assert "34 tokens, 26 supervised, 51.0% of the supervised tokens; longest row 20." in summary
    assert "4 rows in = 2 out" in (tmp_path / "out" / "README.md").read_text()


def test_splits_keep_a_conversation_whole_and_stay(tmp_path: Path) -> None:
    # Parts a_0, a_4, … of one conversation, and turns of one record, spread over all shards.
    rows = [Given(3, 5, f"id{index % 150:04x}q_{index // 150 * 4}", turn) for index in range(450) for turn in range(2)]
    build = make_build(tmp_path, rows, shards=4)
    of: dict[str, dict[str, str]] = {}
    for share in ("0.1", "0.3"):
        report = account("specforge", build, tmp_path / share, "--split", f"validation={share}")
        where: dict[str, set[str]] = {}
        source = {tokens_row(n, row)["conversation_id"]: row.source_id or "" for n, row in enumerate(rows)}
        for split in ("train", "validation"):
            for record in read_records(tmp_path / share, split):
                where.setdefault(source[record["id"].split("_")[0]].split("_")[0], set()).add(split)
        assert len(where) == 150 and all(len(splits) == 1 for splits in where.values())
        assert sum(part["rows"] for part in report["splits"].values()) == 900
        # 150 conversations: within 4 standard deviations of the share asked for.
        got = sum(splits == {"validation"} for splits in where.values()) / 150
        assert abs(got - float(share)) < 4 * (float(share) * (1 - float(share)) / 150) ** 0.5
        of[share] = {conversation: splits.pop() for conversation, splits in where.items()}
    grown = {name for name, split in of["0.1"].items() if split == "validation"}
    assert grown < {name for name, split in of["0.3"].items() if split == "validation"}


def test_numbered_ids_are_split_when_taken_whole(tmp_path: Path) -> None:
    build = make_build(tmp_path, [Given(3, 5, f"conv_{number}") for number in range(60)])
    with pytest.raises(DataError, match="--split-ids whole"):
        run("specforge", build, tmp_path / "out", "--split", "validation=0.3")
    report = account("specforge", build, tmp_path / "out", "--split", "validation=0.3", "--split-ids", "whole")
    assert 5 < report["splits"]["validation"]["rows"] < 35


@pytest.mark.parametrize(
    "texts",
    [
        ["validation"],
        ["validation=0"],
        ["validation=1"],
        ["x=nan"],
        ["a b=0.1"],
        ["../x=0.1"],
        ["x=0.1", "x=0.1"],
        ["x=0.6", "y=0.4"],
        ["train=0.5", "x=0.1"],
    ],
)
def test_splits_that_make_no_sense_are_refused(tmp_path: Path, texts: list[str]) -> None:
    build = make_build(tmp_path, SOME)
    with pytest.raises(UsageError, match="--split"):
        run("specforge", build, tmp_path / "out", *(word for text in texts for word in ("--split", text)))


def test_splits_may_name_train(tmp_path: Path) -> None:
    build = make_build(tmp_path, [Given(3, 5) for _ in range(60)])
    report = account("specforge", build, tmp_path / "out", "--split", "train=0.7", "--split", "validation=0.3")
    assert list(report["splits"]) == ["train", "validation"]


def test_speculators_takes_the_training_split_by_position(tmp_path: Path) -> None:
    build = make_build(tmp_path, [Given(3, 5 + number % 9) for number in range(80)])
    said = run("speculators", build, tmp_path / "out", "--split", "validation=0.2", "--split", "test=0.1").stdout
    splits = {name: read_dataset(tmp_path / "out" / name) for name in ("train", "validation", "test")}
    whole = read_dataset(tmp_path / "out")
    assert whole == splits["train"] + splits["validation"] + splits["test"]
    ratio = float(said.partition("--train-data-ratio ")[2].partition(":")[0])
    assert int(len(whole) * ratio) == len(splits["train"])
    counts = [Counter(read_token_freq(tmp_path / "out" / name)) for name in splits]
    assert sum(counts, Counter()) == read_token_freq(tmp_path / "out")
    states = [json.loads((tmp_path / "out" / name / "state.json").read_text()) for name in splits]
    assert len({state["_fingerprint"] for state in states}) == 3
    assert [state["_split"] for state in states] == ["train", "validation", "test"]


def test_long_datasets_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmill.export.speculators._BATCH_TOKENS", 100)
    monkeypatch.setattr("shardmill.export.speculators._FILE_TOKENS", 300)
    rows = [Given(3, 5 + number % 9) for number in range(80)]
    report = account("speculators", make_build(tmp_path, rows), tmp_path / "out")
    assert len(report["files"]) >= 3
    assert as_pairs(read_dataset(tmp_path / "out")) == as_pairs(expected(rows, None, "cut", 1)[0])


def test_the_hubs_own_package_loads_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As save_to_disk's own, but for the format: torch, which asks for tensors, is not in this environment."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # read when the package is imported
    import datasets

    rows, out = [Given(3, 5 + number % 9) for number in range(40)], tmp_path / "out"
    run("speculators", make_build(tmp_path, rows), out, "--split", "validation=0.3")
    for folder in (out, out / "train", out / "validation"):
        state = json.loads((folder / "state.json").read_text())
        assert state["_format_type"] == "torch"
        (folder / "state.json").write_text(json.dumps(state | {"_format_type": None}))
        loaded = datasets.load_from_disk(str(folder))
        assert {str(feature) for feature in loaded.features.values()} == {"List(Value('int64'))", "Value('int64')"}
        assert loaded["seq_len"][:] == [len(ids) for ids in loaded["input_ids"]]
        assert as_pairs(loaded.to_list()) == as_pairs(read_dataset(folder))


def test_the_same_build_makes_the_same_bytes(tmp_path: Path) -> None:
    build = make_build(tmp_path, SOME)
    for trainer in ("specforge", "speculators"):
        folders = [tmp_path / f"{trainer}-{number}" for number in range(2)]
        for folder in folders:
            run(trainer, build, folder)
        contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
        assert contents[0] == contents[1]


@pytest.mark.parametrize("beyond", ["a-file/out", "a-file/new/out", "/proc/out", "x" * 300])
def test_a_place_where_no_folder_can_be_made_is_one_sentence(tmp_path: Path, beyond: str) -> None:
    build = make_build(tmp_path, SOME)
    (tmp_path / "a-file").touch()
    with pytest.raises(UsageError, match=r"^No folder can be made at .* \(.+\): give --out another place\.$"):
        run("specforge", build, tmp_path / beyond)
    assert (tmp_path / "a-file").read_bytes() == b""


@pytest.mark.parametrize("passed", [None, False])
def test_a_build_that_is_not_well_needs_partial(tmp_path: Path, passed: bool | None) -> None:
    build = make_build(tmp_path, SOME, passed=passed)
    why = "quality checks have not run" if passed is None else r"did not pass its quality checks \(loops\)"
    with pytest.raises(DataError, match=f"{why}.*--partial"):
        run("specforge", build, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert account("specforge", build, tmp_path / "out", "--partial")["partial"]
    assert "--partial" in (tmp_path / "out" / "README.md").read_text()


def test_only_shards_with_a_manifest_go_out(tmp_path: Path) -> None:
    rows = [Given(number + 1, 5) for number in range(12)]
    build = make_build(tmp_path, rows, shards=4)
    build.manifest("shard-00001-of-00004").unlink()
    build.tokens("shard-00003-of-00004").unlink()
    with pytest.raises(DataError, match=r"2 of 4 shards are not finished here \(shard-00001-of-00004, shard-00003"):
        run("specforge", build, tmp_path / "out")
    report = account("specforge", build, tmp_path / "out", "--partial")
    assert (report["shards"], report["rows_in"]) == (2, 6)
    lengths = {len(record["input_ids"]) - 5 for record in read_records(tmp_path / "out")}
    assert lengths == {number + 1 for number in range(12) if number % 4 in (0, 2)}


def test_a_changed_file_is_found_out(tmp_path: Path) -> None:
    build = make_build(tmp_path, SOME)
    path = build.tokens("shard-00001-of-00003")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"shard-00001-of-00003\.parquet is not the file that its manifest names"):
        run("speculators", build, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"input_ids": [], "loss_mask": []}, "no ids"),
        ({"loss_mask": [0, 1]}, "loss mask of 2"),
        ({"input_ids": [1, 2, 5000]}, "vocabulary of 5000"),
        ({"input_ids": [1, 2, -1]}, "vocabulary of 5000"),
        ({"loss_mask": [0, 1, 2]}, "something else than 0 and 1"),
        ({"input_ids": [1, None, 3]}, "a null"),
        ({"loss_mask": None}, "loss mask of 0"),
    ],
)
def test_a_malformed_row_stops_the_export(tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    build = make_build(tmp_path, SOME)
    good = tokens_row(1, Given(2, 1))
    write_shard(build, "shard-00002-of-00003", [good, {**tokens_row(2, Given(1, 2)), **change}])
    with pytest.raises(DataError, match=rf"shard-00002-of-00003.parquet, row \d: .*{fault}"):
        run("specforge", build, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [build.name]


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    build = make_build(tmp_path, SOME)
    (tmp_path / "out").mkdir()
    run("specforge", build, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for trainer in ("specforge", "speculators"):
        with pytest.raises(UsageError, match="is there already"):
            run(trainer, build, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("trainer", ["specforge", "speculators"])
@pytest.mark.parametrize("step", ["_take", "write_text"])
def test_a_killed_export_leaves_nothing_that_looks_whole(tmp_path: Path, trainer: str, step: str) -> None:
    """Killed at its fifth row, and when every file is written but the folder is not yet in its place."""
    build, out = make_build(tmp_path, SOME), tmp_path / "out"
    script = f"""
import os, signal, shardmill.export.run as run
from shardmill.cli import main
original, calls = run.{step}, []
def killed(*arguments):
    calls.append(1)
    if len(calls) == (5 if "{step}" == "_take" else 1):
        os.kill(os.getpid(), signal.SIGKILL)
    original(*arguments)
run.{step} = killed
main()
"""
    arguments = ["export", trainer, "--build", str(build.root), "--out", str(out)]
    killed = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(".")] == [build.root]
    again = run(trainer, build, out)
    assert "another export" in again.stderr and out.exists()


def test_wrong_use_is_said(tmp_path: Path) -> None:
    build = make_build(tmp_path, SOME)
    with pytest.raises(UsageError, match="--max-length"):
        run("specforge", build, tmp_path / "out", "--longer", "drop")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ShardmillError, match="is there already"):
        run("specforge", build, tmp_path / "file")


# The peers' own code. docs/export.md says how to make the Python that SHARDMILL_PEERS_PYTHON names.

PEERS = os.environ.get("SHARDMILL_PEERS_PYTHON", sys.executable)

SPECFORGE = """
import json, sys
from specforge.data.loss_mask import has_consecutive_supervised_tokens
from specforge.data.prompt_builder import prepare_prompt_tasks
tasks = []
for path in sys.argv[2:]:
    tasks += prepare_prompt_tasks(path, None, chat_template=None, max_length=int(sys.argv[1]), is_preformatted=False,
        train_only_last_turn=False, cache_dir=None, cache_key=None, num_proc=None, min_loss_tokens=2,
        loss_mask_filter=has_consecutive_supervised_tokens)
print(json.dumps([task["payload"] for task in tasks]))
"""

SPECULATORS = """
import json, sys
import torch
from speculators.train.data import ArrowDataset
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
folder, ratio = sys.argv[1], float(sys.argv[2])
rows = {}
for split in ("train", "val"):
    dataset = ArrowDataset(max_len=30, datapath=folder, train_ratio=ratio, split=split)
    items = [dataset.data[index] for index in range(len(dataset))]
    assert all(item["input_ids"].dtype == item["loss_mask"].dtype == torch.int64 for item in items)
    assert dataset.approx_lengths == [len(item["input_ids"]) for item in items]
    rows[split] = [{name: item[name].tolist() for name in ("input_ids", "loss_mask")} for item in items]
counts = torch.load(folder + "/token_freq.pt", weights_only=True)
build_vocab_mappings_from_distribution(counts, 50, 5000)
print(json.dumps({"rows": rows, "counts": list(counts.items())}))
"""


def ask_peer(module: str, script: str, *arguments: str) -> Any:
    guarded = (
        f"import sys\ntry:\n    import {module}\nexcept ImportError as error:\n    sys.exit('cannot ' + repr(error))\n"
    )
    answer = subprocess.run([PEERS, "-c", guarded + script, *arguments], capture_output=True, text=True, timeout=500)
    if answer.stderr.startswith("cannot ") and "SHARDMILL_PEERS_PYTHON" not in os.environ:
        pytest.skip(f"{module} is not installed here: docs/export.md says how to check against it")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


def test_specforge_itself_loads_every_row(tmp_path: Path) -> None:
    rows = [Given(5 + number % 20, 1 + number % 40) for number in range(60)]
    out = tmp_path / "out"
    report = account("specforge", make_build(tmp_path, rows), out, "--max-length", "30", "--memory-gb", "0.00002")
    paths = sorted(str(path) for path in out.glob("*.jsonl"))
    loaded = ask_peer("specforge.data.prompt_builder", SPECFORGE, "30", *paths)
    assert len(paths) > 2 and 0 < report["rows_out"] == len(loaded) < 60
    assert as_pairs(loaded) == as_pairs(read_records(out))


def test_speculators_itself_loads_every_row(tmp_path: Path) -> None:
    build, out = make_build(tmp_path, [Given(5, 1 + number % 40) for number in range(60)]), tmp_path / "out"
    said = run("speculators", build, out, "--max-length", "30", "--split", "validation=0.2").stdout
    ratio = said.partition("--train-data-ratio ")[2].partition(":")[0]
    loaded = ask_peer("speculators.train.data", SPECULATORS, str(out), ratio)
    for split, folder in (("train", "train"), ("val", "validation")):
        assert as_pairs(loaded["rows"][split]) == as_pairs(read_dataset(out / folder))
    assert dict(loaded["counts"]) == read_token_freq(out)
