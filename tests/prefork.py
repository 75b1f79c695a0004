"""Snakemake, imported once and forked for each call: its imports cost more than most of what tests run by it.

    with Prefork() as prefork:
        done = prefork.run(["snakemake", "-n"], cwd=folder, env=environment)

Each call is a process of its own, of Snakemake's own `main`, with its arguments, folder and environment. What it writes
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType


class Prefork:
    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="prefork-")
        self._path = str(Path(self._folder.name) / "socket")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(self._path)
        listening.listen()
        # It lives as long as its stdin is open: a session that is killed leaves nothing running.
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(listening.fileno())], stdin=subprocess.PIPE, pass_fds=[listening.fileno()]
        )
        listening.close()

    def __enter__(self) -> Prefork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()
        self._folder.cleanup()

    def run(self, command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        with (
            tempfile.NamedTemporaryFile() as out,
            tempfile.NamedTemporaryFile() as errors,
            socket.socket(socket.AF_UNIX) as line,
        ):
            line.connect(self._path)
            call = {"argv": list(command), "cwd": str(cwd), "env": dict(env), "out": out.name, "errors": errors.name}
            line.sendall(json.dumps(call).encode())
            line.shutdown(socket.SHUT_WR)
            answer = _read(line)
            assert answer, "the process that forks Snakemake is gone"
            return subprocess.CompletedProcess(
                call["argv"], int(answer), Path(out.name).read_text(), Path(errors.name).read_text()
            )


def _serve(listening: socket.socket) -> None:
    from snakemake import cli

    assert cli.main
    # Handlers are reaped by the kernel.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        line, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            call = json.loads(_read(line))
            if (child := os.fork()) == 0:
                line.close()
                _become(call)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            line.sendall(str(code).encode())
            os._exit(0)
        line.close()


def _become(call: Mapping[str, object]) -> None:
    """This process is Snakemake from here on."""
    from snakemake.cli import main

    for number, (path, mode) in enumerate(
        [(os.devnull, os.O_RDONLY), (str(call["out"]), os.O_WRONLY), (str(call["errors"]), os.O_WRONLY)]
    ):
        os.dup2(os.open(path, mode), number)
    os.chdir(str(call["cwd"]))
    os.environ.clear()
    os.environ.update(call["env"])  # type: ignore[call-overload]
    sys.argv = list(call["argv"])  # type: ignore[call-overload]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    sys.exit(main())


def _read(line: socket.socket) -> bytes:
    parts = []
    while part := line.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
