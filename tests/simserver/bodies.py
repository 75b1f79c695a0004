"""The bodies of /generate: validation in the real server's words, and its answers, by version (../shared/golden)."""

from __future__ import annotations

import functools
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from .config import SimConfig
from .engine import Job

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLING_FIELDS = (
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex",
    "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim",
    "stream_interval", "logit_bias", "sampling_seed", "custom_params", "beam_width", "watermark", "choice",
)  # fmt: skip
NEW_ONLY_FIELDS = {"beam_width", "watermark", "choice"}
DEFAULT_NEW_TOKENS = 128


class Refused(Exception):
    """A request that the server refuses before any work: `status` and the JSON `body` (or text, for `str`)."""

    def __init__(self, status: int, body: Mapping[str, Any] | str) -> None:
        super().__init__(str(body))
        self.status = status
        self.body = body


@dataclass(slots=True)
class Sequence1:
    """One sequence of a /generate request: a prompt of its own id, and how it is to be continued."""

    rid: str
    ids: list[int]
    sampling: dict[str, Any]
    limit: int
    sample: int


@dataclass(slots=True)
class Generate:
    sequences: list[Sequence1]
    single: bool
    stream: bool
    return_prompt_ids: bool


def message_error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


def object_error(status: int, message: str, kind: str | None = None) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": kind or str(status), "param": None, "code": status}


def unknown_field(name: str) -> dict[str, Any]:
    expected = ", ".join(f"`{field}`" for field in SAMPLING_FIELDS)
    return {"error": f"unknown field `{name}`, expected one of {expected}"}


def _validation_error(config: SimConfig, errors: list[str]) -> Refused:
    path = "whl/y0.5.11" if config.old else "site-packages"
    line = 701 if config.old else 928
    count = f"{len(errors)} validation error{'s' if len(errors) > 1 else ''}"
    listed = "".join(f"\n  {error}" for error in errors)
    where = f'File "{path}/sglang/srt/entrypoints/http_server.py", line {line}, in generate_request'
    text = f"{count}:{listed}\n\n  {where}\n    POST /generate [{', '.join(errors)}]"
    return Refused(400, object_error(400, text, "Bad Request"))


def _parse_json(config: SimConfig, body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body) if config.old else orjson.loads(body)
    except json.JSONDecodeError as error:  # orjson's error is a subclass
        what = {"error": error.msg}
        detail = {
            "type": "json_invalid",
            "loc": ("body", error.pos),
            "msg": "JSON decode error",
            "input": {},
            "ctx": what,
        }
        raise _validation_error(config, [repr(detail)]) from None
    if not isinstance(value, dict):
        wrong = {"type": "dict_type", "loc": ("body",), "msg": "Input should be a valid dictionary", "input": value}
        raise _validation_error(config, [repr(wrong)])
    return value


def _check_ids_type(config: SimConfig, ids: object) -> None:
    if ids is None or isinstance(ids, list):
        return
    if config.old:
        locs = ("list[list[int]]", "list[int]")
        raise _validation_error(
            config,
            [
                repr(
                    {
                        "type": "list_type",
                        "loc": ("body", "input_ids", loc),
                        "msg": "Input should be a valid list",
                        "input": ids,
                    }
                )
                for loc in locs
            ],
        )
    why = f"must be list or null; got {type(ids).__name__}"
    head = repr({"type": "value_error", "loc": ("body", "input_ids"), "msg": f"Value error, {why}", "input": ids})
    raise _validation_error(config, [f"{head[:-1]}, 'ctx': {{'error': ValueError({why!r})}}}}"])


def _check_lengths(config: SimConfig, ids: Sequence[int], sampling: Mapping[str, Any]) -> int:
    """The number of new tokens that the scheduler will allow."""
    n, context = len(ids), config.context
    if n == 0:
        raise Refused(400, message_error("input_ids cannot be empty."))
    if n + config.reserved_tokens >= context:
        raise Refused(
            400, message_error(f"The input ({n} tokens) is longer than the model's context length ({context} tokens).")
        )
    asked = sampling.get("max_new_tokens", DEFAULT_NEW_TOKENS)
    total = n + (asked or 0)
    if total + config.reserved_tokens > context:
        raise Refused(
            400,
            message_error(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested "
                f"a total of {total} tokens: {n} tokens from the input messages and {asked} tokens for the completion. "
                "Please reduce the number of tokens in the input messages or the completion to fit within the limit."
            ),
        )
    if n > config.max_req_input_len:
        raise Refused(
            400,
            message_error(
                f"Input length ({n} tokens) exceeds the maximum allowed length ({config.max_req_input_len} tokens). "
                "Use a shorter input or enable --allow-auto-truncate."
            ),
        )
    room = config.max_req_len - n - 1
    return max(0, min(room, asked if asked is not None else room))


