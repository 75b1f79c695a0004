"""A `token_freq.pt` as speculators' prepare_data.py leaves it, written without torch.

`torch.save` of a dict of ints is a zip file, stored and not compressed, of a pickle (protocol 2) and a version record
under one folder. `torch.load(…, weights_only=True)` reads it; the tests do so where torch is installed.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

# The version of torch's serialization format, as torch itself writes it (caffe2/serialize/versions.h).
_VERSION = b"3\n"


class TokenCounts:
    """How often each id is supervised. Memory: 8 bytes for each id of the vocabulary."""

    def __init__(self) -> None:
        self._counts: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def add(self, ids: npt.NDArray[np.int64]) -> None:
        counts = np.bincount(ids, minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts = counts

    def merge(self, other: TokenCounts) -> None:
        longer, shorter = sorted((self._counts, other._counts), key=len, reverse=True)
        self._counts = longer.copy()
        self._counts[: len(shorter)] += shorter

    def as_dict(self) -> dict[int, int]:
        (ids,) = np.nonzero(self._counts)
        return dict(zip(ids.tolist(), self._counts[ids].tolist(), strict=True))


def write_token_freq(path: Path, counts: TokenCounts) -> None:
    """A dict of token id to its count over supervised positions."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in (("data.pkl", pickle.dumps(counts.as_dict(), protocol=2)), ("version", _VERSION)):
            # A fixed date: the same counts make the same file.
            archive.writestr(zipfile.ZipInfo(f"{path.stem}/{name}", (1980, 1, 1, 0, 0, 0)), content)
