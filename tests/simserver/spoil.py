"""How each fault of faults.ANSWER_KINDS spoils an answer's JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .answers import unit
from .bodies import Sequence1, spec_fields
from .config import SimConfig
from .faults import Rule

HTML = (
    "<html>\r\n<head><title>{status} {reason}</title></head>\r\n<body>\r\n"
    "<center><h1>{status} {reason}</h1></center>\r\n<hr><center>nginx</center>\r\n</body>\r\n</html>\r\n"
)


def html(status: int, reason: str) -> bytes:
    return HTML.format(status=status, reason=reason).encode()


def _set(
    config: SimConfig, body: dict[str, Any], ids: list[int], finish: Mapping[str, Any], accept: float | None
) -> None:
    body["output_ids"] = ids
    meta = body["meta_info"]
    meta["completion_tokens"] = len(ids)
    meta["finish_reason"] = dict(finish)
    if not config.old:
        meta["weight_versions"] = [{"version": "default", "start": 0, "end": len(ids)}]
    if accept is not None and config.mtp and ids:
        meta.update(spec_fields(config, len(ids), accept))


def spoil(config: SimConfig, rule: Rule, body: dict[str, Any], seq: Sequence1) -> bool:
    """Changes `body`; False where the fault cannot happen to this answer, which then stays as it is."""
    kind, meta = rule.kind, body["meta_info"]
    ids: list[int] = body["output_ids"]
    finish = meta["finish_reason"]
    limit = seq.limit
    at = int(unit(seq.rid, kind) * max(len(ids), 1))  # somewhere in the answer
    eos = config.eos_ids[0]
    if kind == "abort":
        _set(
            config, body, ids[:at], {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}, None
        )
    elif kind == "nan":
        _set(config, body, [*ids[:at], eos], {"type": "stop", "matched": "NaN happened"}, None)
    elif kind == "junk_after_eos":
        if finish["type"] != "stop" or not isinstance(finish["matched"], int):
            return False
        junk = [max(config.special_ids, default=0) + 20 + i for i in range(rule.get("n", 3))][
            : max(0, limit - len(ids))
        ]
        if not junk:
            return False
        _set(config, body, ids + junk, {"type": "length", "length": len(ids) + len(junk)}, None)
    elif kind == "zero_loop":
        _set(config, body, [0] * limit, {"type": "length", "length": limit}, 1.0)
    elif kind == "cycle_loop":
        period = rule.get("period", 4)
        cycle = [config.vocab_size - 1 - i for i in range(period)]
        looped = (ids[: at // 2] + cycle * (limit // period + 1))[:limit]
        _set(config, body, looped, {"type": "length", "length": limit}, None)
    elif kind == "empty_output":
        _set(config, body, [], {"type": "stop", "matched": eos}, None)
        body["text"] = ""
    elif kind == "missing_output_ids":
        del body["output_ids"]
    elif kind == "null_output_ids":
        body["output_ids"] = None
    elif kind == "bad_type_ids":
        body["output_ids"] = [str(i) for i in ids]
    elif kind == "nested_ids":
        body["output_ids"] = [ids]
    elif kind == "no_meta":
        del body["meta_info"]
    elif kind == "null_finish":
        meta["finish_reason"] = None
    elif kind == "unknown_finish":
        meta["finish_reason"] = {"type": "paused"}
    elif kind == "wrong_counts":
        meta["completion_tokens"] = len(ids) + 7
    elif kind == "wrong_prompt_tokens":
        meta["prompt_tokens"] = len(seq.ids) + 1
    elif kind == "out_of_range":
        body["output_ids"] = [*ids[:at], config.vocab_size + at, *ids[at + 1 :]]
    elif kind == "negative_id":
        body["output_ids"] = [*ids[:at], -1, *ids[at + 1 :]]
    elif kind == "missing_stop":
        if finish["type"] != "stop" or len(ids) < 2:
            return False
        _set(config, body, ids[:-1], finish, None)
    elif kind == "wrong_id":
        meta["id"] = "0" * 32
    elif kind in ("spec_missing", "spec_null"):
        for name in [name for name in meta if name.startswith("spec_")]:
            if kind == "spec_null":
                meta[name] = None
            else:
                del meta[name]
    return True
