"""What a model server is to the rest of the program: a request, an answer, and the closed list of what can go wrong.

An engine speaks one server's HTTP dialect (SGLang, llama.cpp). It turns every answer into an `Answer`, or into one of
three errors that say whose fault it is (DESIGN.md, "Whose fault"):

- `ServerFault`: the server's. The same request is sent again, elsewhere where there is another server.
- `PromptRefused`: this prompt's own. No server would take it.
- `shardmill.errors.SetupFault`: the set-up's. No request can succeed until a person changes something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # aiohttp costs a fifth of a second, and the command line needs only the names here
    import aiohttp


class Fault(StrEnum):
    """What a server can do wrong. Each is tried again; none is ever written down as a prompt's fault."""

    REFUSED = "refused"  # no connection: nothing listens, or the host can't be reached
    RESET = "reset"  # the connection broke before any part of the answer came
    HALF_SENT = "half_sent"  # the connection broke inside the answer
    TIMEOUT = "timeout"  # no whole answer within generate.request_timeout_s
    SERVER_ERROR = "server_error"  # a 5xx other than a full queue, or another status that blames nobody
    QUEUE_FULL = "queue_full"  # 429, or a 503 that says that the queue is full or the wait was too long
    ABORTED = "aborted"  # 200 with finish_reason abort: someone or something aborted it at the server
    NAN = "nan"  # SGLang's `matched: "NaN happened"`: the logits were NaN and the last id is made up
    NOT_JSON = "not_json"  # 200 with something else than the JSON object asked for (a proxy's page)
    ERROR_BODY = "error_body"  # 200 with an error in the body
    NO_IDS = "no_ids"  # 200 without the answer's token ids
    BAD_IDS = "bad_ids"  # ids outside the model's vocabulary, or not integers
    COUNTS_DISAGREE = "counts_disagree"  # token counts that contradict the ids sent or received, or are missing
    WRONG_ID = "wrong_id"  # an answer to another request
    BAD_FINISH = "bad_finish"  # a finish reason that is missing, unknown, or contradicts the ids


class ServerFault(Exception):
    """A server's fault; `detail` is one line for logs. Try again, on another server where there is one."""

    def __init__(self, fault: Fault, detail: str = "") -> None:
        super().__init__(f"{fault}: {detail}" if detail else str(fault))
        self.fault = fault
        self.detail = detail


class Refusal(StrEnum):
    """Why a server refuses a prompt."""

    TOO_LONG = "too_long"  # the prompt alone is longer than the server's context
    NO_ROOM = "no_room"  # prompt and max_new_tokens together are: fewer new tokens may still fit
    OTHER = "other"  # a 400 in words that nobody here knows


class PromptRefused(Exception):
    """A 400 that is about this prompt: no server with the same model would take it. `detail` is the server's words."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(detail)
        self.refusal = refusal
        self.detail = detail


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Everything that decides how ids are drawn. Sent in full, since servers' defaults differ."""

    temperature: float  # 0 is greedy
    top_p: float
    top_k: int  # -1 takes all
    min_p: float
    stop_token_ids: tuple[int, ...]  # all ids that end an answer: the model's own and the config's, sorted
    seed: int | None = None  # 0 <= seed < 2^31; null leaves it to the server


@dataclass(frozen=True, slots=True)
class Request:
    request_id: str  # new for every attempt, also after a timeout
    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as the server gave it, well-formed but not yet audited (generate.audit)."""

    output_ids: list[int]  # every id that the model produced, the matched stop id included
    finish: str  # 'stop' | 'length'
    matched: int | str | None  # what stopped it, where the server says so
    prompt_tokens: int
    completion_tokens: int
    accept_length: float | None  # mean tokens a verification step (speculative decoding); None where not given
    latency_s: float  # from sending the request to the end of the answer, on the client's clock


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says about itself. None where it doesn't say."""

    model_name: str | None
    vocab_size: int | None
    context: int | None  # tokens of prompt and answer together that one request may have
    running_cap: int | None  # requests that it really runs at once
    requested_cap: int | None  # requests at once that it was started with
    cap_reason: str | None  # why running_cap is lower than requested_cap, and the setting that lifts it
    version: str | None


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What a server is doing at the moment. None where it doesn't say."""

    running: int | None  # requests being generated
    queued: int | None  # requests waiting at the server
    kv_use: float | None  # share of the KV cache in use, 0 to 1
    mamba_use: float | None  # share of the Mamba state cache in use, 0 to 1
    tokens_per_s: float | None  # generation, over all requests
    accept_length: float | None  # recent or cumulative, as the server has it


class Engine(Protocol):
    """One server dialect. Stateless: the URL names the server, the session is the caller's.

    Every method raises ServerFault for a server's fault and SetupFault for 401, 403, 404 and unknown fields. Times are
    in seconds. `url` is `http://host:port` without a trailing slash.
    """

    @property
    def name(self) -> str:
        """As in settings: 'sglang' | 'llamacpp'."""
        ...

    async def generate(self, session: aiohttp.ClientSession, url: str, request: Request, timeout_s: float) -> Answer:
        """One request, not streamed. Raises PromptRefused for a 400 that is about this prompt.

        When the timeout strikes (ServerFault TIMEOUT) or the task is cancelled the connection is closed; `abort` it
        then, before the prompt is sent again.
        """
        ...

    async def abort(self, session: aiohttp.ClientSession, url: str, request_id: str) -> None:
        """Asks the server to drop a request; waits a few seconds at most and never raises for a server's fault."""
        ...

    async def health(self, session: aiohttp.ClientSession, url: str, timeout_s: float = 25.0) -> bool:
        """Whether the server says that it is well. Never raises for a server's fault."""
        ...

    async def info(self, session: aiohttp.ClientSession, url: str, timeout_s: float = 10.0) -> ServerInfo: ...

    async def load(self, session: aiohttp.ClientSession, url: str, timeout_s: float = 10.0) -> ServerLoad:
        """Fields are None where the server's metrics are off."""
        ...

    async def probe(
        self,
        session: aiohttp.ClientSession,
        url: str,
        prompt_ids: Sequence[int] = (0, 1, 2),
        timeout_s: float = 60.0,
    ) -> Answer:
        """A real, greedy generation of two tokens: what tells a hung server from one that is well."""
        ...
