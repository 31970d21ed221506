"""Checks of requests to a store, which serves texts and models whose keys depend only on the tokens before them."""

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..cache import QAdACache
from ..key_moments.rotation import FREQUENCIES_BY_LENGTH, find_growing_parameters, read_rope_settings
from ..models.sharding import check_unsharded, count_processes
from .filling import list_layers

# Names of settings that are ids of tokens for images or sound; and of configs' parts that read other things than text.
_MEDIA = re.compile(r"(image|video|audio|vision|speech)\w*_(id|index)$")
_READERS = re.compile(r"image|video|audio|vision|speech|vq|protein")


def check(cache: QAdACache, model: PreTrainedModel, rows: Iterable[Sequence[int]], key: str | None) -> None:
    """Refuse caches, models and prompts that a store does not serve."""
    if key is not None and not isinstance(key, str):
        raise TypeError(f"key must be a str, got {type(key).__name__}")
    check_unsharded(count_processes(model))
    if theta := cache.options.prefill_threshold:
        raise NotImplementedError(
            f"PrefixStore keeps no prompts that are read by selection (prefill_threshold={theta:g}), as it depends on "
            "where they end: use prefill_threshold=0, or save() and QAdACache.load"
        )
    list_layers(cache)
    for row in rows:
        _check_text(model, row)


def find_real_rows(ids: Any, mask: Tensor | None) -> tuple[list[list[int]], int]:
    """The real tokens of each row of ids `[tokens]` or `[rows, tokens]`, and the number of columns. ValueError for
    other ids, or for a mask of another shape or that hides tokens behind real ones."""
    whole = torch.as_tensor(ids, device="cpu")
    whole = whole[None] if whole.dim() == 1 else whole
    if whole.dim() != 2 or not whole.shape[1] or whole.is_floating_point() or whole.dtype == torch.bool:
        raise ValueError(f"token ids are ints [tokens] or [rows, tokens], got {whole.dtype} {list(whole.shape)}")
    rows = whole.tolist()
    if mask is not None:
        if mask.shape != whole.shape:
            raise ValueError(f"attention_mask of {list(mask.shape)} is not of input_ids of {list(whole.shape)}")
        real = mask.bool()
        if not (real[:, 1:] >= real[:, :-1]).all():
            raise ValueError("attention_mask hides tokens behind real ones: pad rows on the left (padding_side='left')")
        rows = [row[len(row) - count :] for row, count in zip(rows, real.sum(dim=-1).tolist(), strict=True)]
    return rows, whole.shape[1]


def _check_text(model: PreTrainedModel, tokens: Sequence[int]) -> None:
    """Raise NotImplementedError unless the keys of `tokens` depend on these tokens alone, whatever follows them."""
    config = model.config.get_text_config(decoder=True)
    rope = read_rope_settings(config)
    # A model may have frequencies of another type than its config says (Hunyuan): its rotary module names that.
    own = [vars(part).get("rope_type") for part in model.modules() if vars(part).get("config") is config]
    types = [kind for kind in own if kind is not None]
    fixed = types and all(isinstance(kind, str) and kind not in FREQUENCIES_BY_LENGTH for kind in types)
    if not fixed and any(find_growing_parameters(rope, layer) for layer in range(config.num_hidden_layers)):
        raise NotImplementedError(
            f"PrefixStore keeps no prompts of {config.model_type} with rotary frequencies that depend on a prompt's "
            "length: save() and QAdACache.load keep a whole prompt"
        )
    named = {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    parts = {name: part for name, part in named.items() if isinstance(part, PreTrainedConfig)}
    settings = chain.from_iterable(vars(part).items() for part in (model.config, *parts.values()))
    media = {value for name, value in settings if _MEDIA.match(name) and type(value) is int}
    if not media and any(map(_READERS.search, parts)):
        raise NotImplementedError(
            f"PrefixStore keeps no prompts of {model.config.model_type}, whose config does not say which tokens stand "
            "for images or sound: save() and QAdACache.load keep a whole prompt"
        )
    if found_media := media.intersection(tokens):
        raise NotImplementedError(
            f"PrefixStore keeps no prompts with images or sound (token {min(found_media)}), which their tokens do not "
            "tell apart: save() and QAdACache.load keep a whole prompt"
        )
