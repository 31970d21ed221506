"""What a model is known by where something is kept of it: its origin, with its tokenizer, config, dtype and weights."""

import hashlib
import json
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SAMPLED = 16  # values of each weight that stand for the whole

_known: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[list[tuple], list[str]]]" = weakref.WeakKeyDictionary()


def digest(model: PreTrainedModel) -> str:
    """A digest of a model's config, dtype and a sample of every weight, independent of its path."""
    whole = {"config": _read_settings(model.config), "dtype": str(model.dtype)}
    content = json.dumps(whole, sort_keys=True, default=str) + "".join(sample(model))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def find_source(config: PreTrainedConfig) -> str:
    """The path or repository of the weights and their commit; empty if they were not loaded. A config tells no more: it
    is wrong about weights changed since, and about another path to the same folder."""
    where = getattr(config, "_name_or_path", "")
    if not where:
        return ""
    version: Any = getattr(config, "_commit_hash", None)
    if os.path.isdir(where):
        entries = [entry for entry in os.scandir(where) if entry.name.endswith((".safetensors", ".bin", ".gguf"))]
        version = sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries)
    whole = json.dumps([where, version, _read_settings(config)], sort_keys=True, default=str)
    return f"{config.model_type}-{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


def _read_settings(config: PreTrainedConfig) -> dict[str, Any]:
    settings = config.to_dict()
    for left_out in ("transformers_version", "_name_or_path", "use_cache"):
        settings.pop(left_out, None)
    return settings


def find_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder, GGUF file or Hub repository that the model came from; its code is not run. A
    LookupError says where there is none, and why."""
    config = model.config
    name = getattr(config, "_name_or_path", "")
    if not name:
        raise LookupError("none was found: the model was not loaded from anywhere")
    file = (config.to_dict().get("quantization_config") or {}).get("gguf_file")
    revision = getattr(config, "_commit_hash", None) or "main"
    where: dict[str, Any] = {"local_files_only": True} if os.path.isdir(name) else {"revision": revision}
    if file is not None:
        where["gguf_file"] = file
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **where)
    except (OSError, ValueError, KeyError, ImportError) as error:  # no files, or a missing dependency
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise LookupError(f"none was found at {name} ({reason})") from error
    # For some kinds of model, a folder without a tokenizer's files yields one that knows nothing but special tokens.
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise LookupError(f"none was found at {name} (what is there has no vocabulary)")
    return tokenizer


def sample(model: PreTrainedModel) -> list[str]:
    """For every weight, digests of its name, shape and dtype, and of a few values if they can be read. A quantised
    weight stands as the tensors it names as its parts, one that is split over processes as this process's part.
    Remembered until a weight is replaced or written to, as far as torch counts that: not for `weight.data`."""
    held = model.state_dict(keep_vars=True)
    weights = dict(
        part for name, weight in held.items() if isinstance(weight, Tensor) for part in _list_parts(name, weight)
    )
    if any(weight.is_inference() for weight in weights.values()):  # such tensors do not count writes
        return _sample(weights)
    states = [
        (name, weight.data_ptr() if _is_readable(weight) else 0, weight._version, weight.dtype, weight.shape)
        for name, weight in weights.items()
    ]
    if model not in _known or _known[model][0] != states:
        _known[model] = states, _sample(weights)
    return _known[model][1]


def is_same(one: list[str], other: list[str]) -> bool:
    """Whether two samples are of the same weights, as far as both know them."""
    return len(one) == len(other) and all(
        ours.startswith(theirs) or theirs.startswith(ours) for ours, theirs in zip(one, other, strict=True)
    )


def _list_parts(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The weight by its name, or the tensors that it consists of by names of their own."""
    if hasattr(weight, "to_local"):  # a DTensor: this process's part
        weight = weight.to_local()
    if not hasattr(weight, "__tensor_flatten__"):  # torch's protocol for classes that wrap tensors
        yield name, weight
        return
    inner, _ = weight.__tensor_flatten__()
    for attribute in inner:
        yield from _list_parts(f"{name}.{attribute}", getattr(weight, attribute))


def _is_readable(weight: Tensor) -> bool:
    """Whether values are there, and torch's own to read by index."""
    own_rules = type(weight).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return not (own_rules or weight.is_meta or weight.is_quantized) and weight.layout is torch.strided


@torch.no_grad()
def _sample(weights: dict[str, Tensor]) -> list[str]:
    found = []
    for name, weight in weights.items():
        contents = [f"{name} {list(weight.shape)} {weight.dtype}".encode()]
        if weight.numel() and _is_readable(weight):
            spread = 0, weight.numel() - 1, min(SAMPLED, weight.numel())
            index = torch.linspace(*spread, dtype=torch.float32, device=weight.device).long()
            places = torch.unravel_index(index, weight.shape) if weight.dim() else ()
            with (
                suppress(NotImplementedError),  # torch indexes no tensors of dtypes smaller than a byte
                torch._C.DisableTorchFunctionSubclass(),  # the plain tensor of a Parameter's subclass
            ):
                contents.append(weight.detach()[places].reshape(-1).float().cpu().numpy().tobytes())
        found.append("".join(hashlib.sha256(content).hexdigest()[:8] for content in contents))
    return found
