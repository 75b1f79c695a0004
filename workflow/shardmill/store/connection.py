"""A boto3 client tuned for long runs against any S3-compatible store."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import boto3
from botocore import exceptions as boto
from botocore.config import Config

from shardmill.errors import SettingsError
from shardmill.settings import S3
from shardmill.store.faults import Target, translate

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

# botocore waits up to 20 s before each of them: a store that says SlowDown for two minutes is waited for.
_ATTEMPTS = 12
# A person waits for a plan: an unreachable store is told of within seconds.
_HASTY_ATTEMPTS = 4


def connect(s3: S3, bucket: str, hasty: bool = False) -> S3Client:
    """A client for `bucket`. `hasty`: one that gives up within seconds. Raises SettingsError, StoreError."""
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
        return session.client("s3", endpoint_url=s3.endpoint_url, region_name=s3.region, config=config)
    except (boto.BotoCoreError, ValueError) as error:
        raise translate(error, target) from None
