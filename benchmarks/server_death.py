"""One of seven servers dies in the middle of a build, and does not come back: the fleet's speed before and after.

    python benchmarks/server_death.py [--prompts 1400] [--slots 6]

A whole build by Snakemake (jobs, fleet and servers are processes) against simulated servers on a scaled clock. Speed
and fullness are taken from the servers' own logs: before, from the moment when all slots are full to the death; after,
from a second after the death to the last request's arrival. Six of seven servers should make 6/7 = 85.7 % of what seven
made. Exit code 1 when they make under 83 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from simserver import SimFleet  # noqa: E402
from workspace import Workspace  # noqa: E402

SERVERS = 7
VICTIM = 3
SETTLED_S = 1.0
Log = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Span:
    """What the living servers did in `seconds`."""

    seconds: float
    tokens: float
    full: float  # share of their slots in use

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Result:
    before: Span
    after: Span
    asked_again: int  # requests for a prompt after its first

    @property
    def ratio(self) -> float:
        return self.after.tokens_per_s / self.before.tokens_per_s


def simulated(slots: int, answer_s: float) -> dict[str, Any]:
    """Servers of `slots`, whose answers of about 60 ids take `answer_s`."""
    step_s = 0.02 + 0.0006 * slots
    return {
        "length_mean": 60,
        "length_sigma": 0.5,
        "time_scale": 60 * step_s / answer_s,
        "mamba_slots": None,
        "max_running_requests": slots,
        "kill_delay_s": 0.0,
    }


def make_workspace(folder: Path, fleet: SimFleet, prompts: int, shards: int) -> Workspace:
    dataset = [
        {"id": f"{number}", "conversations": [{"from": "human", "value": f"What is special about {number}?"}]}
        for number in range(prompts)
    ]
    (folder / "dataset.json").write_text(json.dumps(dataset))
    return Workspace(
        folder,
        {
            "dataset": {"path": "dataset.json"},
            "prompts": {"shards": shards},
            "servers": {"engine": "sglang", "endpoints": fleet.urls},
            "generate": {"pilot_shards": 0},
            "quality": {"override": ["all"]},
        },
    )


def measure(workspace: Workspace, fleet: SimFleet, prompts: int, slots: int) -> Result:
    """Builds, kills a server when half of the prompts have been asked, and waits for the build's good end."""
    run = workspace.start()
    try:
        while len(fleet.asked()) < prompts // 2:
            assert run.poll() is None, workspace.log.read_text()
            time.sleep(0.1)
        death = time.time()
        fleet.kill(VICTIM)
        code = run.wait()
    finally:
        run.kill()
    assert code == 0, workspace.log.read_text()
    logs = [fleet.log(number) for number in range(SERVERS)]
    begin = max(_full_from(log, slots) for log in logs)
    end = max(line["t"] for log in logs for line in log if line["event"] == "received")
    living = [log for number, log in enumerate(logs) if number != VICTIM]
    return Result(
        _span(logs, begin, death, slots),
        _span(living, death + SETTLED_S, end, slots),
        sum(times - 1 for times in fleet.asked().values()),
    )


def _full_from(log: Log, slots: int) -> float:
    """When all slots of a server were in use for the first time."""
    requests = 0
    for line in log:
        requests += {"received": 1, "done": -1}.get(line["event"], 0)
        if requests >= slots:
            return float(line["t"])
    raise AssertionError("a server was never full: give it more prompts")


def _span(logs: list[Log], begin: float, end: float, slots: int) -> Span:
    answered = [line for log in logs for line in log if line.get("outcome") == "answered"]
    tokens = sum(_made(line, begin, end) for line in answered)
    full = sum(_in_use(log, begin, end, slots) for log in logs) / (len(logs) * slots)
    return Span(end - begin, tokens, full)


def _made(answer: dict[str, Any], begin: float, end: float) -> float:
    """Its tokens between two moments: an answer under way at one of them counts in part."""
    share = (min(answer["t"], end) - max(answer["t0"], begin)) / max(answer["t"] - answer["t0"], 1e-9)
    return float(answer["tokens"] * max(0.0, share))


def _in_use(log: Log, begin: float, end: float, slots: int) -> float:
    """How many of a server's slots were in use, on average over the time."""
    area, requests, moment = 0.0, 0, begin
    for line in log:
        change = {"received": 1, "done": -1}.get(line["event"], 0)
        at = min(max(line["t"], begin), end)
        area += min(requests, slots) * (at - moment)
        requests, moment = requests + change, at
    return (area + min(requests, slots) * (end - moment)) / (end - begin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1400)
    parser.add_argument("--slots", type=int, default=6)
    parser.add_argument("--answer-s", type=float, default=1.5, help="how long a server takes for a mean answer")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, SimFleet(SERVERS, simulated(given.slots, given.answer_s)) as fleet:
        workspace = make_workspace(Path(folder), fleet, given.prompts, shards=4)
        result = measure(workspace, fleet, given.prompts, given.slots)
    for name, span in (("seven servers", result.before), ("six, after a death", result.after)):
        print(f"{name:20}{span.tokens_per_s:8,.0f} tokens/s over {span.seconds:3.0f} s, slots {span.full:.1%} full")
    print(f"{result.ratio:.1%} of the speed (6/7 is 85.7%); {result.asked_again} requests sent again")
    return 0 if result.ratio >= 0.83 else 1


if __name__ == "__main__":
    sys.exit(main())
