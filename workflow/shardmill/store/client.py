"""A bucket: every call that shardmill makes to a store, and what it answers, in words of its own."""

from __future__ import annotations

import functools
import hashlib
import logging
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from shardmill.errors import SettingsError
from shardmill.settings import S3, Settings
from shardmill.store.answers import Content, Head, Listed, Unfinished
from shardmill.store.connection import connect
from shardmill.store.faults import Target, code_of, is_absent, is_ended, not_a_store, status_of, translate

if TYPE_CHECKING:
    from botocore.response import StreamingBody
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

log = logging.getLogger(__name__)

_READS = 5
_NOT_KNOWN = {"NotImplemented", "MethodNotAllowed"}
# Answers of stores that don't know If-None-Match or If-Match; those that ignore them are met by reading back.
_NO_CONDITIONS = {"NotImplemented", "InvalidArgument", "InvalidRequest", "MethodNotAllowed"}
# Answers of stores that want a Content-MD5 with DeleteObjects, which boto3 no longer sends, or don't know the call.
_NO_BATCH_DELETE = {"MissingContentMD5", "InvalidRequest", "InvalidArgument", "NotImplemented", "MethodNotAllowed"}
_DELETE_BATCH = 1000
_BINARY = "application/octet-stream"
# What a broken-off answer's body raises while it is read; botocore's own retries end with the headers.
TORN = (boto.IncompleteReadError, boto.ReadTimeoutError, boto.ResponseStreamingError)


