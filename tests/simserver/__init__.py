"""A SGLang stand-in for tests and benchmarks: its HTTP API, a timing model, and every way in which it fails.

    python -m simserver --port 30000 --mtp --length-mean 1814 --length-sigma 0.9 --time-scale 60
    python -m simserver --port 30000 --instant                  answers at once: measures a client
    python -m simserver --config server.json --faults '[{"kind": "error_500", "p": 0.1}]'

(with `tests/` on PYTHONPATH; `python -m tests.simserver` from the repository's root.) Every setting of config.SimConfig
is a flag. `serve`, `version` and SGLang's own flags are understood too (flags.py), for a supervisor that starts it.

What it answers follows from its seed and the prompt (answers.py), so servers agree with one another. Faults are rules
(faults.py), given at start or at `POST /sim/faults {"rules": […], "keep": false}`; `GET /sim/stats` and `GET /sim/log`
show what happened, and `--log` keeps it (eventlog.py). In a test:

    with SimFleet(3, {"instant": True}) as fleet:
        fleet.faults(0, {"kind": "outage", "seconds": 5})
        fleet.urls, fleet.kill(1), fleet.start(1), fleet.log(0), fleet.received(), fleet.stats(2)

Not simulated: /v1/chat/completions, logprobs, the radix cache, memory limits, and the timing of streamed chunks.
"""

from .answers import Answer, answer, prompt_hash
from .config import SimConfig
from .eventlog import read_log
from .fleet import SimFleet, write_command
from .process import free_ports

__all__ = ["Answer", "SimConfig", "SimFleet", "answer", "free_ports", "prompt_hash", "read_log", "write_command"]
