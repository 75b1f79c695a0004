"""llama.cpp's HTTP server: POST /completion with token ids in and out.

Seen on xllamacpp 2026.10.11549 (../shared/facts/sglang.md, section 8). It stops at the model's own end-of-generation
ids alone; the audit cuts an answer at any other stop id.
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
    ServerFault,
    ServerInfo,
    ServerLoad,
)
from shardmill.engines.prometheus import mean, total

_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}
_TOO_LONG = re.compile(r"exceed_context_size|exceeds the available context|too (long|large) .*context", re.IGNORECASE)


class LlamaCpp(HttpEngine):
    name = "llamacpp"

    async def generate(self, session: aiohttp.ClientSession, url: str, request: Request, timeout_s: float) -> Answer:
        reply = await http.call(
            session, "POST", f"{url}/completion", timeout_s=timeout_s, api_key=self._key, payload=_payload(request)
        )
        http.check_status(reply, url)
        if reply.status == 400:
            raise _refused(reply)
        return _answer(reply)

    async def abort(self, session: aiohttp.ClientSession, url: str, request_id: str) -> None:
        """Nothing to ask for: llama.cpp drops a request when its connection closes."""

    async def info(self, session: aiohttp.ClientSession, url: str, timeout_s: float = 10.0) -> ServerInfo:
        props = await self._get(session, url, "/props", timeout_s)
        model = first((await self._get_if_there(session, url, "/v1/models", timeout_s)).get("data"))
        meta = model.get("meta")
        settings = props.get("default_generation_settings")
        name = model.get("id") or props.get("model_path")
        slots = http.whole(props.get("total_slots"))
        return ServerInfo(
            model_name=name if isinstance(name, str) else None,
            vocab_size=http.whole(meta.get("n_vocab")) if isinstance(meta, dict) else None,
            context=http.whole(settings.get("n_ctx")) if isinstance(settings, dict) else None,  # of one slot
            running_cap=slots,
            requested_cap=slots,
            cap_reason=None,
            version=props.get("build_info") if isinstance(props.get("build_info"), str) else None,
        )

    async def load(self, session: aiohttp.ClientSession, url: str, timeout_s: float = 10.0) -> ServerLoad:
        reply = await http.call(session, "GET", f"{url}/metrics", timeout_s=timeout_s, api_key=self._key)
        text = reply.body.decode(errors="replace") if reply.status == 200 else ""
        running, queued = total(text, "llamacpp:requests_processing"), total(text, "llamacpp:requests_deferred")
        return ServerLoad(
            running=None if running is None else round(running),
            queued=None if queued is None else round(queued),
            kv_use=mean(text, "llamacpp:kv_cache_usage_ratio"),
            mamba_use=None,
            tokens_per_s=total(text, "llamacpp:predicted_tokens_seconds"),
            accept_length=None,
        )


def _payload(request: Request) -> dict[str, Any]:
    """Every sampler by name: llama.cpp's defaults (top_k 40, top_p 0.95, min_p 0.05) are not what a config says.

    Temperature comes first, as in SGLang and transformers; llama.cpp's own order has it last.
    """
    sampling = request.sampling
    return {
        "prompt": http.plain(request.prompt_ids),
        "n_predict": request.max_new_tokens,
        "return_tokens": True,
        "response_fields": ["tokens", "stop_type", "tokens_predicted", "tokens_evaluated"],
        "cache_prompt": False,
        "stream": False,
        "samplers": ["temperature", "top_k", "top_p", "min_p"],
        "temperature": sampling.temperature,
        "top_k": max(sampling.top_k, 0),  # 0 takes all
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": 1.0,
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "dry_multiplier": 0.0,
        "dynatemp_range": 0.0,
        "mirostat": 0,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_keep": 0,
        "n_probs": 0,
        "stop": [],
        "ignore_eos": False,
        "seed": -1 if sampling.seed is None else sampling.seed,
    }


def _refused(reply: http.Reply) -> Exception:
    """Whose fault a 400 is."""
    try:
        body = reply.json()
    except ServerFault:
        return ServerFault(Fault.NOT_JSON, f"status 400 with {http.excerpt(reply.body)}")
    message = http.error_message(body)
    if message is None:
        return ServerFault(Fault.SERVER_ERROR, f"status 400: {http.excerpt(reply.body)}")
    error = body.get("error")
    kind = error.get("type", "") if isinstance(error, dict) else ""
    if _TOO_LONG.search(f"{kind} {message}"):
        return PromptRefused(Refusal.TOO_LONG, message)
    return PromptRefused(Refusal.OTHER, message)


def _answer(reply: http.Reply) -> Answer:
    body = reply.json()
    if not isinstance(body, dict):
        raise ServerFault(Fault.NOT_JSON, f"not an object: {http.excerpt(reply.body)}")
    error = http.error_message(body)
    if error is not None:
        raise ServerFault(Fault.ERROR_BODY, error)
    ids = http.token_ids(body.get("tokens"))
    finish = _FINISH.get(str(body.get("stop_type")))
    if finish is None:
        raise ServerFault(Fault.BAD_FINISH, f"stop_type is {body.get('stop_type')!r}"[:200])
    return Answer(
        output_ids=ids,
        finish=finish,
        matched=ids[-1] if finish == "stop" and ids else None,
        prompt_tokens=http.count(body, "tokens_evaluated"),
        completion_tokens=http.count(body, "tokens_predicted"),
        accept_length=None,
        latency_s=reply.seconds,
    )
