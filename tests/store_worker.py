"""A process to be killed, that publishes or restores shards one after another: ACTION SETTINGS ROOT SHARD…"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shardmill.paths import BuildPaths
from shardmill.settings import resolve
from shardmill.store import transfer
from shardmill.store.publish import publish_shard
from shardmill.store.restore import restore_shard

if __name__ == "__main__":
    action, settings_file, root, *shards = sys.argv[1:]
    settings = resolve(json.loads(Path(settings_file).read_text()))
    if action == "upload":
        transfer.PART_BYTES = 5 << 20
        from shardmill.files import sha256_file
        from shardmill.store.client import Store

        transfer.upload_file(Store(settings.s3), shards[0], Path(root), sha256_file(Path(root)))
    for shard in shards if action != "upload" else ():
        {"publish": publish_shard, "restore": restore_shard}[action](settings, BuildPaths(Path(root)), shard)