def parse_generate(config: SimConfig, body: bytes, tokenize: Any) -> Generate:
    """Raises Refused as the real server does."""
    value = _parse_json(config, body)
    _check_ids_type(config, value.get("input_ids"))
    params = value.get("sampling_params") or {}
    listed = params if isinstance(params, list) else [params]
    for one in listed:
        for name in one:
            if name not in SAMPLING_FIELDS or (config.old and name in NEW_ONLY_FIELDS):
                raise Refused(500, "Internal Server Error") if config.old else Refused(400, unknown_field(name))
        temperature = one.get("temperature", 1.0)
        if isinstance(temperature, int | float) and temperature < 0:
            raise Refused(400, message_error(f"temperature must be a non-negative finite number, got {temperature}."))
    prompts = value.get("input_ids")
    if prompts is None:
        text = value.get("text")
        if text is None:
            raise Refused(400, message_error("Either text, input_ids or input_embeds should be provided."))
        prompts = tokenize(text) if isinstance(text, str) else [tokenize(one) for one in text]
    single = not (prompts and isinstance(prompts[0], list))
    prompts = [prompts] if single else prompts
    n = int(listed[0].get("n") or 1)
    rid = value.get("rid")
    sequences = []
    for at, ids in enumerate(prompts):
        sampling = listed[at if len(listed) > 1 else 0]
        limit = _check_lengths(config, ids, sampling)
        for sample in range(n):
            own = rid[at] if isinstance(rid, list) else rid if single else None
            name = own if own is not None and n == 1 else uuid.uuid4().hex
            sequences.append(Sequence1(str(name), ids, sampling, limit, sample))
    returns = bool(value.get("return_prompt_token_ids")) and not config.old
    return Generate(sequences, single and n == 1, bool(value.get("stream")), returns)


class Text:
    """Text of ids: the given tokenizer's, or a word of hexadecimal digits per id."""

    def __init__(self, config: SimConfig) -> None:
        self._special = {*config.special_ids, *config.eos_ids, config.think_start_id, config.think_end_id}
        self._tokenizer: Tokenizer | None = None
        if config.tokenizer is not None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(config.tokenizer)
        self._vocab = config.vocab_size
        self._words: list[str] | None = None

    def encode(self, text: str) -> list[int]:
        if self._tokenizer is not None:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return ids
        return [256 + byte for byte in text.encode()]

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        if self._tokenizer is not None:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
            return text
        if self._words is None:
            self._words = [f"<|{i}|>" if i in self._special else f" {i:x}" for i in range(self._vocab)]
        words = self._words
        if skip_special:
            return "".join([words[i] for i in ids if i not in self._special])
        return "".join([words[i] for i in ids])


def cut_at_string(text: Text, ids: list[int], stops: Sequence[str], skip_special: bool) -> tuple[int, str] | None:
    """How many ids it takes until one of the stop strings has appeared, and which."""
    so_far = ""
    for at, token in enumerate(ids):
        so_far += text.decode([token], skip_special)
        for stop in stops:
            if stop in so_far:
                return at + 1, stop
    return None


@functools.cache
def _epoch() -> float:
    return time.time() - time.monotonic()


def meta_info(
    config: SimConfig, job: Job, seq: Sequence1, finish: Mapping[str, Any] | None, now: float
) -> dict[str, Any]:
    """`now` and the job's times are monotonic seconds; latencies are given in simulated ones."""
    epoch, scale = _epoch(), config.time_scale
    waited = max(0.0, (job.started_at or now) - job.queued_at) * scale
    taken = max(1e-6, (now - job.queued_at) * scale)
    produced = job.produced
    versions = [{"version": "default", "start": 0, "end": produced}]
    meta: dict[str, Any] = {
        "id": seq.rid,
        "finish_reason": finish,
        "prompt_tokens": job.prompt_tokens,
        "weight_version": "default",
    }
    if config.old:
        meta |= {
            "total_retractions": 0, "queue_time": waited, "prefill_waiting_latency": None,
            "prefill_launch_latency": None, "reasoning_tokens": 0, "completion_tokens": produced, "cached_tokens": 0,
            "cached_tokens_details": None, "dp_rank": None, "e2e_latency": taken,
            "request_received_ts": epoch + job.queued_at, "api_server_dispatch_finish_ts": epoch + job.queued_at,
            "request_finished_ts": epoch + now, "inference_time": taken, "decode_throughput": produced / taken,
        }  # fmt: skip
    else:
        meta |= {
            "num_retractions": 0, "storage_prefetch_wait": 0.0, "storage_staging_wait": 0.0,
            "forward_entry_time": epoch + job.started_at, "prefill_finished_time": epoch + job.started_at,
            "queue_time": waited, "reasoning_tokens": 0, "completion_tokens": produced, "cached_tokens": 0,
            "weight_versions": versions, "cached_tokens_details": None, "dp_rank": None, "e2e_latency": taken,
            "request_received_ts": epoch + job.queued_at, "first_token_latency": waited,
            "api_server_dispatch_finish_ts": epoch + job.queued_at, "request_finished_ts": epoch + now,
            "decode_throughput": produced / taken,
        }  # fmt: skip
    if job.queued_abort:
        del meta["prompt_tokens"], meta["cached_tokens"]
    elif config.mtp and produced:
        meta |= spec_fields(config, produced, job.accept_length)
    meta["response_sent_to_client_ts"] = epoch + now
    return meta


def spec_fields(config: SimConfig, tokens: int, accept_length: float) -> dict[str, Any]:
    """Of these, accept rate, length and verify count have the same names in both versions."""
    verify = max(1, -(-tokens * 1000 // round(accept_length * 1000)))
    drafted = verify * (config.draft_tokens - 1)
    right = max(0, tokens - verify)
    fields = {
        "spec_accept_rate": right / drafted if drafted else 0.0,
        "spec_accept_length": tokens / verify,
        "spec_verify_ct": verify,
    }
    names = ("spec_accepted_drafts", "spec_proposed_drafts") if config.old else (
        "spec_num_correct_drafts", "spec_num_proposed_drafts",
    )  # fmt: skip
    return fields | dict(zip(names, (right, drafted), strict=True))
