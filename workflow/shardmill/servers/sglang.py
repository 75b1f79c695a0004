"""Starts SGLang servers, one a GPU, with the SGLang of its own environment (`servers.command`)."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardmill.errors import SetupFault
from shardmill.home import Home, user_folder
from shardmill.servers import model_cache, model_files
from shardmill.servers.launcher import StartProblem, fingerprint, flags, last_line
from shardmill.servers.model_facts import ModelFacts
from shardmill.servers.ports import free_ports
from shardmill.servers.process import Command
from shardmill.servers.sglang_flags import Known, Wish, environment, known_flags, server_args
from shardmill.settings import Settings

_HELP_TIMEOUT_S = 300.0  # importing SGLang and torch from a cold disk
_PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE|port \d+ is (already|not) ", re.IGNORECASE)
_NO_MEMORY = re.compile(r"out of memory|not enough (GPU )?memory", re.IGNORECASE)
_USAGE = re.compile(r"^.*?: error: (.+)$", re.MULTILINE)
_RAISED = re.compile(r"^(?:\[.*?\] )?(\w*(?:Error|Exception|Exit)\b.*)$", re.MULTILINE)
_CAPPED = re.compile(
    r"max_running_requests is capped to (\d+) by the mamba state cache "
    r"\(max_mamba_cache_size=(\d+), (\d+) (?:state )?slots per request\)"
)


@dataclass(frozen=True, slots=True)
class _Prepared:
    known: Known
    model_path: str
    facts: ModelFacts


@dataclass
class Installation:
    """The SGLang and the model that all servers of a fleet share; looked at once."""

    settings: Settings
    home: Home
    _prepared: asyncio.Task[_Prepared] | None = field(default=None, repr=False)

    @property
    def command(self) -> list[str]:
        return shlex.split(self.settings.servers.command or "sglang serve")

    async def prepared(self) -> _Prepared:
        """Raises SetupFault when the command can't be run, ShardmillError when the model isn't there."""
        task = self._prepared
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._prepare())
            self._prepared = task
        return await asyncio.shield(task)

    async def _prepare(self) -> _Prepared:
        model = self.settings.model
        known = await self._known()
        folder = await asyncio.to_thread(model_files.local_folder, model.name, model.revision)
        facts = model_files.facts(model.name, folder)
        path = str(folder) if folder is not None and Path(model.name).is_dir() else model.name
        if self.settings.servers.model_cache is not None:
            source = folder if folder is not None and model_files.whole(folder) else None
            if source is None:
                source = await model_files.download(model.name, model.revision)
                facts = model_files.facts(model.name, source)
            copy = await model_cache.copy(source, Path(self.settings.servers.model_cache))
            path = str(copy if copy is not None else source)
        return _Prepared(known, path, facts)

    async def _known(self) -> Known:
        program = self.command[0]
        if shutil.which(program) is None:
            raise SetupFault(
                f"The SGLang command {program} is not there: make its environment with `make sglang-venv`, and name "
                "the command in servers.command (.venv-sglang/bin/sglang serve)."
            )
        process = await asyncio.create_subprocess_exec(
            *self.command,
            "--help",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), _HELP_TIMEOUT_S)
        except TimeoutError:
            return Known(frozenset(), lazy_buffer=True)
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode != 0:
            raise SetupFault(
                f"`{shlex.join(self.command)} --help` failed: {last_line(errors.decode(errors='replace'), 'no reason')}"
            )
        return known_flags(output.decode(errors="replace"))


@dataclass(frozen=True)
class SGLangLauncher:
    """One SGLang server on one GPU."""

    installation: Installation
    gpu: int
    index: int

    @property
    def name(self) -> str:
        return f"gpu{self.gpu}"

    async def command(self) -> Command:
        prepared = await self.installation.prepared()
        settings = self.installation.settings
        free, free_nccl = free_ports(2)
        wish = Wish(
            model_path=prepared.model_path,
            model_name=settings.model.name,
            revision=settings.model.revision if prepared.model_path == settings.model.name else None,
            concurrency=settings.generate.concurrency,
            shared_prefixes=settings.prompts.turns == "regenerate",
            facts=prepared.facts,
            given=settings.servers.args,
            crash_folder=str(self.installation.home.root / "crash" / self.name),
        )
        args = server_args(wish, prepared.known, self.index, free, free_nccl)
        host, port, nccl_port = str(args.get("host", "127.0.0.1")), int(args["port"]), int(args["nccl-port"])
        return Command(
            argv=[*self.installation.command, *flags(args)],
            env=environment(prepared.known, self.gpu),
            url=f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}",
            ports=(port, nccl_port),
            fingerprint=self.fingerprint(),
            resource=user_folder() / f"GPU {self.gpu}.lock",
        )

    def fingerprint(self) -> str:
        settings = self.installation.settings
        return fingerprint("sglang", self.gpu, settings.servers, settings.model, settings.generate.concurrency)

    def explain(self, log: str, exit_code: int | None) -> StartProblem:
        usage = _USAGE.findall(log)
        if exit_code == 2 and usage:
            return StartProblem(f"SGLang refuses its flags ({usage[-1].strip()}): look at servers.args", setup=True)
        if _PORT_TAKEN.search(log):
            return StartProblem("its port was taken meanwhile", ports=True)
        raised = _RAISED.findall(log)
        reason = raised[-1].strip()[:300] if raised else last_line(log, "it said nothing")
        if _NO_MEMORY.search(log):
            reason += " (free the GPU, or lower mem-fraction-static or max-running-requests in servers.args)"
        return StartProblem(f"ended with exit code {exit_code}: {reason}")

    def capped(self, log: str) -> str | None:
        found = _CAPPED.findall(log)
        if not found:
            return None
        cap, size, slots = (int(number) for number in found[-1])
        wanted = self.installation.settings.generate.concurrency
        return (
            f"{size} Mamba state slots // {slots} a request = {cap}: set servers.args max-mamba-cache-size to "
            f"{wanted * slots} for {wanted}, or disable-radix-cache: true for one slot a request"
        )


def sglang_launchers(settings: Settings, home: Home) -> Sequence[SGLangLauncher]:
    installation = Installation(settings, home)
    return [SGLangLauncher(installation, gpu, index) for index, gpu in enumerate(settings.servers.gpus)]
