"""What went wrong at the store, as one plain sentence that names bucket, key and host and says what to do.

Nothing that a server wrote is repeated except its error code: a store's message may hold a signature or a key's id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from shardmill.errors import Refused, StoreError

# S3 refuses a request whose clock is further off than this.
_SKEW_S = 15 * 60

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_BAD_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidClientTokenId"}
_OTHER_REGION = {
    "PermanentRedirect",
    "TemporaryRedirect",
    "Redirect",
    "301",
    "307",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}
_BUSY = {"SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
_FAILING = {429, 500, 502, 503, 504}
# 403 for other reasons than that these credentials lack a right.
_NOT_OUR_RIGHTS = {"RequestTimeTooSkewed", *_EXPIRED, *_BAD_KEYS}
_ABSENT = {"NoSuchKey", "NotFound", "404"}

OFFLINE_HINT = "or plan and build from local files alone with s3.offline: true"


@dataclass(frozen=True, slots=True)
class Target:
    """What a request was about."""

    operation: str
    bucket: str
    key: str
    host: str
    region: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


def code_of(error: boto.ClientError) -> str:
    """The error's code. A HEAD's error has no body, and its code is the bare status, such as "404"."""
    code = str(error.response.get("Error", {}).get("Code") or status_of(error))
    return code if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", code) else str(status_of(error))


def status_of(error: boto.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_ended(error: boto.ClientError) -> bool:
    """The multipart upload is not there any more: it was completed or aborted."""
    return code_of(error) == "NoSuchUpload"


def is_absent(error: boto.ClientError) -> bool:
    """The key does not exist (and the bucket, as far as the answer says, does)."""
    return status_of(error) == 404 and code_of(error) in _ABSENT


def is_away(answer: Mapping[str, Any] | None, error: Exception | None) -> bool:
    """Whether the same request may be answered well a while later: the store can't be reached, fails, or is busy."""
    if error is not None:
        unmendable = (boto.SSLError, boto.ProxyConnectionError)
        return isinstance(error, boto.HTTPClientError | boto.ConnectionError) and not isinstance(error, unmendable)
    status = (answer or {}).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status in _FAILING or (answer or {}).get("Error", {}).get("Code") in _BUSY


def translate(error: Exception, target: Target) -> StoreError:
    """The StoreError of a botocore error; any other error is described by its type alone."""
    if isinstance(error, boto.ClientError) and status_of(error) in (401, 403) and code_of(error) not in _NOT_OUR_RIGHTS:
        return Refused(_sentence(error, target))
    return StoreError(_sentence(error, target))


def _sentence(error: Exception, target: Target) -> str:
    if isinstance(error, boto.ClientError):
        return _answer(error, target)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return (
            f"There are no credentials for the bucket {target.bucket} at {target.host}: give them where boto3 looks "
            f"(AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the machine's role), {OFFLINE_HINT}."
        )
    if isinstance(error, boto.ProfileNotFound):
        profile = error.kwargs.get("profile")
        return f"AWS_PROFILE names {profile}, and there is no such profile in ~/.aws: mend one of the two."
    if isinstance(error, boto.CredentialRetrievalError | boto.TokenRetrievalError | boto.SSOError):
        return (
            f"The credentials for the bucket {target.bucket} at {target.host} could not be fetched "
            f"({type(error).__name__}): log in again, or mend the profile that AWS_PROFILE names."
        )
    if isinstance(error, boto.SSLError):
        return (
            f"The store at {_host_of(error, target)} has no certificate that this machine trusts "
            f"({target.operation} {target.url}): mend s3.endpoint_url, or name the authority in AWS_CA_BUNDLE."
        )
    if isinstance(error, boto.HTTPClientError | boto.ConnectionError):
        kind = "does not answer in time" if "Timeout" in type(error).__name__ else "cannot be reached"
        return (
            f"The store at {_host_of(error, target)} {kind} ({type(error).__name__} at {target.operation} of "
            f"{target.url}): check the network, s3.endpoint_url and s3.addressing_style, {OFFLINE_HINT}."
        )
    if isinstance(error, boto.ParamValidationError | boto.InvalidRegionError):
        return f"Bucket or region is no valid name ({target.url}, region {target.region}): mend s3 in the config."
    if isinstance(error, ResponseParserError):
        return str(not_a_store(target))
    return (
        f"{target.operation} of {target.url} at {target.host} failed with {type(error).__name__}: check s3 in the "
        f"config, and AWS_PROFILE and ~/.aws if you use them."
    )


