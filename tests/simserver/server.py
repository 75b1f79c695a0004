"""The server itself: its life from start to death, its endpoints, and the faults of the whole of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson

from . import info
from .config import SimConfig
from .engine import Engine
from .eventlog import EventLog
from .faults import Faults, Rule
from .generate import PLAIN, Generator
from .http import Connection, Request
from .process import die_with_parent

FLUSHED = (
    b"Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, "
    b"the operation will not be performed.)\n"
)
_SET_OFF = {
    "refuse",
    "outage",
    "hang",
    "die",
    "crash",
}  # the others of faults.SERVER_KINDS are looked up when they matter


class Server:
    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self._loop = asyncio.get_running_loop()
        self._born = self._loop.time()
        self.log = EventLog(config.log)
        self.faults = Faults(config.seed, self.log.start, lambda: (self._loop.time() - self._born) * config.time_scale)
        self.engine = Engine(config, self._loop)
        self.generator = Generator(config, self.engine, self.faults, self.log, self._set_off, self.crash)
        self._open: set[Connection] = set()
        self._control: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._child: asyncio.subprocess.Process | None = None
        self._hang: Rule | None = None
        self._ends: list[asyncio.TimerHandle] = []
        self._stopped = asyncio.Event()
        self._down = False
        self._max_running = self._max_queued = 0
        self._gets: dict[str, Callable[[Connection], None]] = {
            "/health": self._health,
            "/health_generate": self._health,
            "/model_info": lambda c: self._json(c, info.model_info(config)),
            "/get_model_info": lambda c: self._json(c, info.model_info(config)),
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/v1/models": lambda c: self._json(c, info.v1_models(config)),
            "/v1/loads": self._loads,
            "/metrics": self._metrics,
            "/flush_cache": self._flush,
            "/sim/stats": lambda c: self._json(c, self.stats()),
            "/sim/log": lambda c: self._json(c, list(self.log.recent)),
            "/sim/faults": lambda c: self._json(c, {"rules": [rule.values for rule in self.faults.rules]}),
        }
        if not config.old:
            self._gets["/ready"] = self._ready
        self._posts: dict[str, Callable[[Connection, Request], None]] = {
            "/generate": self.generator.handle,
            "/abort_request": self._abort,
            "/tokenize": self._tokenize,
            "/flush_cache": lambda c, _: self._flush(c),
            "/sim/faults": self._set_faults,
        }

    # Life

    async def run(self) -> int:
        """Until SIGTERM, SIGINT or a fault ends it. Returns the exit code."""
        c = self.config
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_stop)
        self.log.write("start", pid=os.getpid(), port=c.port, start=self.log.start)
        if c.control_port:
            await self._loop.create_server(partial(Connection, self._handle, self._control), c.host, c.control_port)
        self._apply(c.faults, keep=False)
        failing = self.faults.at_start("start_fail")
        if failing is not None:
            await self._stop_within(failing.get("seconds", 0.0))
            sys.stderr.write("RuntimeError: simulated start failure\n")
            return int(failing.get("code", 1))
        slow = self.faults.at_start("start_slow")
        await self._stop_within(c.load_s + (slow.get("seconds", 30.0) if slow is not None else 0.0))
        if self.faults.at_start("start_hang") is not None:
            await self._stopped.wait()
        if c.mamba_slots is not None and c.effective_max_running < c.max_running_requests:
            sys.stderr.write(
                f"max_running_requests is capped to {c.effective_max_running} by the mamba state cache "
                f"(max_mamba_cache_size={c.mamba_slots}, {c.mamba_slots_per_request} state slots per request)\n"
            )
        if c.child and not self._stopped.is_set():
            self._child = await asyncio.create_subprocess_exec("sleep", "1000000", preexec_fn=die_with_parent)
            watch = asyncio.ensure_future(self._watch_child(self._child))
        if not self._stopped.is_set() and not self._down:
            await self._listen()
            await self._warm_up()
        self._sweep()
        await self._stopped.wait()
        if self._child is not None:
            watch.cancel()
            if self._child.returncode is None:
                self._child.kill()
        self.log.write("stop")
        return 0

    async def _stop_within(self, seconds: float) -> None:
        if seconds > 0:
            try:
                await asyncio.wait_for(self._stopped.wait(), self.config.scaled(seconds))
            except TimeoutError:
                return

    def _on_stop(self) -> None:
        if self.faults.at_start("ignore_sigterm") is None:
            self._stopped.set()

    async def _watch_child(self, child: asyncio.subprocess.Process) -> None:
        await child.wait()
        if not self._stopped.is_set():
            self.crash()

    async def _listen(self) -> None:
        if self._listener is None:
            factory = partial(Connection, self._handle, self._open)
            self._listener = await self._loop.create_server(
                factory, self.config.host, self.config.port, backlog=2048, reuse_address=True
            )

    async def _warm_up(self) -> None:
        await self._stop_within(self.config.warmup_s)
        if not self._down:
            self.generator.ready = True
            self.log.write("ready")
            sys.stderr.write("The server is fired up and ready to roll!\n")
            sys.stderr.flush()

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _sweep(self) -> None:
        """Closes connections that were idle for longer than the keep-alive time, as uvicorn does."""
        now = self._loop.time()
        for conn in list(self._open):
            if not conn.busy and now - conn.idle_since > self.config.keep_alive_s:
                conn.close()
        self._loop.call_later(min(1.0, self.config.keep_alive_s / 2), self._sweep)

    # Faults of the whole server

    def _apply(self, rules: list[dict[str, Any]], keep: bool) -> None:
        made = self.faults.set(rules, keep)
        if not keep:
            self._all_clear()
        for rule in made:
            if rule.kind in _SET_OFF and not rule.by_request:
                self._loop.call_later(self.config.scaled(rule.get("after_s", 0.0)), self._due, rule)

    def _due(self, rule: Rule) -> None:
        starts = rule.get("starts")
        if rule in self.faults.rules and (starts is None or self.log.start in starts):
            rule.fired += 1
            self.faults.fired[rule.kind] = self.faults.fired.get(rule.kind, 0) + 1
            self._set_off(rule)

    def _set_off(self, rule: Rule) -> None:
        if rule.kind not in _SET_OFF:
            return
        self.log.write(rule.kind)
        if rule.kind == "die":
            if rule.get("delay_s"):
                self._loop.call_later(self.config.scaled(rule.get("delay_s")), self._die)
            else:
                self._die()
        elif rule.kind == "crash":
            self.crash()
        elif rule.kind == "hang":
            self._hang = rule
            self.engine.pause()
            self._end_after(rule, self._end_hang)
        else:
            self._go_down(lose=rule.kind == "outage")
            self._end_after(rule, self._come_back)

    def _end_after(self, rule: Rule, end: Callable[[], None]) -> None:
        if rule.get("seconds") is not None:
            self._ends.append(self._loop.call_later(self.config.scaled(rule.get("seconds")), end))

    def _all_clear(self) -> None:
        for timer in self._ends:
            timer.cancel()
        self._ends.clear()
        if self._hang is not None:
            self._end_hang()
        if self._down:
            self._come_back()

    def _end_hang(self) -> None:
        self._hang = None
        self.log.write("back")
        self.engine.resume()

    def _go_down(self, lose: bool) -> None:
        self._down = True
        self._close_listener()
        if lose:
            self.generator.ready = False
            self.generator.lose_all()
            self.engine.drop_all()
        for conn in list(self._open):
            if lose:
                conn.reset()
            elif conn.busy:
                conn.last = True
            else:
                conn.close()

    def _come_back(self) -> None:
        self._down = False
        self.log.write("back")
        task = asyncio.ensure_future(self._up_again())
        task.add_done_callback(lambda done: done.result())

    async def _up_again(self) -> None:
        await self._listen()
        if not self.generator.ready:
            await self._warm_up()

    def crash(self) -> None:
        """What a token id out of the vocabulary, or the scheduler's death, does: a hang, then the end."""
        self.log.write("crash")
        self.engine.pause()
        self._loop.call_later(self.config.scaled(self.config.kill_delay_s), self._die)

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    # Endpoints

    def _handle(self, conn: Connection, request: Request) -> None:
        path, key = request.path, self.config.api_key
        locked = key is not None and not path.startswith(("/health", "/sim/"))
        if locked and request.headers.get("authorization") != f"Bearer {key}":
            self._json(conn, {"error": "Unauthorized"}, 401)
            return
        get, post = self._gets.get(path), self._posts.get(path)
        if request.method == "POST" and post is not None:
            post(conn, request)
            if path == "/generate":
                self._max_running = max(self._max_running, self.engine.running)
                self._max_queued = max(self._max_queued, self.engine.queued)
        elif request.method == "GET" and get is not None:
            get(conn)
        elif get is not None or post is not None:
            self._json(conn, {"detail": "Method Not Allowed"}, 405)
        else:
            self._json(conn, {"detail": "Not Found"}, 404)

    def _json(self, conn: Connection, value: object, status: int = 200) -> None:
        conn.respond(status, orjson.dumps(value))

    def load(self) -> info.Load:
        c, e = self.config, self.engine
        accept = self.faults.decayed(c.accept_mean) if c.mtp else 1.0
        seen = e.generated / e.verify_steps if c.mtp and e.verify_steps else None
        return info.Load(e.running, e.queued, e.running_tokens, e.throughput(accept), seen)

    def _health(self, conn: Connection) -> None:
        c = self.config
        status, delay = (200 if self.generator.ready else 503), (c.health_s if self.generator.ready else 0.0)
        rule = self.faults.standing("health")
        if self._hang is not None and self._hang.get("health", 200) == 503:
            status, delay = 503, c.health_timeout_s
        elif rule is not None:
            status, delay = rule.get("status", 503), rule.get("delay_s", 0.0)
        if delay > 0:
            self._loop.call_later(c.scaled(delay), conn.respond, status)
        else:
            conn.respond(status)

    def _ready(self, conn: Connection) -> None:
        conn.respond(200 if self.generator.ready else 503)

    def _server_info(self, conn: Connection) -> None:
        self._json(conn, info.server_info(self.config, self.load(), self.generator.ready))

    def _loads(self, conn: Connection) -> None:
        if self.config.old:
            conn.respond(500, b"Internal Server Error", PLAIN)
        else:
            self._json(conn, info.v1_loads(self.config, self.load()))

    def _metrics(self, conn: Connection) -> None:
        if not self.config.enable_metrics or self.faults.standing("metrics_missing") is not None:
            self._json(conn, {"detail": "Not Found"}, 404)
            return
        text = info.metrics(self.config, self.load(), self.generator.counters)
        conn.stream([text.encode()], "text/plain; version=0.0.4; charset=utf-8")

    def _flush(self, conn: Connection) -> None:
        busy = self.engine.running or self.engine.queued
        conn.respond(400 if busy else 200, FLUSHED, None)

    def _abort(self, conn: Connection, request: Request) -> None:
        value = self._object(conn, request)
        if value is not None:
            conn.respond(200)
            self.generator.abort(str(value.get("rid") or ""), bool(value.get("abort_all")))

    def _tokenize(self, conn: Connection, request: Request) -> None:
        value = self._object(conn, request)
        if value is not None:
            tokens = self.generator.text.encode(str(value.get("prompt", "")))
            self._json(conn, {"tokens": tokens, "count": len(tokens), "max_model_len": self.config.context})

    def _object(self, conn: Connection, request: Request) -> dict[str, Any] | None:
        try:
            value = json.loads(request.body or b"{}")
        except ValueError:
            value = None
        if not isinstance(value, dict):
            self._json(
                conn, {"object": "error", "message": "bad JSON", "type": "Bad Request", "param": None, "code": 400}, 400
            )
            return None
        return value

    def _set_faults(self, conn: Connection, request: Request) -> None:
        value = self._object(conn, request)
        if value is None:
            return
        try:
            self._apply(value.get("rules", []), keep=bool(value.get("keep")))
        except (ValueError, TypeError, AttributeError) as error:
            self._json(conn, {"error": str(error)}, 400)
            return
        self._json(conn, {"rules": len(self.faults.rules)})

    def stats(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(), "start": self.log.start, "ready": self.generator.ready,
            "requests": self.faults.requests,
            "running": self.engine.running, "queued": self.engine.queued, "max_running": self._max_running,
            "max_queued": self._max_queued, "in_flight": len(self.generator.in_flight), "connections": len(self._open),
            "generated": self.engine.generated, "verify_steps": self.engine.verify_steps, "fired": self.faults.fired,
            "outcomes": self.log.outcomes, "child": self._child.pid if self._child is not None else None,
        }  # fmt: skip
