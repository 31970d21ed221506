"""A model's identity, by which files and caches are found: origin, tokenizer, config, dtype and a sample of weights."""

import hashlib
import json
import os
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .asking import ask
from .contents import Contents, is_readable

SAMPLED = 16  # values of each weight that stand for the whole
ALSO_RETURNED = "output_hidden_states", "output_attentions"  # entries of a config that change no output

# The last sampled contents of each model, and their digests.
_samples: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[list[_Content], list[str]]]" = weakref.WeakKeyDictionary()
_Content = tuple[bytes, bytes]  # name, shape and dtype; values, empty if there are none
# By model, what was sampled since `sample_once` began in this thread; None outside.
_sampled_once: "ContextVar[dict[PreTrainedModel, list[str]] | None]" = ContextVar("_sampled_once", default=None)


def digest(model: PreTrainedModel, without: Collection[str] = ()) -> str:
    """A digest of a model's config, dtype and a sample of every weight, independent of its path. Entries of the config
    that are named in `without` count as None."""
    settings = _read_settings(model.config)
    settings |= dict.fromkeys(settings.keys() & set(without))
    whole = {"config": settings, "dtype": str(model.dtype)}
    content = json.dumps(whole, sort_keys=True, default=str) + "".join(sample(model))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def find_source(config: PreTrainedConfig) -> str:
    """The model type and a digest of where the weights were loaded from: path or repository, version and config; empty
    if they were not loaded. It does not change with weights in memory, and differs between paths to one folder."""
    where = getattr(config, "_name_or_path", "")
    if not where:
        return ""
    version: Any = getattr(config, "_commit_hash", None)
    if os.path.isdir(where):
        version = []
        with suppress(OSError), os.scandir(where) as entries:
            for entry in entries:
                if entry.name.endswith((".safetensors", ".bin", ".gguf")):
                    with suppress(OSError):  # a link that leads nowhere
                        about = entry.stat()
                        version.append((entry.name, about.st_size, about.st_mtime_ns))
        version.sort()
    whole = json.dumps([where, version, _read_settings(config)], sort_keys=True, default=str)
    return f"{config.model_type}-{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


def _read_settings(config: PreTrainedConfig) -> dict[str, Any]:
    settings = config.to_dict()
    for left_out in ("transformers_version", "_name_or_path", "use_cache"):
        settings.pop(left_out, None)
    return settings | dict.fromkeys(settings.keys() & set(ALSO_RETURNED), False)  # as they are in most files


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
    except Exception as error:  # no files, or a missing dependency; at damaged files a library raises what it likes
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise LookupError(f"none was found at {name} ({reason})") from error
    # For some kinds of model, a folder without a tokenizer's files yields one that knows nothing but special tokens.
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise LookupError(f"none was found at {name} (what is there has no vocabulary)")
    return tokenizer


def sample(model: PreTrainedModel) -> list[str]:
    """For every weight, digests of its name, shape and dtype, and of a few values. A quantised weight is sampled by the
    tensors that it names as its parts, a weight that is split over processes by this process's part, and one that
    accelerate offloads by its place. Outputs of layers whose weights cannot be read follow, then peft's adapters.

    Values are read at each call, as torch's version counters miss some writes to weights; inside `sample_once` at the
    first one.

    Raises:
        UntoldWeightsError: a layer's weights cannot be read, and no inputs were found that it takes.
    """
    known = _sampled_once.get()
    if known is None:
        return _sample(model)
    if model not in known:
        known[model] = _sample(model)
    return known[model]


@contextmanager
def sample_once() -> Iterator[None]:
    """Inside, this thread samples each model's weights once: for a few lookups in a row, between which nobody writes to
    weights."""
    outer = _sampled_once.set({})
    try:
        yield
    finally:
        _sampled_once.reset(outer)


def _sample(model: PreTrainedModel) -> list[str]:
    contents = Contents(model)
    sampled = _read_values(contents.weights)
    sampled += [(f"{name} content".encode(), content) for name, content in contents.others.items()]
    sampled += [(f"{path} answers".encode(), answers) for path, answers in ask(model, contents.closed).items()]
    if adapters := list_adapters(model):
        sampled.append((b"adapters", json.dumps(adapters).encode()))
    if model not in _samples or _samples[model][0] != sampled:
        _samples[model] = sampled, _digest_contents(sampled)
    return _samples[model][1]


def list_adapters(model: PreTrainedModel) -> list:
    """Settings of peft that weights do not show: for each module with adapters its name, and which are active."""
    names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    adapters = [
        (name, [getattr(part, each, None) for each in names])
        for name, part in model.named_modules()
        if hasattr(part, "merged_adapters")
    ]
    return json.loads(json.dumps(adapters, default=str))


def is_same(kept: list[str], own: list[str]) -> bool:
    """Whether a stored sample (`kept`) is of the same weights as a model's (`own`). Earlier versions stored names alone
    of weights that they could not read, so a stored string may be the beginning of the model's."""
    return len(kept) == len(own) > 0 and all(ours.startswith(theirs) for theirs, ours in zip(kept, own, strict=True))


@lru_cache(maxsize=256)
def _find_places(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """Indices of a weight's sampled values: an int64 tensor for each dim."""
    last, count = shape.numel() - 1, min(SAMPLED, shape.numel())
    index = torch.linspace(0, last, count, dtype=torch.float32, device=device).long()
    return torch.unravel_index(index, shape) if shape else ()


@torch.no_grad()
def _read_values(weights: dict[str, Tensor]) -> list[_Content]:
    """Every weight's name, shape and dtype, and bytes of a few values. The host waits once for each device."""
    taken: dict[torch.device, dict[str, Tensor]] = {}
    for name, weight in weights.items():
        if weight.numel() and is_readable(weight):
            places = _find_places(weight.shape, weight.device)
            with torch._C.DisableTorchFunctionSubclass():  # the plain tensor of a Parameter's subclass
                try:
                    values = weight.detach()[places]
                except NotImplementedError:  # torch indexes no tensors of dtypes smaller than a byte
                    values = weight.detach().view(torch.uint8)[places]
                taken.setdefault(weight.device, {})[name] = values.reshape(-1).float()
    contents: dict[str, bytes] = {}
    for parts in taken.values():
        whole = torch.cat(list(parts.values())).cpu().split([len(part) for part in parts.values()])
        contents |= {name: part.numpy().tobytes() for name, part in zip(parts, whole, strict=True)}
    return [
        (f"{name} {list(weight.shape)} {weight.dtype}".encode(), contents.get(name, b""))
        for name, weight in weights.items()
    ]


def _digest_contents(contents: list[_Content]) -> list[str]:
    """One string a content: the first 8 hex digits of the SHA-256 of each part."""
    return ["".join(hashlib.sha256(part).hexdigest()[:8] for part in content if part) for content in contents]
