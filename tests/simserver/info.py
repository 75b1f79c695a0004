"""What a server says about itself: /model_info, /server_info, /v1/loads, /metrics."""

from __future__ import annotations

import copy
import functools
import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .config import SimConfig

DATA = Path(__file__).parent / "data"


@dataclass
class Load:
    """The server's state as it reports it."""

    running: int
    queued: int
    running_tokens: int
    throughput: float
    accept_length: float | None  # None before anything was verified, or without mtp


@functools.cache
def recorded(version: str) -> dict[str, Any]:
    """What a real server of that version said with default settings (data/)."""
    loaded: dict[str, Any] = json.loads((DATA / f"sglang-{version}.json").read_text())
    return loaded


def model_info(config: SimConfig) -> dict[str, Any]:
    info = copy.deepcopy(recorded(config.version)["model_info"])
    info["model_path"] = info["tokenizer_path"] = config.model_path
    if not config.old:
        info["served_model_name"] = config.model
    return dict(info)


def server_info(config: SimConfig, load: Load, ready: bool) -> dict[str, Any]:
    known = copy.deepcopy(recorded(config.version))
    args: dict[str, Any] = known["args"]
    args |= {
        "model_path": config.model_path,
        "tokenizer_path": config.model_path,
        "served_model_name": config.model,
        "host": config.host,
        "port": config.port,
        "context_length": config.context if config.context_given else None,
        "max_running_requests": config.max_running_requests,
        "max_queued_requests": config.max_queued_requests,
        "max_total_tokens": config.max_total_tokens,
        "max_total_num_tokens": config.max_total_tokens,
        "max_req_input_len": config.max_req_input_len,
        "random_seed": config.seed,
        "status": "ready" if ready else "starting",
    }
    if config.mamba_slots is not None:
        args["max_mamba_cache_size"] = config.mamba_slots
    if config.mtp:
        args |= {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": config.draft_tokens - 1,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": config.draft_tokens,
        }
    state = {k: v for k, v in args.items() if k not in known["not_in_state"]} | known["state"]
    state["effective_max_running_requests_per_dp"] = config.effective_max_running
    state["last_gen_throughput"] = load.throughput
    state["memory_usage"]["token_capacity"] = config.max_total_tokens
    if load.accept_length is not None:
        state["avg_spec_accept_length"] = load.accept_length
    return args | {"internal_states": [state]}


def v1_models(config: SimConfig) -> dict[str, Any]:
    model = {
        "id": config.model, "object": "model", "created": int(time.time()), "owned_by": "sglang", "root": config.model,
        "parent": None, "max_model_len": config.context,
    }  # fmt: skip
    return {"object": "list", "data": [model]}


def v1_loads(config: SimConfig, load: Load) -> dict[str, Any]:
    usage = load.running_tokens / config.max_total_tokens
    disaggregation = {
        "mode": "null", "prefill_bootstrap_queue_reqs": 0, "prefill_inflight_queue_reqs": 0,
        "decode_prealloc_queue_reqs": 0, "decode_transfer_queue_reqs": 0, "decode_retracted_queue_reqs": 0,
        "kv_transfer_speed_gb_s": 0.0, "kv_transfer_latency_ms": 0.0,
    }  # fmt: skip
    one = {
        "timestamp": time.time(), "dp_rank": 0, "num_running_reqs": load.running, "num_waiting_reqs": load.queued,
        "num_waiting_uncached_tokens": 0, "num_used_tokens": load.running_tokens,
        "num_total_tokens": load.running_tokens, "num_active_tokens": load.running_tokens,
        "num_prealloc_ready_tokens": 0, "max_total_num_tokens": config.max_total_tokens,
        "max_running_requests": config.effective_max_running, "token_usage": usage, "gen_throughput": load.throughput,
        "cache_hit_rate": 0.0, "utilization": load.running / config.effective_max_running,
        "total_prefill_uncached_tokens": 0, "total_prefill_busy_us": 0, "decode_moments": None,
        "memory": {
            "weight_gb": 0.216, "kv_cache_gb": 0.703, "graph_gb": 0.0, "token_capacity": config.max_total_tokens,
        },
        "disaggregation": disaggregation,
        "queues": {"waiting": load.queued, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
    }  # fmt: skip
    if load.accept_length is not None:
        one["speculative"] = {"accept_length": load.accept_length}
    return {
        "timestamp": datetime.now(UTC).isoformat(), "version": config.version, "accelerator": None,
        "num_accelerators": 1, "loads": [one],
    }  # fmt: skip


def metrics(config: SimConfig, load: Load, counters: dict[str, float]) -> str:
    """The series that a driver may look at, with the real labels. `counters`: requests, aborted, prompt_tokens,
    generation_tokens, latency_sum (simulated seconds)."""
    unified = f'engine_type="unified",model_name="{config.model}"'
    rank = f'{{engine_type="unified",model_name="{config.model}",moe_ep_rank="0",pp_rank="0",tp_rank="0"}}'
    plain = f"{{{unified}}}"
    kind = plain if config.old else f'{{engine_type="unified",is_streaming="false",model_name="{config.model}"}}'
    usage = load.running_tokens / config.max_total_tokens
    slots = config.mamba_slots or 0
    used = load.running * config.mamba_slots_per_request if slots else 0
    accept = load.accept_length or 0.0
    gauges: list[tuple[str, float]] = [
        ("num_running_reqs", load.running),
        ("num_queue_reqs", load.queued),
        ("gen_throughput", load.throughput),
        ("token_usage", usage),
        ("full_token_usage", usage),
        ("mamba_usage", used / slots if slots else 0.0),
        ("cache_hit_rate", 0.0),
        ("utilization", load.running / config.effective_max_running),
        ("max_total_num_tokens", config.max_total_tokens),
        ("spec_accept_length", accept),
        ("spec_accept_rate", (accept - 1) / (config.draft_tokens - 1) if accept else 0.0),
    ]
    if not config.old:
        gauges += [("mamba_available_tokens", slots - used), ("mamba_evictable_tokens", 0), ("mamba_used_tokens", used)]
    lines = []
    for name, value in gauges:
        lines += [f"# HELP sglang:{name} {name}", f"# TYPE sglang:{name} gauge", f"sglang:{name}{rank} {float(value)}"]
    pid = f'{{{unified},moe_ep_rank="0",pid="1",pp_rank="0",tp_rank="0"}}'
    lines += ["# TYPE sglang:num_retracted_reqs gauge", f"sglang:num_retracted_reqs{pid} 0.0"]
    for name, labels, value in (
        ("prompt_tokens_total", kind, counters["prompt_tokens"]),
        ("generation_tokens_total", kind, counters["generation_tokens"]),
        ("num_requests_total", kind, counters["requests"]),
        ("num_aborted_requests_total", plain, counters["aborted"]),
    ):
        lines += [
            f"# HELP sglang:{name} {name}",
            f"# TYPE sglang:{name} counter",
            f"sglang:{name}{labels} {float(value)}",
        ]
    name, le = "sglang:e2e_request_latency_seconds", ',le="+Inf",model_name'  # labels are in alphabetical order
    lines += [
        f"# TYPE {name} histogram",
        f"{name}_sum{kind} {counters['latency_sum']}",
        f"{name}_bucket{kind.replace(',model_name', le)} {float(counters['requests'])}",
        f"{name}_count{kind} {float(counters['requests'])}",
    ]
    return "\n".join(lines) + "\n"
