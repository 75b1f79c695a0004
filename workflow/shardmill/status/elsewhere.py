"""Other machines on the same build, by the progress that they leave in the store.

A run's courier looks once a minute and writes down what it saw; `status` reads that, and asks no store itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import orjson

from shardmill.errors import DamagedFile
from shardmill.files import read_json, write_json
from shardmill.paths import BuildPaths
from shardmill.status.model import Machine

if TYPE_CHECKING:
    from shardmill.store.client import Store

# A machine that has sent nothing for so long was thrown away, or its run is over since.
_FORGOTTEN = timedelta(hours=1)


def look_elsewhere(store: Store, folder: str, own: str, build: BuildPaths) -> None:
    """Writes down what the progress files under the key prefix `folder` say, but for `own`, which is just written.

    Ages are by the store's clock. Raises StoreError when the store can't be read.
    """
    listed = list(store.objects(folder))
    now = max((item.modified for item in listed), default=None)
    fresh = (item.key for item in listed if item.key != own and now is not None and now - item.modified < _FORGOTTEN)
    write_json(build.elsewhere, {"machines": [asdict(machine) for key in fresh for machine in _fetch(store, key)]})


def machines_elsewhere(build: BuildPaths) -> tuple[Machine, ...]:
    """As the last look found them; none where no run with a store was at work here."""
    try:
        return tuple(Machine(**machine) for machine in read_json(build.elsewhere)["machines"])
    except (FileNotFoundError, DamagedFile, KeyError, TypeError):
        return ()


def _fetch(store: Store, key: str) -> Iterator[Machine]:
    """Nothing for one that went, or that another version wrote in another form: it is news, and no record."""
    found = store.get(key)
    if found is not None:
        with suppress(orjson.JSONDecodeError, KeyError, TypeError):
            yield _machine(orjson.loads(found.body), time.time() - found.age_s)


def _machine(progress: Mapping[str, Any], seen: float) -> Machine:
    jobs = progress["jobs"]
    return Machine(
        name=str(progress["machine"]),
        at_work=progress["state"] == "running",
        seen=seen,
        published=int(progress["shards"]["published"]),
        generating=len(jobs),
        in_flight=sum(job["in_flight"] for job in jobs),
        tokens_per_s=sum(job["tokens_per_s"] for job in jobs),
    )
