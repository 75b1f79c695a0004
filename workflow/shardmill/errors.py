"""The errors that a person sees: one plain sentence each, with what to do, and an exit code.

Exit codes (DESIGN.md): 0 well, 1 a problem in the data or the world, 2 used wrongly.
"""

from __future__ import annotations

import errno

# What a full disk, a quota and a file system's limit raise.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_machines(error: Exception) -> bool:
    """Whether the machine is to blame (no right, too many open files, a failing disk), and not what a file holds.

    pyarrow raises OSError for both, with an errno for the machine's alone.
    """
    return isinstance(error, OSError) and error.errno is not None


class ShardmillError(Exception):
    """Something is wrong with the data, the machine or a server. The message is shown as it is."""

    exit_code = 1


class UsageError(ShardmillError):
    """The command or the settings are wrong: nothing was tried."""

    exit_code = 2


class SettingsError(UsageError):
    """A key of the config is unknown, of the wrong type, or contradicts another."""


class DataError(ShardmillError):
    """The dataset or a file of the build is not what it should be."""


class DamagedFile(DataError, ValueError):
    """A file of the build is there and can't be read."""


class ShardError(ShardmillError):
    """One shard can't be finished as things are. The run's other shards are none the worse for it."""


class SetupFault(ShardmillError):
    """A server's answer says that the set-up is wrong (401, 403, 404, unknown field): no retry helps."""


class NoServers(ShardmillError):
    """No server was left for `generate.patience_s` seconds."""


class StoreError(ShardmillError):
    """The object store could not be reached, refused, or holds something else than it should."""


class Refused(StoreError):
    """The credentials lack the right."""


class BadObject(StoreError):
    """The store answers, and an object is missing there, or is another one than its manifest says."""
