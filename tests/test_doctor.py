"""`shardmill doctor` says what to mend, for the config given or for the build that ran last."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from builds import MadeBuild, settings_of
from shardmill.cli import cli
from shardmill.errors import UsageError
from workspace import REPO


def doctor(*options: str, expect: int = 0) -> Result:
    result = CliRunner().invoke(cli, ["doctor", *options])
    assert result.exit_code == expect, result.output
    return result


def test_the_default_config_needs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").symlink_to(REPO / "config")
    said = doctor().stdout
    assert "4 checked, 0 to mend" in said
    assert "the embedded server is installed" in said


def test_what_is_wrong_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(REPO)
    overlay = tmp_path / "mine.yaml"
    overlay.write_text(
        "dataset: {path: nothing/here.json}\nmodel: {name: none/such}\n"
        "servers: {engine: sglang, gpus: [0], command: no-such-sglang, api_key_env: NO_SUCH_KEY}\n"
    )
    said = doctor("--configfile", str(overlay), expect=1).stdout
    assert "nothing/here.json" in said
    assert "servers.api_key_env names NO_SUCH_KEY, which is not set." in said
    assert "2 to mend" in said
    monkeypatch.setenv("NO_SUCH_KEY", "secret-value")
    said = doctor("--configfile", str(overlay), expect=1).stdout
    assert "no-such-sglang is not found: run `make sglang-venv`" in said
    assert "secret-value" not in said


def test_it_acts_on_the_build_that_ran_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = settings_of(dataset={"path": "gone.json"})
    build = MadeBuild(tmp_path / "results" / "made-0123456789", chosen).write([])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results" / "latest").symlink_to(build.name)
    for options in ((), ("--build", str(build.root))):
        assert "gone.json" in doctor(*options, expect=1).stdout
    with pytest.raises(UsageError, match="not both"):
        CliRunner().invoke(
            cli, ["doctor", "--build", str(build.root), "--configfile", "x.yaml"], catch_exceptions=False
        )
