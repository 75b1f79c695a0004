"""What nvidia-smi says about the GPUs of this machine, where it is there."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass

_QUERY = "index,utilization.gpu,power.draw,memory.used,memory.total"
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """None where the driver says [N/A]. Shares are 0 to 1, power is in watts, memory in MiB."""

    index: int
    utilisation: float | None
    power_w: float | None
    memory_used_mib: float | None
    memory_mib: float | None


def available() -> bool:
    return shutil.which("nvidia-smi") is not None


async def gpus() -> dict[int, Gpu]:
    """By index; empty where there is no nvidia-smi, or it does not answer."""
    if not available():
        return {}
    process = await asyncio.create_subprocess_exec(
        "nvidia-smi",
        f"--query-gpu={_QUERY}",
        "--format=csv,noheader,nounits",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return {}
    return parse(output.decode(errors="replace"))


def parse(csv: str) -> dict[int, Gpu]:
    """Lines of `nvidia-smi --query-gpu=… --format=csv,noheader,nounits`."""
    found = {}
    for line in csv.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(_QUERY.split(",")) or not fields[0].isdigit():
            continue
        use, power, used, total = (_number(field) for field in fields[1:])
        index = int(fields[0])
        found[index] = Gpu(index, None if use is None else use / 100, power, used, total)
    return found


def _number(field: str) -> float | None:
    try:
        return float(field)
    except ValueError:
        return None
