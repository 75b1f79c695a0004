"""An inventory as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from shardmill.store.inventory import Inventory, Left
from shardmill.wording import counted

_SHOWN = 10


def inventory_lines(inventory: Inventory, usd_per_gb_month: float | None) -> Iterator[str]:
    """A line a build and kind, then what is left over, then the sum and its price."""
    published = {build.name: build.published for build in inventory.builds}
    width = max([len("build"), *(len(group.build) for group in inventory.groups)])
    yield f"{'build':<{width}}  {'kind':<12} {'count':>8} {'size':>10}  {'oldest':>8} {'newest':>8}"
    for group in inventory.groups:
        yield (
            f"{group.build or '-':<{width}}  {group.kind:<12} {group.count:>8} {size(group.size):>10}  "
            f"{_age(group.oldest):>8} {_age(group.newest):>8}"
        )
    for name, count in published.items():
        yield f"{name}: {counted(count, 'shard')} published"
    unnamed = inventory.unnamed
    if unnamed:
        total = sum(listed.size for listed in unnamed)
        yield f"{counted(len(unnamed), 'object')} ({size(total)}) that no manifest names (--delete unnamed):"
        yield from _some([f"{listed.key}  {size(listed.size)}  {_age(listed.modified)}" for listed in unnamed])
    if inventory.unreadable:
        unreadable = counted(len(inventory.unreadable), "manifest")
        yield f"{unreadable} can't be read, so nothing of such a build counts as unnamed:"
        yield from _some(list(inventory.unreadable))
    if not inventory.uploads_known:
        yield (
            "Unfinished multipart uploads are not known: the store doesn't list them, or not to these credentials "
            "(s3:ListBucketMultipartUploads)."
        )
    if inventory.uploads:
        yield f"{counted(len(inventory.uploads), 'multipart upload')} not ended (--delete uploads):"
        yield from _some(
            [f"{left.upload.key}  {_held(left)}  {_age(left.upload.started)}" for left in inventory.uploads]
        )
    usd = inventory.usd_per_month(usd_per_gb_month)
    price = f"${usd:,.2f} a month" if usd is not None else "set cost.usd_per_gb_month for its price"
    yield f"In all {size(inventory.size)}: {price}."


def size(count: int) -> str:
    """Bytes in powers of 1000, as stores bill them."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _age(moment: datetime) -> str:
    seconds = (datetime.now(UTC) - moment).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _held(left: Left) -> str:
    return "size not told" if left.size is None else size(left.size)


def _some(lines: list[str]) -> Iterator[str]:
    for line in lines[:_SHOWN]:
        yield f"  {line}"
    if len(lines) > _SHOWN:
        yield f"  … and {len(lines) - _SHOWN} more (--json has all)"
