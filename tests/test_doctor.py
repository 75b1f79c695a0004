"""`shardmill doctor` says what to mend, for the config given or for the build that ran last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from builds import MadeBuild, settings_of
from shardmill.cli import cli
from shardmill.errors import UsageError
from simserver import SimFleet
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
    assert "The environment variable NO_SUCH_KEY (servers.api_key_env) is empty" in said
    assert "2 to mend" in said
    monkeypatch.setenv("NO_SUCH_KEY", "secret-value")
    said = doctor("--configfile", str(overlay), expect=1).stdout
    assert "no-such-sglang is not found: run `make sglang-venv`" in said
    assert "secret-value" not in said


class Answer(BaseHTTPRequestHandler):
    """What no model server answers."""

    status, body = 200, b"<html>Welcome to\nnginx</html>"

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None: ...


class Unauthorized(Answer):
    status, body = 401, b"no"


@contextmanager
def answering(kind: type[Answer]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def with_endpoints(folder: Path, **servers: Any) -> Path:
    overlay = folder / "endpoints.yaml"
    overlay.write_text(yaml.safe_dump({"results": str(folder), "servers": {"engine": "sglang", **servers}}))
    return overlay


def test_endpoints_are_asked_and_each_bad_one_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(REPO)
    dead, missing = "http://127.0.0.1:1", tmp_path / "nowhere.txt"
    with SimFleet(1, folder=tmp_path / "sims") as sims, answering(Answer) as page, answering(Unauthorized) as locked:
        well = with_endpoints(tmp_path, endpoints=sims.urls)
        assert "1 of 1 endpoints ready (sglang)" in doctor("--configfile", str(well)).stdout
        ill = with_endpoints(tmp_path, endpoints=[*sims.urls, dead, page, locked], endpoints_file=str(missing))
        said = doctor("--configfile", str(ill), expect=1).stdout
    assert "1 of 4 endpoints ready" in said
    assert "8 checked, 4 to mend" in said
    to_mend = [line for line in said.splitlines() if line.startswith("MEND")]
    reasons = {str(missing): "not there", dead: "nothing listens", page: "Welcome to nginx", locked: "wants an API key"}
    assert [next(line for line in to_mend if name in line and why in line) for name, why in reasons.items()] == to_mend


def test_an_endpoints_file_without_a_url_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(REPO)
    listed = tmp_path / "listed.txt"
    for text, why in (("# none yet\n", "No endpoint is given"), ("gpu-box\n", "Line 1 of the endpoints file")):
        listed.write_text(text)
        said = doctor("--configfile", str(with_endpoints(tmp_path, endpoints_file=str(listed))), expect=1).stdout
        assert why in said and "1 to mend" in said


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
