"""Settings of one simulated server: one dataclass, read from a JSON file, the command line, or a dict of a test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

VERSIONS = ("0.5.23", "0.5.11")
STYLES = ("random", "think", "empty_think", "ok", "loop")


@dataclass
class SimConfig:
    """All times are simulated seconds; `time_scale` of them pass in a real one."""

    host: str = "127.0.0.1"
    port: int = 0
    control_port: int = 0  # a second listener for /sim/* that no fault ever closes; 0: none
    version: str = "0.5.23"
    log: str | None = None  # JSON lines, appended to; a restart finds in it how often this server was started
    api_key: str | None = None
    tokenizer: str | None = None  # a tokenizer.json: real text and /tokenize; without one, text is a word per id

    # The model
    model: str = "test"
    model_path: str = "models/test"
    vocab_size: int = 49152
    context: int = 8192
    context_given: bool = False  # by a flag: /server_info names it only then
    eos_ids: tuple[int, ...] = (2,)
    special_ids: tuple[int, ...] = (0, 1, 2)  # never among the random ids of an answer

    # Answers: a pure function of these settings, the prompt's ids and the sampling parameters
    seed: int = 0
    styles: Mapping[str, float] = field(default_factory=lambda: {"random": 1.0})  # style -> weight, chosen by prompt
    length_mean: float = 64.0
    length_sigma: float = 0.6  # of the logarithm
    length_cap: int = 1 << 20  # no answer is longer by itself
    length_min: int = 1
    answers: Mapping[str, list[int]] = field(default_factory=dict)  # prompt hash, or "*" -> ids without the stop id
    think_start_id: int = 10
    think_end_id: int = 11
    newline_id: int = 198
    ok_ids: tuple[int, ...] = (2734, 30)
    think_share: float = 0.7  # of a "think" answer's ids
    loop_after: int = 12
    loop_period: int = 5

    # Timing
    instant: bool = False  # answer at once: no slots, no queue, no speed (for measuring a client)
    time_scale: float = 1.0
    max_running_requests: int = 48  # as requested
    mamba_slots: int | None = 80  # None: a model without Mamba state, the request is granted
    mamba_slots_per_request: int = 5
    max_queued_requests: int | None = None
    step_base_s: float = 0.020  # a decode step takes base + per_request x running; 16 running, accept length 2.7:
    step_per_request_s: float = 0.0006  # 1,459 tokens/s, the known run's 914,000 x 1,814 tokens in 45 h on 7 GPUs
    prefill_tokens_per_s: float = 20000.0  # decoding waits meanwhile
    max_total_tokens: int = 570000
    mtp: bool = False
    accept_mean: float = 2.7  # tokens a step with mtp; 1 without
    accept_sd: float = 0.25
    draft_tokens: int = 4

    # Life
    load_s: float = 0.0  # not listening yet
    warmup_s: float = 0.0  # listening, /health 503
    health_s: float = 0.0  # /health takes this long (about 1 s on a real server)
    health_timeout_s: float = 20.0  # /health of a hanging server answers 503 after it
    keep_alive_s: float = 5.0
    kill_delay_s: float = 5.0  # from what kills the scheduler to the disconnect
    enable_metrics: bool = True
    child: bool = False  # run a child process as the scheduler: its death kills the server, as the real one's
    faults: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("eos_ids", "special_ids", "ok_ids"):
            setattr(self, name, tuple(getattr(self, name)))
        if self.version not in VERSIONS:
            raise ValueError(f"version {self.version!r}: one of {', '.join(VERSIONS)}")
        unknown = set(self.styles) - set(STYLES)
        if unknown or not self.styles:
            raise ValueError(f"styles {sorted(unknown)}: some of {', '.join(STYLES)}")

    @property
    def old(self) -> bool:
        return self.version == "0.5.11"

    @property
    def effective_max_running(self) -> int:
        """facts/sglang.md, "Why 16": the cap is the Mamba slots over the slots that a request holds."""
        if self.mamba_slots is None:
            return self.max_running_requests
        return max(1, min(self.max_running_requests, self.mamba_slots // self.mamba_slots_per_request))

    @property
    def max_req_len(self) -> int:
        return self.context - 1

    @property
    def max_req_input_len(self) -> int:
        return self.context - 6

    @property
    def reserved_tokens(self) -> int:
        """What speculation reserves in both length checks (facts: max(topk x steps, draft tokens))."""
        return self.draft_tokens if self.mtp else 0

    def scaled(self, seconds: float) -> float:
        """Simulated seconds as real ones."""
        return seconds / self.time_scale

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SimConfig:
        known = {f.name for f in fields(cls)}
        unknown = set(values) - known
        if unknown:
            raise ValueError(f"unknown setting {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_config(source: str) -> dict[str, Any]:
    """A JSON object, given inline or as a path."""
    text = source if source.lstrip().startswith("{") else Path(source).read_text()
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"{source}: a JSON object is wanted")
    return values
