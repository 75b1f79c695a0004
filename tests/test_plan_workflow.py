"""The whole plan is known before it runs, and what is wrong with the inputs is one plain sentence."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml
from snakemake.cli import parse_args

from workspace import REPO, Workspace, job_counts

EVERYTHING = {
    "make_prompts": 1,
    "generate": 8,
    "check_pilot": 1,
    "gate": 1,
    "tokenize": 8,
    "publish": 8,
    "check_build": 1,
    "report": 1,
    "verdict": 1,
}


def test_a_fresh_clone_plans_every_job_and_starts_nothing(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert workspace.plan() == EVERYTHING
    assert not [path for path in (tmp_path / "results").rglob("*") if path.name != ".digests.json"]


def test_the_cluster_profile_stands_in_the_place_of_the_default_one(tmp_path: Path) -> None:
    """By --profile it would come under profiles/default, which gives all cores of the machine that it is typed on."""
    text = (REPO / "profiles/slurm/config.yaml").read_text()
    default, slurm = yaml.safe_load((REPO / "profiles/default/config.yaml").read_text()), yaml.safe_load(text)
    assert slurm["cores"] == 256 and default.pop("cores") == "all"
    assert default.items() <= slurm.items()
    # Its executor is a package that is not installed here.
    (tmp_path / "config.yaml").write_text(text.replace("executor: slurm", "executor: local"))
    _, arguments = parse_args(["--workflow-profile", str(tmp_path)])
    assert (arguments.cores, arguments.jobs) == (256, 32)


def test_a_missing_dataset_is_one_sentence(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, {"dataset": {"path": "data/none.json"}})
    done = workspace.snakemake("-n", expect=1)
    errors = [line for line in done.stderr.splitlines() if "none.json" in line]
    assert len(errors) == 1 and errors[0].startswith("Error: ")
    assert "Traceback" not in done.stderr


def test_a_pinned_dataset_that_is_not_here_can_be_planned_but_not_read(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, {"dataset": {"path": "data/none.json", "sha256": "0" * 64}})
    assert workspace.plan() == EVERYTHING
    done = workspace.snakemake(expect=1)
    assert "none.json" in done.stderr and "Traceback" not in done.stderr


def test_a_pin_is_the_files_own_sha256_and_another_file_is_refused(tmp_path: Path) -> None:
    digest = hashlib.sha256((REPO / "config/sample/conversations.json").read_bytes()).hexdigest()
    workspace = Workspace(tmp_path, {"dataset": {"sha256": digest}})
    assert workspace.plan() == EVERYTHING
    workspace.configure({"dataset": {"sha256": "0" * 64}})
    done = workspace.snakemake("-n", expect=1)
    assert digest in done.stderr and "dataset.sha256" in done.stderr


def test_a_pin_changes_nothing_about_the_build(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    unpinned = build_name(workspace)
    digest = hashlib.sha256((REPO / "config/sample/conversations.json").read_bytes()).hexdigest()
    workspace.configure({"dataset": {"sha256": digest}})
    assert build_name(workspace) == unpinned


def build_name(workspace: Workspace) -> str:
    return str(yaml.safe_load(workspace.shardmill("plan", "--json", "--configfile", "overlay.yaml").stdout)["build"])


@pytest.mark.parametrize(
    ("config", "word"),
    [({"prompts": {"shrads": 3}}, "prompts.shrads"), ({"servers": {"launch": False}}, "servers.launch")],
)
def test_a_wrong_config_is_one_sentence(tmp_path: Path, config: dict[str, dict[str, object]], word: str) -> None:
    done = Workspace(tmp_path, config).snakemake("-n", expect=1)
    assert word in done.stderr and "Traceback" not in done.stderr


def test_settings_on_the_command_line_mean_what_they_say(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    typed = ["--config", 'prompts={"shards": 2, "limit": null, "dedupe": false}', 'sampling={"top_p": 0.5}', "name=two"]
    assert job_counts(workspace.snakemake("-n", *typed).stdout)["generate"] == 2
    done = workspace.snakemake("-n", "--config", 'prompts={"shards": "many"}', expect=1)
    assert "prompts.shards" in done.stderr and "Traceback" not in done.stderr


def test_the_b200_config_plans_every_shard_with_a_stand_in_dataset(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    sample = "config/sample/conversations.json"
    workspace.overlay = yaml.safe_load((tmp_path / "config/qwen3.6-27b-b200.yaml").read_text())
    workspace.configure({"dataset": {"path": sample}})
    counts = job_counts(workspace.snakemake("-n", "--quiet", "rules").stdout)
    assert counts["generate"] == counts["tokenize"] == counts["publish"] == 1828
    assert counts["make_prompts"] == counts["gate"] == 1


def test_a_real_run_without_the_tokenizer_stops_before_anything(tmp_path: Path) -> None:
    workspace = Workspace(
        tmp_path,
        {
            "model": {"name": "no-such/model"},
            "servers": {"engine": "sglang", "endpoints": ["http://127.0.0.1:9"]},
        },
    )
    assert workspace.plan() == EVERYTHING
    done = workspace.snakemake(expect=1)
    assert "no-such/model" in done.stderr and "model.tokenizer" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "results" / "latest").exists()
