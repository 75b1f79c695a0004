"""SGLang's native API, versions 0.5.11 to 0.5.23: POST /generate with token ids in and out.

Bodies and statuses: ../shared/golden and ../shared/facts/sglang.md (section 2), taken from real servers.
"""

from __future__ import annotations

import re
from typing import Any

import aiohttp

from shardmill.engines import http
from shardmill.engines.alike import HttpEngine, first
from shardmill.engines.base import (
    Answer,
    Fault,
    PromptRefused,
    Refusal,
    Request,
    SamplingParams,
    ServerFault,
    ServerInfo,
    ServerLoad,
)
from shardmill.engines.prometheus import mean, total

_ABORT_S = 5.0
_TOO_LONG = re.compile(r"longer than the model's context length|input.{0,40}exceeds the maximum", re.IGNORECASE)
_NO_ROOM = re.compile(r"requested token count exceeds|maximum context length", re.IGNORECASE)
# A 400 about the request's form. The same request is refused for every prompt.
_FORM = re.compile(
    r"unknown field|validation error|JSON decode error|"
    r"(temperature|top_p|top_k|min_p|\w+_penalty|min_new_tokens|max_new_tokens|sampling_seed) must be",
    re.IGNORECASE,
)
_DUPLICATE = re.compile(r"duplicate request id", re.IGNORECASE)
# max_req_input_len = context - 6 in both versions (golden: 8186 of 8192, 4090 of 4096).
_INPUT_MARGIN = 6
# Mamba state slots that a running request holds, by radix cache strategy (facts, section 1).
_SLOTS = {"no_buffer": 3, "extra_buffer_lazy": 4, "extra_buffer": 5}


class SGLang(HttpEngine):
    name = "sglang"

    async def generate(self, session: aiohttp.ClientSession, url: str, request: Request, timeout_s: float) -> Answer:
        payload = {
            "rid": request.request_id,
            "input_ids": http.plain(request.prompt_ids),
            "sampling_params": _sampling(request.sampling, request.max_new_tokens),
            "stream": False,
            "return_logprob": False,
        }
        reply = await http.call(
            session, "POST", f"{url}/generate", timeout_s=timeout_s, api_key=self._key, payload=payload
        )
        http.check_status(reply, url)
        if reply.status == 400:
            raise _refused(reply, url)
        return _answer(reply, request.request_id)

    async def abort(self, session: aiohttp.ClientSession, url: str, request_id: str) -> None:
        try:
            await http.call(
                session,
                "POST",
                f"{url}/abort_request",
                timeout_s=_ABORT_S,
                api_key=self._key,
                payload={"rid": request_id},
            )
        except ServerFault:
            return  # closing the connection aborts it as well; this only makes sure

    async def info(self, session: aiohttp.ClientSession, url: str, timeout_s: float = 10.0) -> ServerInfo:
        server = await self._get(session, url, "/server_info", timeout_s)
        models = await self._get_if_there(session, url, "/v1/models", timeout_s)
        states = _ranks(server)
        caps = [http.whole(state.get("effective_max_running_requests_per_dp")) for state in states]
        running_cap = sum(cap for cap in caps if cap is not None) if None not in caps and caps else None
        requested_cap = http.whole(server.get("max_running_requests"))
        name = server.get("served_model_name") or server.get("model_path")
        return ServerInfo(
            model_name=name if isinstance(name, str) else None,
            vocab_size=http.whole(server.get("vocab_size")),
            context=_context(server, first(models.get("data"))),
            running_cap=running_cap,
            requested_cap=requested_cap,
            cap_reason=_cap_reason(server, states, running_cap, requested_cap),
            version=server.get("version") if isinstance(server.get("version"), str) else None,
        )

    async def load(self, session: aiohttp.ClientSession, url: str, timeout_s: float = 10.0) -> ServerLoad:
        reply = await http.call(session, "GET", f"{url}/metrics", timeout_s=timeout_s, api_key=self._key)
        if reply.status == 200:
            text = reply.body.decode(errors="replace")
            running, queued = total(text, "sglang:num_running_reqs"), total(text, "sglang:num_queue_reqs")
            return ServerLoad(
                running=None if running is None else round(running),
                queued=None if queued is None else round(queued),
                kv_use=mean(text, "sglang:full_token_usage", "sglang:token_usage"),
                mamba_use=mean(text, "sglang:mamba_usage"),
                tokens_per_s=total(text, "sglang:gen_throughput"),
                accept_length=mean(text, "sglang:spec_accept_length") or None,  # 0 without speculation
            )
        # Started without --enable-metrics: the little that /server_info has.
        state = first((await self._get(session, url, "/server_info", timeout_s)).get("internal_states"))
        return ServerLoad(
            running=None,
            queued=None,
            kv_use=None,
            mamba_use=None,
            tokens_per_s=http.number(state.get("last_gen_throughput")),
            accept_length=http.number(state.get("avg_spec_accept_length")),
        )


