"""A boto3 client tuned for long runs against any S3-compatible store."""

from __future__ import annotations

import logging
import os
import random
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
from botocore import exceptions as boto
from botocore.config import Config

from shardmill.errors import SettingsError
from shardmill.settings import S3
from shardmill.store.faults import Target, is_away, translate
from shardmill.store.patience import patience_s

if TYPE_CHECKING:
    from botocore.model import OperationModel
    from mypy_boto3_s3 import S3Client

# With waits from 0.05 s, doubled up to 20 s, as long as the client's allowance of retries lasts; see patience.py.
_ATTEMPTS = 12
# A person waits for a plan: an unreachable store is told of within seconds.
_HASTY_ATTEMPTS = 4
_LONGEST_WAIT_S = 20.0

log = logging.getLogger(__name__)


def connect(s3: S3, bucket: str, hasty: bool = False) -> S3Client:
    """A client for `bucket`. `hasty`: one that gives up within seconds, and waits for no store that is away.

    Raises SettingsError, StoreError.
    """
    logging.getLogger("botocore").setLevel(logging.WARNING)
    endpoint = s3.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint and (urlsplit(endpoint).hostname or "").startswith(f"{bucket}."):
        raise SettingsError(
            f"Setting s3.endpoint_url contains the bucket ({bucket}): name the store's host alone, the bucket is in "
            f"s3.bucket."
        )
    style = s3.addressing_style
    if style == "auto" and endpoint:
        style = "path"
    config = Config(
        retries={"mode": "adaptive", "total_max_attempts": _HASTY_ATTEMPTS if hasty else _ATTEMPTS},
        max_pool_connections=32,
        connect_timeout=10,
        read_timeout=60,
        tcp_keepalive=True,
        s3={"addressing_style": style},  # type: ignore[arg-type]
        # Many stores refuse the CRC32 that boto3 adds by default, or keep it as part of the body.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    target = Target("opening", bucket, "", urlsplit(endpoint).netloc if endpoint else "AWS", s3.region or "(default)")
    try:
        session = boto3.session.Session()
        client = session.client("s3", endpoint_url=s3.endpoint_url, region_name=s3.region, config=config)
    except (boto.BotoCoreError, ValueError) as error:
        raise translate(error, target) from None
    if not hasty:
        # botocore takes the first answer of all handlers, and its own come first: ours counts where they give up.
        client.meta.events.register_last("needs-retry.s3", _wait_for_the_store)  # type: ignore[arg-type]
    return client


def _wait_for_the_store(
    response: tuple[Any, dict[str, Any]] | None,
    caught_exception: Exception | None,
    request_dict: dict[str, Any],
    operation: OperationModel,
    **_: Any,
) -> float | None:
    """Seconds to wait before a request to a store that is away is sent again; None for any other answer."""
    context = request_dict["context"]
    now = time.monotonic()
    until = context.setdefault("shardmill_began", now) + patience_s()
    if not is_away(response[1] if response is not None else None, caught_exception) or now >= until:
        return None
    waits = context["shardmill_waits"] = context.get("shardmill_waits", 0) + 1
    if waits == 1:
        log.warning(
            "The store at %s is away (%s); it is waited for, up to %.0f s.",
            urlsplit(request_dict["url"]).netloc,
            operation.name,
            until - now,
        )
    wait: float = min(until - now, random.uniform(0.5, 1.0) * min(_LONGEST_WAIT_S, 2.0 ** (waits - 1)))
    return wait
