"""SGLang's flags for a build, by what the installed version understands.

Versions 0.5.11 to 0.5.23 differ in names. What a version has is read from its own `--help`, so that a version in
between, or a later one, gets what it knows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from shardmill.servers.launcher import merge_args, normal_names
from shardmill.servers.model_facts import ModelFacts

_NAME = re.compile(r"--([a-z0-9][a-z0-9-]*)")
_MTP = {
    "speculative-algorithm": "NEXTN",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
}
# A user who names one of these decides about the radix cache and Mamba state alone.
_STATE_FLAGS = frozenset({"mamba-scheduler-strategy", "mamba-radix-cache-strategy", "disable-radix-cache"})
# Mamba state slots that one running request holds, with the prefix cache kept.
_SLOTS_LAZY = 4
_SLOTS = 5


@dataclass(frozen=True, slots=True)
class Known:
    """What an installed SGLang understands. `flags`: names without dashes; empty where it would not say."""

    flags: frozenset[str]
    lazy_buffer: bool

    def has(self, name: str) -> bool:
        return name in self.flags or not self.flags

    @property
    def old(self) -> bool:
        """Before 0.5.14, where Mamba's strategy had another name."""
        return bool(self.flags) and "mamba-radix-cache-strategy" not in self.flags


def known_flags(help_text: str) -> Known:
    """Reads argparse's help. The part about diffusion models, which `sglang serve` adds, is left out."""
    text = re.split(r"-+ Help for Diffusion", help_text)[0]
    flags: set[str] = set()
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith(("-", "[-", "usage:")):
            # The option column: its names stand before the explanation, which two spaces set off.
            flags.update(_NAME.findall(stripped if stripped.startswith("[") else re.split(r"\s{2,}", stripped)[0]))
    return Known(flags=frozenset(flags), lazy_buffer="extra_buffer_lazy" in text)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a build wants of each server."""

    model_path: str
    model_name: str
    revision: str | None
    concurrency: int
    shared_prefixes: bool  # later prompts repeat earlier ones, so the prefix cache pays
    facts: ModelFacts
    given: dict[str, Any]  # servers.args
    crash_folder: str


def server_args(wish: Wish, known: Known, index: int, port: int, nccl_port: int) -> dict[str, Any]:
    """Flags by name for the server on the `index`-th GPU: defaults of this version, with the config's laid over them.

    A port given in the config is that of the first server; the next has the next.
    """
    given = normal_names(wish.given)
    running = int(given.get("max-running-requests") or wish.concurrency)
    defaults: dict[str, Any] = {
        "model-path": wish.model_path,
        "served-model-name": wish.model_name,
        "revision": wish.revision,
        "host": "127.0.0.1",
        "mem-fraction-static": 0.85,
        "max-running-requests": running,
        "random-seed": 1000 + index,
        "enable-metrics": True,
        "watchdog-timeout": 300,
        "crash-dump-folder": wish.crash_folder,
        "skip-server-warmup": True,  # it posts an image to multimodal models and dies if that fails: the fleet probes
    }
    if wish.facts.mtp and given.get("speculative-algorithm", "NEXTN") in ("NEXTN", "EAGLE"):
        defaults |= _MTP
    if wish.facts.hybrid:
        defaults |= _state_args(given, known, running, wish.shared_prefixes)
    defaults = {name: value for name, value in defaults.items() if known.has(name)}
    for name, free in (("port", port), ("nccl-port", nccl_port)):
        given[name] = int(given[name]) + index if given.get(name) else free
    return merge_args(defaults, given)


def environment(known: Known, gpu: int) -> dict[str, str]:
    values = {
        "CUDA_VISIBLE_DEVICES": str(gpu),
        "SGLANG_TIMEOUT_KEEP_ALIVE": "120",  # the default of 5 s resets connections that are used again
        "PYTHONUNBUFFERED": "1",
    }
    return values | ({"SGLANG_ENABLE_SPEC_V2": "1"} if known.old else {})


def _state_args(given: dict[str, Any], known: Known, running: int, shared_prefixes: bool) -> dict[str, Any]:
    """How Mamba state is kept, so that `running` requests fit.

    Without the prefix cache a request holds one state slot, with it four or five, and the server runs
    max-mamba-cache-size // slots at once. Answers to prompts with nothing in common need no prefix cache.
    """
    decided = {name for name in _STATE_FLAGS if given.get(name) not in (None, False)}
    if decided:
        return {}
    keep_cache = shared_prefixes or "disable-radix-cache" in given  # false or null: taken away
    if not keep_cache:
        return {"disable-radix-cache": True}
    if known.old:
        return {"mamba-scheduler-strategy": "extra_buffer", "max-mamba-cache-size": _SLOTS * running}
    if known.lazy_buffer:
        return {"mamba-radix-cache-strategy": "extra_buffer_lazy", "max-mamba-cache-size": _SLOTS_LAZY * running}
    return {"mamba-radix-cache-strategy": "extra_buffer", "max-mamba-cache-size": _SLOTS * running}