def _sampling(sampling: SamplingParams, max_new_tokens: int) -> dict[str, Any]:
    """Every parameter by its name: /generate fills gaps from the server's own preferred_sampling_params."""
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": None,
        "stop_token_ids": list(sampling.stop_token_ids),
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "n": 1,
        "ignore_eos": False,
        "skip_special_tokens": False,
        "sampling_seed": sampling.seed,
    }


def _refused(reply: http.Reply, url: str) -> Exception:
    """Whose fault a 400 is."""
    try:
        body = reply.json()
    except ServerFault:
        return ServerFault(Fault.NOT_JSON, f"status 400 with {http.excerpt(reply.body)}")
    message = http.error_message(body)
    if message is None:
        return ServerFault(Fault.SERVER_ERROR, f"status 400: {http.excerpt(reply.body)}")
    if _TOO_LONG.search(message):
        return PromptRefused(Refusal.TOO_LONG, message)
    if _NO_ROOM.search(message):
        return PromptRefused(Refusal.NO_ROOM, message)
    if _DUPLICATE.search(message):
        return ServerFault(Fault.SERVER_ERROR, message)
    if _FORM.search(message):
        return http.setup_fault(reply, url)
    return PromptRefused(Refusal.OTHER, message)


def _answer(reply: http.Reply, request_id: str) -> Answer:
    body = reply.json()
    if not isinstance(body, dict):
        raise ServerFault(Fault.NOT_JSON, f"not an object: {http.excerpt(reply.body)}")
    meta = body.get("meta_info")
    if not isinstance(meta, dict):
        error = http.error_message(body)
        if error is not None:
            raise ServerFault(Fault.ERROR_BODY, error)
        raise ServerFault(Fault.NO_IDS, "the answer has no meta_info")
    if meta.get("id") != request_id:
        raise ServerFault(Fault.WRONG_ID, f"asked {request_id}, answered {meta.get('id')!r}"[:200])
    finish, matched = _finish(meta)
    ids = http.token_ids(body.get("output_ids"))
    return Answer(
        output_ids=ids,
        finish=finish,
        matched=matched,
        prompt_tokens=http.count(meta, "prompt_tokens"),
        completion_tokens=http.count(meta, "completion_tokens"),
        accept_length=http.number(meta.get("spec_accept_length")),
        latency_s=reply.seconds,
    )


def _finish(meta: dict[str, Any]) -> tuple[str, int | str | None]:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if not isinstance(reason, dict) or kind not in ("stop", "length", "abort"):
        raise ServerFault(Fault.BAD_FINISH, f"finish_reason is {reason!r}"[:200])
    if kind == "abort":
        raise ServerFault(Fault.ABORTED, str(reason.get("message")))
    matched = reason.get("matched")
    if isinstance(matched, str) and "nan" in matched.lower().split():
        raise ServerFault(Fault.NAN, matched)
    return kind, matched if isinstance(matched, int | str) else None


def _ranks(server: dict[str, Any]) -> list[dict[str, Any]]:
    """One state for each data-parallel rank of the server; requests are shared out among them."""
    states = server.get("internal_states")
    return [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []


def _context(server: dict[str, Any], model: dict[str, Any]) -> int | None:
    """The smaller of what the model allows and what the KV cache holds for one request."""
    allowed = http.whole(model.get("max_model_len")) or http.whole(server.get("context_length"))
    longest_input = http.whole(server.get("max_req_input_len"))
    held = longest_input + _INPUT_MARGIN if longest_input is not None else None
    known = [value for value in (allowed, held) if value is not None]
    return min(known) if known else None


def _cap_reason(
    server: dict[str, Any], states: list[dict[str, Any]], running_cap: int | None, requested_cap: int | None
) -> str | None:
    """kv_cache_configurator.py: cap = max_mamba_cache_size // slots a request, both of one data-parallel rank."""
    if running_cap is None or requested_cap is None or running_cap >= requested_cap:
        return None
    state, running_cap, requested_cap = states[0], running_cap // len(states), requested_cap // len(states)
    slots = http.whole(state.get("max_mamba_cache_size")) or http.whole(server.get("max_mamba_cache_size"))
    if slots is None:
        return "its memory: raise mem-fraction-static in servers.args, or look for 'is capped to' in its log"
    strategy = server.get("mamba_radix_cache_strategy") or server.get("mamba_scheduler_strategy")
    each = 1 if server.get("disable_radix_cache") else _SLOTS.get(str(strategy), 0)
    if each == 0 or slots // each != running_cap:
        each = max(1, slots // running_cap)
    wanted = requested_cap * each
    lift = f"set max-mamba-cache-size to {wanted} in servers.args"
    if each > 1:
        lift += ", or disable-radix-cache (one slot a request)"
    return f"{slots} Mamba state slots // {each} a request = {slots // each}: {lift}"
