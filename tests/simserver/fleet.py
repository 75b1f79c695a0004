"""A fleet of simulated servers for a test, each a process of its own, that never outlives the test."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .config import SimConfig
from .eventlog import read_log
from .process import die_with_parent, free_ports

PACKAGE_PARENT = Path(__file__).resolve().parent.parent


def python_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment in which `python -m simserver` works from anywhere."""
    path = os.environ.get("PYTHONPATH")
    parts = [str(PACKAGE_PARENT), *([path] if path else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(parts), **(extra or {})}


def write_command(folder: Path, config: Mapping[str, Any]) -> Path:
    """An executable `sglang` in `folder`: `serve`, `version`, `-m sglang.launch_server`, with SGLang's flags.

    `config` are SimConfig's settings and `by_gpu`: {CUDA_VISIBLE_DEVICES: settings}. For `servers.command`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "simserver.json"
    settings.write_text(json.dumps(config))
    script = folder / "sglang"
    script.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(PACKAGE_PARENT))}\n"
        f"export SIMSERVER_CONFIG={shlex.quote(str(settings))}\n"
        f'exec {shlex.quote(sys.executable)} -m simserver "$@"\n'
    )
    script.chmod(0o755)
    return script


class SimFleet:
    """`n` servers with the settings of `config`, and of `each[i]` besides. Use as a context manager.

    The constructor starts nothing; entering starts all and, with `wait`, waits until each is ready. A server keeps its
    ports and log over `kill` and `start`. All processes get SIGKILL when the thread that started them ends.
    """

    def __init__(
        self,
        n: int = 1,
        config: Mapping[str, Any] | None = None,
        each: Sequence[Mapping[str, Any]] = (),
        folder: Path | None = None,
        wait: bool = True,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="simfleet-") if folder is None else None
        self.folder = folder if folder is not None else Path(self._temporary.name if self._temporary else ".")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._wait = wait
        ports = free_ports(2 * n)
        self.configs: list[dict[str, Any]] = []
        for i in range(n):
            own = {"host": "127.0.0.1", "port": ports[2 * i], "control_port": ports[2 * i + 1]}
            own["log"] = str(self.folder / f"server-{i}.jsonl")
            self.configs.append({**(config or {}), **(each[i] if i < len(each) else {}), **own})
            SimConfig.of(self.configs[-1])  # so that a wrong setting fails here
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * n

    def __enter__(self) -> Self:
        try:
            for i in range(len(self.configs)):
                self.start(i, wait=False)
            if self._wait:
                for i in range(len(self.configs)):
                    self.wait_ready(i)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.configs)

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{config['port']}" for config in self.configs]

    def start(self, i: int, wait: bool = True) -> None:
        """Starts server `i`, which must not be running."""
        if self.alive(i):
            raise RuntimeError(f"server {i} is running")
        settings = self.folder / f"server-{i}.json"
        settings.write_text(json.dumps(self.configs[i]))
        with (self.folder / f"server-{i}.err").open("ab") as err:
            self._processes[i] = subprocess.Popen(
                [sys.executable, "-m", "simserver", "--config", str(settings)],
                env=python_environment(), stdin=subprocess.DEVNULL, stdout=err, stderr=err, preexec_fn=die_with_parent,
            )  # fmt: skip
        if wait:
            self.wait_ready(i)

    def wait_ready(self, i: int, timeout_s: float = 30.0) -> None:
        """Until the server listens and has warmed up. RuntimeError if it has ended or takes too long."""
        self.wait_for(lambda: not self.alive(i) or self._ready(i), f"server {i} to be ready", timeout_s)
        if not self.alive(i):
            errors = (self.folder / f"server-{i}.err").read_text(errors="replace")
            raise RuntimeError(f"server {i} ended with {self.process(i).returncode}: {errors[-2000:]}")

    def _ready(self, i: int) -> bool:
        try:
            return bool(self.stats(i)["ready"])
        except OSError:
            return False

    @staticmethod
    def wait_for(holds: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {timeout_s} s for {what}")
            time.sleep(0.02)

    def process(self, i: int) -> subprocess.Popen[bytes]:
        process = self._processes[i]
        if process is None:
            raise RuntimeError(f"server {i} was never started")
        return process

    def alive(self, i: int) -> bool:
        process = self._processes[i]
        return process is not None and process.poll() is None

    def kill(self, i: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal, and waits for the end if it is one that ends the process."""
        self.process(i).send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            self.process(i).wait(30)

    def pause(self, i: int) -> None:
        """Everything of it stands still, the listening socket stays: SIGSTOP."""
        self.process(i).send_signal(signal.SIGSTOP)

    def resume(self, i: int) -> None:
        self.process(i).send_signal(signal.SIGCONT)

    def faults(self, i: int, rules: Mapping[str, Any] | Iterable[Mapping[str, Any]], keep: bool = False) -> None:
        """Replaces (with `keep`, extends) the rules of server `i`; an empty list ends every fault."""
        listed = [rules] if isinstance(rules, Mapping) else list(rules)
        self._control(i, "/sim/faults", {"rules": listed, "keep": keep})

    def stats(self, i: int) -> dict[str, Any]:
        return dict(self._control(i, "/sim/stats"))

    def _control(self, i: int, path: str, body: object = None) -> Any:
        url = f"http://127.0.0.1:{self.configs[i]['control_port']}{path}"
        data = json.dumps(body).encode() if body is not None else None
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=10) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise ValueError(error.read().decode()) from None

    def log(self, i: int) -> list[dict[str, Any]]:
        """The server's own log (eventlog.py), over all its starts, also after its death."""
        return read_log(self.configs[i]["log"])

    def logs(self) -> list[dict[str, Any]]:
        """The logs of all servers, with `server` added, in order of time."""
        lines = [{**line, "server": i} for i in range(len(self)) for line in self.log(i)]
        return sorted(lines, key=lambda line: line["t"])

    def received(self) -> Counter[str]:
        """How often each prompt (by hash) arrived anywhere."""
        return Counter(line["prompt"] for line in self.logs() if line["event"] == "received")

    def asked(self) -> Counter[str]:
        """The same without probes, which want two new tokens."""
        lines = (line for line in self.logs() if line["event"] == "received" and line["max_new_tokens"] > 2)
        return Counter(line["prompt"] for line in lines)

    def answered(self) -> Counter[str]:
        """How often each prompt (by hash) was answered whole and right."""
        return Counter(line["prompt"] for line in self.logs() if line.get("outcome") == "answered")

    def close(self) -> None:
        for process in self._processes:
            if process is not None and process.poll() is None:
                process.kill()
        for process in self._processes:
            if process is not None:
                process.wait(30)
        if self._temporary is not None:
            self._temporary.cleanup()
