"""Snakemake, imported once and forked for each call: its imports cost more than most of what tests run by it.

    done = Prefork().run(["snakemake", "-n"], cwd=folder, env=environment)

Each call is a process of its own, of Snakemake's own `main`, with its arguments, folder and environment; its output
goes to files, as through a pipe. Calls may be made at the same time. Run as a program this module is the server.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Forked:
    """A process that a Prefork has made, with what tests need of a Popen."""

    def __init__(self, line: socket.socket, command: Sequence[str]) -> None:
        self._line = line
        self._command = list(command)
        self._told = line.makefile()
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], 0)[0]:
            answer = self._told.read()
            assert answer, "the process that waits for this one is gone"
            self.returncode = int(answer)
            self._told.close()
            self._line.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(self._command, timeout or 0)
            select.select([self._line], [], [], left)
        return code

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Prefork:
    """Lives as long as its session, and ends with it, however that ends."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="prefork-")
        self._path = str(Path(self._folder.name) / "socket")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(self._path)
        listening.listen()
        # Its stdin ends with this process.
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(listening.fileno())], stdin=subprocess.PIPE, pass_fds=[listening.fileno()]
        )
        listening.close()

    def start(self, command: Sequence[str], cwd: Path, env: Mapping[str, str], out: Path, errors: Path) -> Forked:
        """A process in a session, and so a process group, of its own."""
        line = socket.socket(socket.AF_UNIX)
        line.connect(self._path)
        call = {"argv": list(command), "cwd": str(cwd), "env": dict(env), "out": str(out), "errors": str(errors)}
        line.sendall(json.dumps(call).encode())
        line.shutdown(socket.SHUT_WR)
        return Forked(line, command)

    def run(self, command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as errors:
            code = self.start(command, cwd, env, Path(out.name), Path(errors.name)).wait()
            return subprocess.CompletedProcess(
                list(command), code, Path(out.name).read_text(), Path(errors.name).read_text()
            )


def _serve(listening: socket.socket) -> None:
    import snakemake.cli  # noqa: F401

    # The kernel reaps those that wait for a call.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        line, _ = listening.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            _wait_for_one(line)
        line.close()


def _wait_for_one(line: socket.socket) -> None:
    """Forks a call's process and tells its pid and, at its end, its exit code."""
    call = b""
    while part := line.recv(1 << 16):
        call += part
    child = os.fork()
    if child == 0:
        line.close()
        _become(json.loads(call))
    line.sendall(f"{child}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    line.sendall(str(code).encode())
    os._exit(0)


def _become(call: Mapping[str, object]) -> None:
    """This process is Snakemake from here on."""
    from snakemake.cli import main

    os.setsid()
    write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, (path, flags) in enumerate([(os.devnull, os.O_RDONLY), (call["out"], write), (call["errors"], write)]):
        os.dup2(os.open(str(path), flags, 0o644), number)
    os.chdir(str(call["cwd"]))
    os.environ.clear()
    os.environ.update(call["env"])  # type: ignore[call-overload]
    sys.argv = list(call["argv"])  # type: ignore[call-overload]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    sys.exit(main())


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