class Store:
    """One bucket. Every method raises StoreError, one sentence, for whatever goes wrong."""

    def __init__(self, s3: S3, hasty: bool = False) -> None:
        """`hasty`: give up within seconds, for a plan that a person waits for."""
        if s3.bucket is None:
            raise SettingsError("Setting s3.bucket is null: name the bucket that builds are kept in.")
        self.bucket = s3.bucket
        self._client = connect(s3, s3.bucket, hasty)
        self.host = urlsplit(self._client.meta.endpoint_url).netloc

    def url(self, key: str) -> str:
        return f"s3://{self.bucket}/{key}"

    def put(self, key: str, content: bytes, content_type: str = _BINARY, sha256: str | None = None) -> str:
        """Writes an object that fits in memory, over any that is there, with its sha256 in the metadata.

        Content-MD5 lets any store refuse a body that was damaged on its way. Returns the MD5, in hex, which is the
        ETag that S3 gives such an object. `sha256`: the content's, where the caller has it already.
        """
        with self.asking("PutObject", key):
            return self._put(key, content, sha256, ContentType=content_type)

    def create(self, key: str, content: bytes) -> bool:
        """Writes a small object only if there is none: False when another was first.

        Where the store ignores the condition or doesn't know it, the last writer wins, and reading the object back
        afterwards tells who that was.
        """
        return self._conditional(key, content, IfNoneMatch="*")

    def replace(self, key: str, content: bytes, etag: str) -> bool:
        """Writes a small object only over its version `etag`: False when that is gone. Otherwise as `create`."""
        return self._conditional(key, content, IfMatch=etag)

    def head(self, key: str) -> Head | None:
        """Size, checksum and metadata of an object; None when there is none."""
        with self.asking("HeadObject", key):
            try:
                answer = self._client.head_object(Bucket=self.bucket, Key=key)
            except boto.ClientError as error:
                if is_absent(error):
                    return None
                raise
        etag = answer["ETag"].strip('"')
        with_key = str(answer.get("ServerSideEncryption", "")).startswith("aws:kms") or "SSECustomerAlgorithm" in answer
        return Head(
            size=answer["ContentLength"],
            sha256=_sha256_of(answer),
            etag=etag,
            etag_is_md5=len(etag) == 32 and not with_key,
        )

    def open(self, key: str) -> tuple[StreamingBody, int, str | None] | None:
        """An object's body to be read, its size, and its sha256 in the metadata; None when there is none."""
        with self.asking("GetObject", key):
            try:
                answer = self._client.get_object(Bucket=self.bucket, Key=key)
            except boto.ClientError as error:
                if is_absent(error):
                    return None
                raise
        return answer["Body"], answer["ContentLength"], _sha256_of(answer)

    def get(self, key: str) -> Content | None:
        """A small object whole; None when there is none. A torn answer is asked for again."""
        with self.asking("GetObject", key):
            for attempt in range(1, _READS + 1):
                try:
                    answer = self._client.get_object(Bucket=self.bucket, Key=key)
                    return Content(answer["Body"].read(), answer["ETag"], _age_s(answer))
                except boto.ClientError as error:
                    if is_absent(error):
                        return None
                    raise
                except TORN:
                    if attempt == _READS:
                        raise
        raise AssertionError("unreachable")

    def objects(self, prefix: str) -> Iterator[Listed]:
        """Every object under `prefix`, page by page. Never ends early: a page that fails raises."""
        with self.asking("ListObjectsV2", prefix):
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix):
                if "IsTruncated" not in page:
                    # A web page answered with 200: taken for a listing, it would be an empty one.
                    raise not_a_store(self._target("ListObjectsV2", prefix))
                for entry in page.get("Contents", ()):
                    yield Listed(entry["Key"], entry["Size"], entry["LastModified"], entry["ETag"].strip('"'))

    def folders(self, prefix: str) -> Iterator[str]:
        """The prefixes one level below `prefix`, each with its trailing slash: one request for 1,000 of them."""
        with self.asking("ListObjectsV2", prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=prefix, Delimiter="/"
            )
            for page in pages:
                yield from (entry["Prefix"] for entry in page.get("CommonPrefixes", ()))

    def unfinished(self, prefix: str) -> list[Unfinished] | None:
        """Multipart uploads under `prefix` that were begun and not ended; None where it is not told.

        Not all stores list them, and S3 asks for a right of its own (s3:ListBucketMultipartUploads).
        """
        with self.asking("ListMultipartUploads", prefix):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=prefix)
            try:
                return [
                    Unfinished(entry["Key"], entry["UploadId"], entry["Initiated"])
                    for page in pages
                    for entry in page.get("Uploads", ())
                    if entry["Key"].startswith(prefix)
                ]
            except boto.ClientError as error:
                if code_of(error) in _NOT_KNOWN or status_of(error) in (401, 403, 405, 501):
                    return None
                raise

    def size_of_parts(self, upload: Unfinished) -> int | None:
        """Bytes that an unfinished upload holds; None where it has ended meanwhile."""
        with self.asking("ListParts", upload.key):
            pages = self._client.get_paginator("list_parts").paginate(
                Bucket=self.bucket, Key=upload.key, UploadId=upload.upload_id
            )
            try:
                return sum(part["Size"] for page in pages for part in page.get("Parts", ()))
            except boto.ClientError as error:
                if is_ended(error):
                    return None
                raise

    def begin(self, key: str, sha256: str) -> str:
        """Begins a multipart upload; returns its id."""
        with self.asking("CreateMultipartUpload", key):
            answer = self._client.create_multipart_upload(Bucket=self.bucket, Key=key, Metadata={"sha256": sha256})
        return answer["UploadId"]

    def put_part(self, key: str, upload_id: str, number: int, content: bytes) -> str:
        """Uploads part `number` (from 1); returns its ETag."""
        with self.asking("UploadPart", key):
            answer = self._client.upload_part(
                Bucket=self.bucket,
                Key=key,
                UploadId=upload_id,
                PartNumber=number,
                Body=content,
                ContentMD5=b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode(),
            )
        return answer["ETag"]

    def complete(self, key: str, upload_id: str, etags: Sequence[str]) -> None:
        """Makes the parts an object. Whether it is there must be looked for: an answer that is lost on its way is asked
        for again, and the store knows of no such upload then."""
        parts: list[CompletedPartTypeDef] = [
            {"ETag": etag, "PartNumber": number} for number, etag in enumerate(etags, 1)
        ]
        with self.asking("CompleteMultipartUpload", key), self._ended_is_well():
            self._client.complete_multipart_upload(
                Bucket=self.bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": parts}
            )

    def abort(self, key: str, upload_id: str) -> None:
        with self.asking("AbortMultipartUpload", key), self._ended_is_well():
            self._client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload_id)

    @contextmanager
    def _ended_is_well(self) -> Iterator[None]:
        try:
            yield
        except boto.ClientError as error:
            if not is_ended(error):
                raise

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects, in batches, or one by one where the store refuses DeleteObjects."""
        for start in range(0, len(keys), _DELETE_BATCH):
            batch = keys[start : start + _DELETE_BATCH]
            if len(batch) == 1 or not self._delete_batch(batch):
                for key in batch:
                    with self.asking("DeleteObject", key):
                        self._client.delete_object(Bucket=self.bucket, Key=key)

    @contextmanager
    def asking(self, operation: str, key: str) -> Iterator[None]:
        """Turns whatever botocore raises inside into a StoreError about `key`."""
        try:
            yield
        except (boto.BotoCoreError, boto.ClientError, ResponseParserError) as error:
            raise translate(error, self._target(operation, key)) from None

    def _target(self, operation: str, key: str) -> Target:
        return Target(operation, self.bucket, key, self.host, self._client.meta.region_name or "us-east-1")

    def _put(self, key: str, content: bytes, sha256: str | None, **more: Any) -> str:
        md5 = hashlib.md5(content, usedforsecurity=False)
        self._client.put_object(
            Bucket=self.bucket,
            Key=key,
            Body=content,
            ContentMD5=b64encode(md5.digest()).decode(),
            Metadata={"sha256": sha256 or hashlib.sha256(content).hexdigest()},
            **more,
        )
        return md5.hexdigest()

    def _conditional(self, key: str, content: bytes, **condition: str) -> bool:
        with self.asking("PutObject", key):
            try:
                self._put(key, content, None, ContentType="application/json", **condition)
            except boto.ClientError as error:
                if status_of(error) in (404, 409, 412) and code_of(error) != "NoSuchBucket":
                    return False
                if code_of(error) not in _NO_CONDITIONS and status_of(error) != 501:
                    raise
                log.info("The store at %s has no conditional writes (%s).", self.host, code_of(error))
                self._put(key, content, None, ContentType="application/json")
        return True

    def _delete_batch(self, keys: Sequence[str]) -> bool:
        with self.asking("DeleteObjects", keys[0]):
            try:
                answer = self._client.delete_objects(
                    Bucket=self.bucket, Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
                )
            except boto.ClientError as error:
                if code_of(error) in _NO_BATCH_DELETE or status_of(error) in (405, 501):
                    return False
                raise
        return not answer.get("Errors")


@functools.lru_cache(maxsize=8)
def open_store(s3: S3) -> Store:
    """The process's store of these settings: making a client costs as much as a dozen requests. Safe among threads."""
    return Store(s3)


def check_access(settings: Settings) -> None:
    """Lists, writes, reads and deletes where builds are kept. Raises StoreError for the first that is refused."""
    store = Store(settings.s3, hasty=True)
    key = "/".join(part for part in (settings.s3.prefix, f".shardmill-check-{uuid4().hex}") if part)
    next(store.objects(key), None)
    store.put(key, b"shardmill doctor was here")
    store.get(key)
    store.delete([key])


def _sha256_of(answer: Any) -> str | None:
    metadata = {name.lower(): value for name, value in answer.get("Metadata", {}).items()}
    return metadata.get("sha256")


def _age_s(answer: Any) -> float:
    """Seconds since an object was written. The store's Date is to the second, and so is Last-Modified."""
    now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
    age: float = (now - answer["LastModified"]).total_seconds()
    return age
