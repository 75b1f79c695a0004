"""What a store says of its objects."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Listed:
    key: str
    size: int
    modified: datetime
    etag: str  # of a small object its MD5, in most stores


@dataclass(frozen=True, slots=True)
class Head:
    """What the store says of an object. `sha256` is our own metadata, None on an object that others wrote."""

    size: int
    sha256: str | None
    etag: str
    etag_is_md5: bool


@dataclass(frozen=True, slots=True)
class Content:
    """A small object. `age_s` is by the store's clock alone, so that it doesn't depend on this machine's."""

    body: bytes
    etag: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A multipart upload that was begun and not ended: it costs money and is in no listing of objects."""

    key: str
    upload_id: str
    started: datetime