def not_a_store(target: Target) -> StoreError:
    """For an answer that is no S3 answer, such as a web page."""
    return StoreError(
        f"{target.host} does not answer as an S3 store does ({target.operation} of {target.url}): check "
        f"s3.endpoint_url."
    )


def _answer(error: boto.ClientError, target: Target) -> str:
    code, status = code_of(error), status_of(error)
    said = f"{status} {code}" if code != str(status) else code
    headers = _headers(error)
    offset = clock_offset_s(headers)
    if code == "RequestTimeTooSkewed" or (status == 403 and offset is not None and abs(offset) > _SKEW_S):
        return (
            f"The store at {target.host} refuses {target.url} because of this machine's clock ({said}), which is "
            f"{_off(offset)}: set the clock (chronyd, ntpd), then run again."
        )
    if code in _EXPIRED:
        return (
            f"The credentials for the bucket {target.bucket} at {target.host} have expired ({said}): renew them and "
            f"run again; what is finished is kept."
        )
    if code in _BAD_KEYS:
        return (
            f"The store at {target.host} does not accept the credentials for the bucket {target.bucket} ({said}): "
            f"check the access key, its secret and, where there is one, its session token."
        )
    region = headers.get("x-amz-bucket-region") or error.response.get("Error", {}).get("Region")
    if code in _OTHER_REGION or status == 301 or (code == "400" and region not in (None, target.region)):
        return (
            f"The bucket {target.bucket} is in the region {region or '(not told)'}, but {target.host} was asked as "
            f"{target.region} ({said}): set s3.region{f' to {region}' if region else ' to the right one'}."
        )
    if code == "NoSuchBucket":
        return f"There is no bucket {target.bucket} at {target.host} ({said}): create it, or mend s3.bucket."
    if status == 404 and target.operation.startswith("List"):
        # A bucket without objects is listed all the same; this was a page that is not there.
        return str(not_a_store(target))
    if status == 404:
        return f"{target.url} does not exist at {target.host} ({said}, {target.operation})."
    if status in (401, 403):
        return (
            f"The store at {target.host} refuses {target.operation} of {target.url} ({said}): the credentials need "
            f"s3:ListBucket, s3:GetObject and s3:PutObject there, {OFFLINE_HINT}."
        )
    if code in _BUSY or status in _FAILING:
        attempts = error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0)
        return (
            f"The store at {target.host} still answers {said} to {target.operation} of {target.url} after "
            f"{attempts + 1} attempts: run again when it is well; what is finished is kept."
        )
    return (
        f"The store at {target.host} refuses {target.operation} of {target.url} with {said}: check that it speaks "
        f"S3 at this endpoint, and s3.region and s3.addressing_style."
    )


def clock_offset_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that this machine's clock is ahead of the store's, from an answer's Date header; None without one."""
    try:
        theirs = parsedate_to_datetime(headers["date"])
    except (KeyError, ValueError):
        return None
    if theirs.tzinfo is None:
        theirs = theirs.replace(tzinfo=UTC)
    return (datetime.now(UTC) - theirs).total_seconds()


def _off(offset: float | None) -> str:
    if offset is None:
        return "too far off"
    minutes, seconds = divmod(round(abs(offset)), 60)
    return f"{minutes} min {seconds} s {'ahead of' if offset > 0 else 'behind'} the store's"


def _headers(error: boto.ClientError) -> dict[str, str]:
    headers: Mapping[str, Any] = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return {name.lower(): str(value) for name, value in headers.items()}


def _host_of(error: Exception, target: Target) -> str:
    """The host that was looked up, which with virtual addressing is `bucket.host`."""
    url = getattr(error, "kwargs", {}).get("endpoint_url")
    return urlsplit(str(url)).netloc or target.host if url else target.host
