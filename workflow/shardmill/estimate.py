"""What the rest of a build will take, from what its finished part took or from figures given by hand. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# int32 ids and a mask byte, before compression: an upper bound where no finished shard shows the real size.
_RAW_BYTES_PER_TOKEN = 4 + 4 + 1


@dataclass(frozen=True, slots=True)
class Known:
    """Figures that an estimate stands on. None where nothing is known."""

    prompts_to_generate: int | None
    mean_output_tokens: float | None
    tokens_per_s_per_server: float | None
    servers: int | None
    usd_per_gpu_hour: float | None
    usd_per_gb_month: float | None
    mean_prompt_tokens: float | None
    bytes_per_row: float | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """None where a figure that it follows from is not known."""

    tokens: float | None
    server_hours: float | None
    hours: float | None
    usd: float | None
    bytes: float | None
    usd_per_month: float | None


def estimate(known: Known) -> Estimate:
    """tokens = prompts x mean; server hours = tokens / rate; hours = server hours / servers; dollars by the prices."""
    tokens = _times(known.prompts_to_generate, known.mean_output_tokens)
    rate = known.tokens_per_s_per_server
    server_hours = tokens / rate / 3600 if tokens is not None and rate else None
    size = known.bytes_per_row
    if size is None and known.mean_output_tokens is not None and known.mean_prompt_tokens is not None:
        size = (known.mean_output_tokens + known.mean_prompt_tokens) * _RAW_BYTES_PER_TOKEN
    volume = _times(known.prompts_to_generate, size)
    return Estimate(
        tokens=tokens,
        server_hours=server_hours,
        hours=server_hours / known.servers if server_hours is not None and known.servers else None,
        usd=_times(server_hours, known.usd_per_gpu_hour),
        bytes=volume,
        usd_per_month=_times(volume / 1e9 if volume is not None else None, known.usd_per_gb_month),
    )


def _times(a: float | None, b: float | None) -> float | None:
    return a * b if a is not None and b is not None else None
