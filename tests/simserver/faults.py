"""The rules by which a simulated server misbehaves.

A rule is a JSON object: `{"kind": …, conditions…, parameters…}`. All conditions must hold; without any, it always does.

    p         probability of each request          every     every n-th request
    at        request numbers, from 1, in this     times     at most so often
              server process                       prompts   prompt hashes (answers.prompt_hash)
    after_s   not before, since the rule was set   until_s   not after
    starts    start numbers of this server, from 1 (needs --log, whose lines count the starts)
    sticky    with p: by the prompt instead of by the request, so that a prompt meets it on every attempt

The first rule that matches makes the fault of a request. Rules of the kinds in SERVER_KINDS act on the whole server for
`seconds` (default: for ever): at `after_s`, or when a request matches their conditions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .answers import unit

# Asked for at start only.
START_KINDS = {
    "start_slow": "loads for `seconds` more",
    "start_fail": "exits with `code` (1) after `seconds` (0), never having listened",
    "start_hang": "never listens",
    "ignore_sigterm": "does not leave on SIGTERM (as 0.5.11 after rejected requests)",
}
SERVER_KINDS = {
    "refuse": "the listener is closed; requests in flight go on",
    "outage": "the listener is closed, every connection reset, every request lost; then it warms up again",
    "hang": "nothing is generated; /health answers `health` (200 or 503, the latter after health_timeout_s)",
    "die": "SIGKILLs itself `delay_s` (0) after the request arrived",
    "crash": "as a bad token id does: hangs for kill_delay_s, resets everything, then dies",
    "health": "/health answers `status` (503) after `delay_s` (0)",
    "metrics_missing": "/metrics is 404",
    "accept_decay": "the accept length falls to 1 by half every `half_s`, or every `half_requests` requests",
}
# Before any work is done.
REFUSAL_KINDS = {
    "reset_before": "connection reset",
    "close_before": "connection closed without an answer",
    "hang_request": "never answered; the connection stays open",
    "error_500": "out of memory",
    "error_500_text": "500 as text/plain",
    "queue_full": "503, the request queue is full",
    "waiting_timeout": "503, request waiting timeout reached",
    "rate_limited": "429 with Retry-After",
    "error_400": "400 of the prompt-too-long shape",
    "error_400_string": "400 whose error is a string: an unknown field",
    "error_400_object": "400 of the validation shape",
    "unauthorized": "401",
    "forbidden": "403",
    "not_found": "404",
    "html_502": "a proxy's HTML with 502",
    "html_504": "a proxy's HTML with 504",
    "abort_queued": "200, aborted in the waiting queue: no prompt_tokens",
}
# After the work: the answer is spoilt, or does not arrive.
ANSWER_KINDS = {
    "reset_mid": "half of the body, then a reset",
    "half_body": "half of the body, then an orderly close",
    "half_chunked": "a chunked answer that ends early",
    "cut_json": "a whole answer with half the JSON in it",
    "stale_close": "a right answer, then a close without having said so",
    "slow": "arrives `seconds` late",
    "html_200": "a proxy's HTML with 200",
    "text_200": "text that is not JSON",
    "empty_200": "no body",
    "list_200": "JSON of another shape: a list",
    "error_200": "an error object with 200",
    "abort": "200, aborted while running",
    "nan": "stopped, matched: NaN happened",
    "junk_after_eos": "`n` (3) more ids after the stop id, finish_reason length; not for an answer that did not stop",
    "zero_loop": "id 0 up to the limit, accept length 1",
    "cycle_loop": "a cycle of `period` (4) ids up to the limit",
    "empty_output": "output_ids [] with stop",
    "missing_output_ids": "no output_ids",
    "null_output_ids": "output_ids null",
    "bad_type_ids": "output_ids as strings",
    "nested_ids": "output_ids as a list of lists",
    "no_meta": "no meta_info",
    "null_finish": "finish_reason null",
    "unknown_finish": "a finish_reason.type that nobody knows",
    "wrong_counts": "completion_tokens is not the number of output_ids",
    "wrong_prompt_tokens": "prompt_tokens is not the number of input ids",
    "out_of_range": "an id of vocab_size or more in the answer",
    "negative_id": "a negative id in the answer",
    "missing_stop": "finish_reason stop, but the stop id is not in output_ids",
    "wrong_id": "meta_info.id is another request's",
    "spec_missing": "no spec_* fields",
    "spec_null": "spec_* fields null",
}
KINDS = {**START_KINDS, **SERVER_KINDS, **REFUSAL_KINDS, **ANSWER_KINDS}
CONDITIONS = {"p", "at", "every", "times", "prompts", "after_s", "until_s", "starts", "sticky"}
PARAMETERS = {
    "seconds", "code", "health", "delay_s", "status", "half_s", "half_requests", "n", "period", "retry_after_s",
}  # fmt: skip
_BY_REQUEST = {"p", "at", "every", "prompts", "sticky"}


@dataclass(eq=False)
class Rule:
    kind: str
    values: Mapping[str, Any]
    number: int
    set_at: float
    set_at_request: int
    fired: int = 0

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    @property
    def by_request(self) -> bool:
        return bool(_BY_REQUEST & set(self.values))


class Faults:
    """The rules in force. `clock` gives simulated seconds; `start` is this process's start number, from 1."""

    def __init__(self, seed: int, start: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._seed = seed
        self._start = start
        self._clock = clock
        self._made = 0
        self.requests = 0
        self.rules: list[Rule] = []
        self.fired: dict[str, int] = {}

    def set(self, rules: Sequence[Mapping[str, Any]], keep: bool = False) -> list[Rule]:
        """Replaces (or with `keep` extends) the rules; returns the new ones. ValueError for one that is not known."""
        made = []
        for values in rules:
            kind = values.get("kind")
            if kind not in KINDS:
                raise ValueError(f"fault kind {kind!r}: one of {', '.join(KINDS)}")
            unknown = set(values) - CONDITIONS - PARAMETERS - {"kind"}
            if unknown:
                raise ValueError(f"fault {kind}: unknown {', '.join(sorted(unknown))}")
            self._made += 1
            made.append(Rule(kind, values, self._made, self._clock(), self.requests))
        self.rules = [*self.rules, *made] if keep else made
        return made

    def _open(self, rule: Rule) -> bool:
        """The conditions that do not depend on a request."""
        age = self._clock() - rule.set_at
        starts = rule.get("starts")
        return (
            age >= rule.get("after_s", 0.0)
            and age <= rule.get("until_s", float("inf"))
            and rule.fired < rule.get("times", float("inf"))
            and (starts is None or self._start in starts)
        )

    def _matches(self, rule: Rule, phash: str) -> bool:
        at, every, prompts = rule.get("at"), rule.get("every"), rule.get("prompts")
        p = rule.get("p", 1.0)
        by = phash if rule.get("sticky") else self.requests
        return (
            (at is None or self.requests in at)
            and (every is None or self.requests % every == 0)
            and (prompts is None or phash in prompts)
            and (p >= 1.0 or unit(self._seed, rule.number, self._start, by) < p)
        )

    def _fire(self, rule: Rule) -> Rule:
        rule.fired += 1
        self.fired[rule.kind] = self.fired.get(rule.kind, 0) + 1
        return rule

    def for_request(self, phash: str) -> Rule | None:
        """Counts a request and returns its fault: of a kind of its own, or one of the server that it sets off."""
        self.requests += 1
        for rule in self.rules:
            if rule.kind in START_KINDS or (rule.kind in SERVER_KINDS and not rule.by_request):
                continue
            if self._open(rule) and self._matches(rule, phash):
                return self._fire(rule)
        return None

    def at_start(self, kind: str) -> Rule | None:
        for rule in self.rules:
            if rule.kind == kind and self._open(rule):
                p, every = rule.get("p", 1.0), rule.get("every")
                drawn = p >= 1.0 or unit(self._seed, rule.number, self._start, "start") < p
                if drawn and (every is None or self._start % every == 0):
                    return self._fire(rule)
        return None

    def standing(self, kind: str) -> Rule | None:
        """A rule of a server kind that is in force now without having to be set off (health, metrics, decay)."""
        for rule in self.rules:
            if rule.kind != kind or not self._open(rule):
                continue
            seconds = rule.get("seconds")
            if seconds is None or self._clock() - rule.set_at <= rule.get("after_s", 0.0) + seconds:
                return rule
        return None

    def decayed(self, accept_length: float) -> float:
        """The accept length with the decay in force applied: towards 1, which is no speculation."""
        rule = self.standing("accept_decay")
        if rule is None:
            return accept_length
        halves = 0.0
        if rule.get("half_s"):
            halves += (self._clock() - rule.set_at - rule.get("after_s", 0.0)) / rule.get("half_s")
        if rule.get("half_requests"):
            halves += (self.requests - rule.set_at_request) / rule.get("half_requests")
        return float(1.0 + (accept_length - 1.0) * 0.5**halves)
