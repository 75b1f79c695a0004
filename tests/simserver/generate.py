"""One /generate request on its way through the server: refusal, work, answer, and the fault that meets it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import orjson

from .answers import Answer, answer, prompt_hash
from .bodies import (
    Generate,
    Refused,
    Sequence1,
    Text,
    cut_at_string,
    message_error,
    meta_info,
    object_error,
    parse_generate,
    unknown_field,
)
from .config import SimConfig
from .engine import Engine, Job
from .eventlog import EventLog
from .faults import ANSWER_KINDS, REFUSAL_KINDS, SERVER_KINDS, Faults, Rule
from .http import Connection, Request, head
from .spoil import html, spoil

PLAIN = "text/plain; charset=utf-8"
QUEUE_FULL = object_error(503, "The request queue is full.")
_BROKEN = {
    "reset_mid",
    "half_body",
    "half_chunked",
    "cut_json",
    "html_200",
    "text_200",
    "empty_200",
    "list_200",
    "error_200",
}
_STREAM_LATER = (
    "weight_versions", "e2e_latency", "request_received_ts", "first_token_latency", "api_server_dispatch_finish_ts",
    "request_finished_ts", "decode_throughput", "response_sent_to_client_ts",
)  # fmt: skip


class Generator:
    """`set_off(rule)` lets the server act on a fault of the whole of it; `crash()` is for a bad id in a prompt."""

    def __init__(
        self,
        config: SimConfig,
        engine: Engine,
        faults: Faults,
        log: EventLog,
        set_off: Callable[[Rule], None],
        crash: Callable[[], None],
    ) -> None:
        self.config, self.engine, self.faults, self.log = config, engine, faults, log
        self.text = Text(config)
        self.ready = False
        self._set_off, self._crash = set_off, crash
        self.in_flight: dict[str, Pending] = {}
        self.counters = {
            "requests": 0.0,
            "aborted": 0.0,
            "prompt_tokens": 0.0,
            "generation_tokens": 0.0,
            "latency_sum": 0.0,
        }

    def handle(self, conn: Connection, request: Request) -> None:
        try:
            parsed = parse_generate(self.config, request.body, self.text.encode)
            hashes = [prompt_hash(seq.ids) for seq in parsed.sequences]
        except Refused as refused:
            self.log.write("refused", status=refused.status)
            send_refusal(conn, refused)
            return
        except (TypeError, ValueError, OverflowError) as error:
            self.log.write("refused", status=400)
            send_refusal(conn, Refused(400, object_error(400, f"1 validation error:\n  {error}", "Bad Request")))
            return
        rule = self.faults.for_request(hashes[0])
        pending = Pending(self, conn, parsed, hashes[0], rule, self.faults.requests)
        conn.gone = pending.client_gone
        if rule is not None and rule.kind in SERVER_KINDS:
            self._set_off(rule)
        if rule is not None and rule.kind in REFUSAL_KINDS:
            pending.refuse_by(rule)
            return
        for seq in parsed.sequences:
            if seq.rid in self.in_flight:
                pending.refuse(400, message_error(f"Duplicate request ID detected: {seq.rid}"))
                return
        if self.engine.full():
            pending.refuse(503, QUEUE_FULL)
            return
        if any(min(seq.ids) < 0 or max(seq.ids) >= self.config.vocab_size for seq in parsed.sequences):
            self._crash()
        pending.start()

    def abort(self, rid: str, everything: bool) -> None:
        """By prefix, as the scheduler does it."""
        for name in [name for name in self.in_flight if everything or (rid and name.startswith(rid))]:
            pending = self.in_flight.get(name)
            if pending is not None:
                self.counters["aborted"] += 1
                pending.abort()

    def lose_all(self) -> None:
        for pending in set(self.in_flight.values()):
            pending.finish("lost", 0)


def send_refusal(conn: Connection, refused: Refused) -> None:
    if isinstance(refused.body, str):
        conn.respond(refused.status, refused.body.encode(), PLAIN)
    else:
        conn.respond(refused.status, orjson.dumps(refused.body, default=repr))


class Pending:
    """A request that has been read and not yet answered."""

    def __init__(
        self, owner: Generator, conn: Connection, parsed: Generate, phash: str, rule: Rule | None, n: int
    ) -> None:
        self._owner, self._conn, self._parsed = owner, conn, parsed
        self._rule, self._n, self._phash = rule, n, phash
        self._rid = parsed.sequences[0].rid
        self._at = time.time()
        self._jobs: list[Job] = []
        self._answers: list[tuple[Answer, str | None]] = []
        self._left = 0
        self._done = False
        self._status = 0
        owner.log.write(
            "received", n=n, rid=self._rid, prompt=phash, prompt_tokens=len(parsed.sequences[0].ids),
            max_new_tokens=parsed.sequences[0].limit, ready=owner.ready, fault=self._fault,
        )  # fmt: skip

    @property
    def _fault(self) -> str | None:
        return self._rule.kind if self._rule is not None else None

    def finish(self, outcome: str, tokens: int) -> None:
        """Forgets the request, and logs how it ended."""
        if self._done:
            return
        self._done = True
        owner = self._owner
        for seq in self._parsed.sequences:
            if owner.in_flight.get(seq.rid) is self:
                del owner.in_flight[seq.rid]
        owner.log.write(
            "done", t0=self._at, n=self._n, rid=self._rid, prompt=self._phash, status=self._status, tokens=tokens,
            outcome=outcome, fault=self._fault,
        )  # fmt: skip

    def client_gone(self) -> None:
        """A disconnect aborts the request and frees its slot."""
        if not self._done:
            self._owner.counters["aborted"] += 1
            self.finish("gone", 0)
        for job in self._jobs:
            self._owner.engine.abort(job)

    def abort(self) -> None:
        for job in self._jobs:
            self._owner.engine.abort(job)

    def refuse(
        self, status: int, body: dict[str, Any] | bytes, content_type: str = "application/json", extra: str = ""
    ) -> None:
        self._status = status
        self.finish("refused", 0)
        self._conn.respond(status, body if isinstance(body, bytes) else orjson.dumps(body), content_type, extra)

    def _register(self) -> None:
        for seq in self._parsed.sequences:
            self._owner.in_flight[seq.rid] = self

    def refuse_by(self, rule: Rule) -> None:
        kind, config = rule.kind, self._owner.config
        if kind == "hang_request":
            self._register()
            return
        if kind in ("reset_before", "close_before"):
            self.finish("broken", 0)
            if kind == "reset_before":
                self._conn.reset()
            else:
                self._conn.close()
        elif kind == "error_500_text":
            self.refuse(500, b"Internal Server Error", PLAIN)
        elif kind in ("html_502", "html_504"):
            status = int(kind[-3:])
            self.refuse(status, html(status, "Bad Gateway" if status == 502 else "Gateway Time-out"), "text/html")
        elif kind == "rate_limited":
            retry = f"retry-after: {rule.get('retry_after_s', 1)}\r\n"
            self.refuse(429, object_error(429, "Too many requests", "RateLimitError"), extra=retry)
        elif kind == "abort_queued":
            job = Job(len(self._parsed.sequences[0].ids), 0, 1.0, lambda _: None, queued_abort=True)
            job.queued_at = job.started_at = asyncio.get_running_loop().time()
            finish = {"type": "abort", "message": "Abort in waiting queue"}
            meta = meta_info(config, job, self._parsed.sequences[0], finish, job.queued_at)
            self.refuse(200, {"text": "", "output_ids": [], "meta_info": meta})
        else:
            status, body = _REFUSALS[kind]
            self.refuse(status, body)

    def start(self) -> None:
        owner, config = self._owner, self._owner.config
        self._register()
        for seq in self._parsed.sequences:
            got = answer(config, seq.ids, seq.sampling, seq.limit, seq.sample)
            matched: str | None = None
            stops = seq.sampling.get("stop")
            if stops:
                listed = [stops] if isinstance(stops, str) else stops
                cut = cut_at_string(owner.text, got.ids, listed, bool(seq.sampling.get("skip_special_tokens", True)))
                if cut is not None:
                    got, matched = Answer(got.ids[: cut[0]], None, got.accept_length), cut[1]
            accept = max(1.0, owner.faults.decayed(got.accept_length))
            self._answers.append((got, matched))
            self._jobs.append(Job(len(seq.ids), len(got.ids), accept, self._job_done))
        self._left = len(self._jobs)
        for job in list(self._jobs):
            owner.engine.submit(job)

    def _job_done(self, job: Job) -> None:
        self._left -= 1
        if self._left or self._done:
            return
        if self._rule is not None and self._rule.kind == "slow":
            late = self._owner.config.scaled(self._rule.get("seconds", 60.0))
            asyncio.get_running_loop().call_later(late, self._answer)
        else:
            self._answer()

    def _body(self, seq: Sequence1, job: Job, got: Answer, matched: str | None) -> dict[str, Any]:
        finish: dict[str, Any]
        ids = got.ids
        if job.state == "aborted":
            ids = ids[: job.produced]
            finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            if job.queued_abort:
                finish = {"type": "abort", "message": "Abort in waiting queue"}
        elif matched is not None or got.matched is not None:
            finish = {"type": "stop", "matched": got.matched if matched is None else matched}
        else:
            finish = {"type": "length", "length": seq.limit}
        keep_stop = bool(seq.sampling.get("no_stop_trim"))
        shown = ids[:-1] if finish["type"] == "stop" and matched is None and not keep_stop else ids
        text = self._owner.text.decode(shown, bool(seq.sampling.get("skip_special_tokens", True)))
        if matched is not None and not keep_stop:
            text = text[: text.find(matched)]
        now = asyncio.get_running_loop().time()
        body = {"text": text, "output_ids": ids, "meta_info": meta_info(self._owner.config, job, seq, finish, now)}
        if self._parsed.return_prompt_ids:
            body["prompt_token_ids"] = seq.ids
        return body

    def _answer(self) -> None:
        if self._done:
            return
        owner, counters = self._owner, self._owner.counters
        bodies = []
        for seq, job, (got, matched) in zip(self._parsed.sequences, self._jobs, self._answers, strict=True):
            bodies.append(self._body(seq, job, got, matched))
            counters["requests"] += 1
            counters["prompt_tokens"] += job.prompt_tokens
            counters["generation_tokens"] += job.produced
        counters["latency_sum"] += (time.time() - self._at) * owner.config.time_scale
        tokens = sum(job.produced for job in self._jobs)
        aborted = any(job.state == "aborted" for job in self._jobs)
        rule = self._rule if not aborted and self._fault in ANSWER_KINDS else None
        spoilt = False
        if rule is not None and rule.kind not in _BROKEN:
            spoilt = spoil(owner.config, rule, bodies[0], self._parsed.sequences[0]) and rule.kind not in (
                "slow",
                "stale_close",
            )
        value = bodies[0] if self._parsed.single else bodies
        self._status = 200
        if rule is not None and rule.kind in _BROKEN:
            self._send_broken(rule.kind, orjson.dumps(value))
            return
        self.finish("aborted" if aborted else "spoilt" if spoilt else "answered", tokens)
        if self._parsed.stream:
            self._conn.stream(self._events(bodies[0]), "text/event-stream; charset=utf-8")
        elif rule is not None and rule.kind == "stale_close":
            whole = orjson.dumps(value)
            self._conn.close(head(200, len(whole)) + whole)
        else:
            self._conn.respond(200, orjson.dumps(value))

    def _events(self, body: dict[str, Any]) -> list[bytes]:
        """Every chunk of a streamed answer, cumulative. All are sent at its end: streaming has no timing here."""
        events = []
        ids = body["output_ids"]
        for n in range(1, len(ids)):
            meta = {k: v for k, v in body["meta_info"].items() if k not in _STREAM_LATER}
            meta |= {"finish_reason": None, "completion_tokens": n}
            if n == 1:  # the only chunk but the last with a time in it
                meta["response_sent_to_client_ts"] = body["meta_info"]["response_sent_to_client_ts"]
            text = self._owner.text.decode(ids[:n], True)
            events.append({"text": text, "output_ids": ids[:n], "meta_info": meta})
        return [b"data: " + orjson.dumps(event) + b"\n\n" for event in [*events, body]] + [b"data: [DONE]\n\n"]

    def _send_broken(self, kind: str, whole: bytes) -> None:
        conn, half = self._conn, whole[: len(whole) // 2]
        self.finish("broken", 0)
        if kind == "reset_mid":
            conn.reset(head(200, len(whole)) + half)
        elif kind == "half_body":
            conn.close(head(200, len(whole)) + half)
        elif kind == "half_chunked":
            conn.close(head(200, None) + b"%x\r\n%s\r\n" % (len(half), half))
        elif kind == "cut_json":
            conn.respond(200, half)
        elif kind == "html_200":
            conn.respond(200, html(200, "Please log in"), "text/html")
        elif kind == "text_200":
            conn.respond(200, b"upstream connect error or disconnect/reset before headers", PLAIN)
        elif kind == "empty_200":
            conn.respond(200)
        elif kind == "list_200":
            conn.respond(200, b"[]")
        else:
            conn.respond(200, orjson.dumps(object_error(500, "Something went wrong.", "InternalServerError")))


_REFUSALS: dict[str, tuple[int, dict[str, Any]]] = {
    "error_500": (500, object_error(500, "Out of memory. Please try to reduce the number of concurrent requests.")),
    "queue_full": (503, QUEUE_FULL),
    "waiting_timeout": (503, object_error(503, "Request waiting timeout reached.")),
    "error_400": (
        400,
        message_error("The input (9000 tokens) is longer than the model's context length (8192 tokens)."),
    ),
    "error_400_string": (400, unknown_field("max_tokens")),
    "error_400_object": (
        400,
        object_error(400, "1 validation error:\n  {'type': 'missing', 'loc': ('body',)}", "Bad Request"),
    ),
    "unauthorized": (401, {"error": "Unauthorized"}),
    "forbidden": (403, {"error": "Forbidden"}),
    "not_found": (404, {"detail": "Not Found"}),
}
