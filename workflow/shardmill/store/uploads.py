"""What each upload took, as a small file beside the run's other records: for `status`, and for nothing else."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from shardmill.errors import DamagedFile
from shardmill.files import read_json
from shardmill.paths import BuildPaths

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Upload:
    shard: str
    bytes: int
    seconds: float  # to upload both objects and have them checked
    answered_at: float  # when the shard's completions were whole, Unix time
    uploaded_at: float

    @property
    def behind_s(self) -> float:
        """How long the shard's answers lay on this machine alone."""
        return self.uploaded_at - self.answered_at


def note_upload(build: BuildPaths, shard: str, size: int, seconds: float) -> None:
    """Never fails: a shard that is published is not to fail for a note about it."""
    try:
        answered_at = build.completions(shard).stat().st_mtime
        build.uploads.mkdir(parents=True, exist_ok=True)
        build.upload(shard).write_bytes(orjson.dumps(asdict(Upload(shard, size, seconds, answered_at, time.time()))))
    except OSError as error:
        log.warning("How long the upload of %s took is not noted: %s", shard, error.strerror)


def read_upload(path: Path) -> Upload | None:
    """None for one that is damaged, or went."""
    try:
        return Upload(**read_json(path))
    except (FileNotFoundError, DamagedFile, TypeError):
        return None
