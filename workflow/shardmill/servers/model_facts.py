"""What a model's own config.json says about how it must be served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.files import read_json

# How families count their multi-token prediction layers. Qwen3.5/3.6: mtp_num_hidden_layers; DeepSeek, GLM, MiMo:
# num_nextn_predict_layers.
_MTP_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
# Have the layers without counting them in their config.
_MTP_TYPES = frozenset({"qwen3_next"})
_HYBRID_KEYS = ("full_attention_interval", "linear_num_key_heads", "mamba_d_state", "ssm_state_size")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    mtp: bool  # has layers that draft its next tokens, so that NEXTN needs no other model
    hybrid: bool  # some layers keep a Mamba-like state for each request, beside the KV cache


def model_facts(config: Mapping[str, Any], weights: frozenset[str] | None = None) -> ModelFacts:
    """From config.json, and the names of the weights where an index lists them (None: it doesn't).

    A copy of a model without its MTP weights says in its config that it has them; the index tells.
    """
    text = config.get("text_config")
    sections = [config, *([text] if isinstance(text, Mapping) else [])]
    kinds = {section.get("model_type") for section in sections}
    mtp = any(_count(section.get(key)) > 0 for section in sections for key in _MTP_KEYS) or bool(kinds & _MTP_TYPES)
    qwen = bool(kinds & _MTP_TYPES) or any(_count(section.get("mtp_num_hidden_layers")) for section in sections)
    if mtp and qwen and weights is not None:
        mtp = any("mtp." in name for name in weights)
    hybrid = any(
        any(section.get(key) for key in _HYBRID_KEYS) or "linear_attention" in (section.get("layer_types") or [])
        for section in sections
    )
    return ModelFacts(mtp=mtp, hybrid=hybrid)


def read_model_facts(folder: Path) -> ModelFacts:
    """Raises OSError or ValueError where there is no readable config.json."""
    index = folder / "model.safetensors.index.json"
    weights = frozenset(read_json(index)["weight_map"]) if index.exists() else None
    return model_facts(read_json(folder / "config.json"), weights)


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0
