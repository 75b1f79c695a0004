"""What of a build is in S3, what waits for it, and how long uploads take."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import datetime

from shardmill.paths import BuildPaths
from shardmill.settings import Settings
from shardmill.status.model import Store
from shardmill.status.shards import ShardNow, Stage
from shardmill.store.uploads import Upload


def store_now(
    settings: Settings, build: BuildPaths, shards: Sequence[ShardNow], uploads: Sequence[Upload], now: float
) -> Store:
    s3 = settings.s3
    where = f"s3://{s3.bucket}/{s3.root(build.name)}" if s3.bucket is not None else None
    used = s3.used
    published = [shard.manifest for shard in shards if shard.manifest is not None] if used else []
    size = sum(item.size for manifest in published for item in manifest.objects)
    behind = [shard for shard in shards if shard.stage is Stage.ANSWERED] if used else []
    price = settings.cost.usd_per_gb_month
    return Store(
        where=where,
        offline=s3.offline,
        published_shards=len(published),
        published_bytes=size,
        behind_shards=len(behind),
        behind_bytes=sum(shard.bytes_here for shard in behind),
        behind_s=max((now - shard.answered_at for shard in behind if shard.answered_at is not None), default=None),
        upload_s=_median([upload.seconds for upload in uploads]),
        upload_bytes_per_s=_rate(uploads),
        lag_s=_median([upload.behind_s for upload in uploads]),
        last_published=max(
            (datetime.fromisoformat(manifest.created_at).timestamp() for manifest in published), default=None
        ),
        usd_per_month=None if price is None else size / 1e9 * price,
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _rate(uploads: Sequence[Upload]) -> float | None:
    seconds = sum(upload.seconds for upload in uploads)
    return sum(upload.bytes for upload in uploads) / seconds if seconds else None
