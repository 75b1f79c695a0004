"""SGLang's own command line, by version, so that a supervisor can start the simulator as if it were SGLang.

The flags of a version are the server arguments that a real server of that version lists in /server_info; any other is
argparse's error, exit code 2, as with the real one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from .config import SimConfig, read_config
from .info import recorded

_STRATEGY_SLOTS = {"no_buffer": 3, "extra_buffer_lazy": 4, "extra_buffer": 5, "auto": 5}


def parser_of(version: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang serve")
    for name, value in recorded(version)["args"].items():
        if name.startswith("_") or name in ("status", "version", "launch_command", "startup_time", "kv_events"):
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool) or (name.startswith("enable_") and value is None):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, nargs="+" if isinstance(value, list) else None)
    return parser


def from_sglang_flags(argv: Sequence[str], environment: str | None) -> SimConfig:
    """Settings out of SGLang's flags, over those of SIMSERVER_CONFIG (and its `by_gpu` for CUDA_VISIBLE_DEVICES).

    `{gpu}` and `{port}` in the log's path are filled in. ValueError for what the real server refuses to start with.
    """
    values = read_config(environment) if environment is not None else {}
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    values |= values.pop("by_gpu", {}).get(gpu, {})
    base = SimConfig.of(values)
    flags = parser_of(base.version).parse_args(argv)
    if flags.model_path is None:
        raise ValueError("the following arguments are required: --model-path")
    values |= {"model_path": flags.model_path, "model": flags.served_model_name or flags.model_path}
    taken: dict[str, Any] = {
        "host": flags.host, "port": flags.port or 30000, "context": flags.context_length, "api_key": flags.api_key,
        "max_running_requests": flags.max_running_requests, "max_queued_requests": flags.max_queued_requests,
        "max_total_tokens": flags.max_total_tokens, "mamba_slots": flags.max_mamba_cache_size,
        "draft_tokens": flags.speculative_num_draft_tokens,
    }  # fmt: skip
    texts = ("host", "api_key")
    values |= {k: v if k in texts else int(v) for k, v in taken.items() if v is not None}
    values["enable_metrics"] = flags.enable_metrics
    values["context_given"] = flags.context_length is not None
    values["mtp"] = flags.speculative_algorithm is not None
    strategy = getattr(flags, "mamba_radix_cache_strategy", None) or getattr(flags, "mamba_scheduler_strategy", None)
    if base.old and base.mamba_slots is not None and values["mtp"]:
        if flags.disable_radix_cache and strategy == "extra_buffer":
            raise ValueError("extra_buffer and --disable-radix-cache exclude each other")
        if not flags.disable_radix_cache and strategy != "extra_buffer":
            raise ValueError("speculation with Mamba state needs extra_buffer or --disable-radix-cache")
    if flags.disable_radix_cache:
        values["mamba_slots_per_request"] = 1
    elif strategy is not None:
        values["mamba_slots_per_request"] = _STRATEGY_SLOTS[strategy]
    if values.get("log"):
        values["log"] = values["log"].format(gpu=gpu, port=values["port"])
    return SimConfig.of(values)
