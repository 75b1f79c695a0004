"""The fleet of a build as its state file tells it, with what each server has answered beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from shardmill.files import read_json
from shardmill.fleet.gpus import Gpu, gpus
from shardmill.home import Home, fleet_key, recorded_name
from shardmill.paths import BuildPaths
from shardmill.settings import Settings
from shardmill.status.model import Fleet, GpuNow, Server
from shardmill.status.rows import Work

_USELESS = 1.05  # 1.0 is every draft refused
_MIB = 1 << 20


def find_home(settings: Settings, build: BuildPaths) -> Home:
    """The fleet that serves this build, or did so last: by its settings, else by the run locks that fleets know."""
    fleets = build.root.absolute().parent / ".fleet"
    own = Home(fleets / fleet_key(settings))
    if _serves(own, build.lock):
        return own
    others = [home for home in map(Home, sorted(fleets.glob("*"))) if _serves(home, build.lock)]
    return max(others, key=lambda home: home.state.stat().st_mtime, default=own)


def read_state(home: Home) -> dict[str, Any] | None:
    try:
        return read_json(home.state)
    except (OSError, ValueError):
        return None


def local_gpus() -> dict[int, Gpu]:
    """What nvidia-smi says here; empty where there is none."""
    return asyncio.run(gpus())


def describe(
    settings: Settings,
    home: Home,
    state: Mapping[str, Any] | None,
    done: Mapping[str, Work],
    total: Work,
    going: Mapping[str, int],
) -> Fleet:
    """`done`: what each server has answered of finished shards, `total`: all of them together; `going`: of the rest."""
    alive = state is not None and home.alive()
    listed = state["servers"] if state is not None else ()
    known = {recorded_name(settings, server["name"]): server for server in listed}
    names = [*known, *sorted((done.keys() | going.keys()) - known.keys())]
    live = known if alive else {}
    servers = tuple(_server(name, live.get(name), done.get(name), going.get(name, 0)) for name in names)
    recent = [server.accept_length_now for server in servers if server.accept_length_now is not None]
    accept = sum(recent) / len(recent) if recent else total.accept_length
    return Fleet(
        alive=alive,
        engine=settings.servers.engine,
        seen=_unix(state["updated"]) if state is not None else None,
        waiting=state["waiting"] if alive and state is not None else None,
        ready=sum(1 for server in servers if server.state == "ready"),
        mtp=mtp(settings.servers.engine, accept, answers=total.rows),
        accept_length=accept,
        warnings=tuple(state["warnings"]) if alive and state is not None else (),
        servers=servers,
    )


def mtp(engine: str, accept_length: float | None, answers: int) -> str | None:
    """Whether speculative decoding is on, told from the accept length that servers give only while it is."""
    if accept_length is not None:
        return "on" if accept_length > _USELESS else "useless"
    return "off" if engine == "sglang" and answers else None


def other_gpus(fleet: Fleet, seen: Mapping[int, Gpu]) -> tuple[GpuNow, ...]:
    """GPUs of this machine that no server of the fleet speaks of: endpoints don't say which is theirs."""
    spoken = {server.gpu for server in fleet.servers}
    return tuple(
        GpuNow(gpu.index, gpu.utilisation, gpu.power_w, _bytes(gpu.memory_used_mib))
        for index, gpu in sorted(seen.items())
        if index not in spoken
    )


def _server(name: str, live: Mapping[str, Any] | None, work: Work | None, going: int) -> Server:
    here = live or {}
    gpu = here.get("gpu") or {}
    return Server(
        name=name,
        url=here.get("url"),
        state=here.get("state"),
        why=here.get("why") or None,
        for_s=here.get("for_s"),
        restarts=here.get("restarts", 0),
        faults=dict(here.get("faults", {})),
        running=here.get("running"),
        queued=here.get("queued"),
        in_flight=here.get("in_flight"),
        effective_cap=here.get("effective_cap"),
        requested_cap=here.get("requested_cap"),
        cap_reason=here.get("cap_reason"),
        kv_use=here.get("kv_use"),
        mamba_use=here.get("mamba_use"),
        tokens_per_s_now=here.get("tokens_per_s"),
        accept_length_now=here.get("accept_length"),
        resident_bytes=here.get("resident_bytes"),
        gpu=gpu.get("index"),
        gpu_use=gpu.get("utilisation"),
        gpu_power_w=gpu.get("power_w"),
        gpu_bytes=_bytes(gpu.get("memory_used_mib")),
        answers=going + (work.rows if work else 0),
        tokens=work.tokens if work else 0,
        busy_s=work.busy_s if work else 0.0,
        tokens_per_s=work.tokens_per_s if work else None,
        accept_length=work.accept_length if work else None,
    )


def _bytes(mebibytes: float | None) -> float | None:
    return None if mebibytes is None else mebibytes * _MIB


def _serves(home: Home, lock: Path) -> bool:
    state = read_state(home)
    return state is not None and any(Path(run["lock"]).resolve() == lock.resolve() for run in state["runs"])


def _unix(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
