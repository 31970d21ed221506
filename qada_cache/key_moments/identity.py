"""What a model is known by where something is kept of it: where it came from, its config, its dtype and its weights."""

import hashlib
import json
import os
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..files import weights


def digest(model: PreTrainedModel, **versions: int) -> str:
    """A digest of a model's config, dtype and a sample of every weight, independent of its path.

    Args:
        versions: of the kept content; another version is another digest.
    """
    whole = {"config": _settings(model.config, versions), "dtype": str(model.dtype)}
    found = hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode())
    found.update("".join(weights.sample(model)).encode())
    return found.hexdigest()[:16]


def source(config: PreTrainedConfig, **versions: int) -> str:
    """The path or repository of the weights and their commit; empty if they were not loaded.

    A config alone tells that, and no more: it is wrong about weights changed since, and about another path to the same
    folder.
    """
    where = config._name_or_path
    if not where:
        return ""
    version: Any = getattr(config, "_commit_hash", None)
    if os.path.isdir(where):
        entries = [entry for entry in os.scandir(where) if entry.name.endswith((".safetensors", ".bin", ".gguf"))]
        version = sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries)
    whole = json.dumps([where, version, _settings(config, versions)], sort_keys=True, default=str)
    return f"{config.model_type}-{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


def _settings(config: PreTrainedConfig, versions: dict[str, int]) -> dict[str, Any]:
    settings = config.to_dict()
    for left_out in ("transformers_version", "_name_or_path", "use_cache"):
        settings.pop(left_out, None)
    return {**settings, **versions}
