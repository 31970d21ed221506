"""A Llama or Qwen2 whose keys are larger in some channels, and whose queries are smaller there by the same factor.

Its logits stay the same, up to rounding. Norms of keys and queries make such channels in models that have them.
"""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from eval.shared.deciding import compare, follow, prefill
from eval.shared.texts import Document
from qada_cache import QAdACache

TYPES = ("llama", "qwen2")
BULK_BITS = 16, 8, 4


def follow_scaled(model: PreTrainedModel, documents: list[Document], spread: float) -> dict[int, list[dict[str, Any]]]:
    """By the bits of a bulk, for each document a row of `compare`, and the share of the bulk's bytes that was read, of
    caches with default options and a copy of the model under `scale_keys`."""
    scaled, found = scale_copy(model, spread), defaultdict(list)
    for document in tqdm(documents, unit="text"):
        full = _follow_from(scaled, document, DynamicCache(config=scaled.config))
        for bits in BULK_BITS:
            log_probabilities = _follow_from(scaled, document, cache := QAdACache(scaled, bulk_bits=bits))
            found[bits].append(compare(full, log_probabilities) | {"read_share": cache.stats().read_share})
    return found


def _follow_from(model: PreTrainedModel, document: Document, cache: DynamicCache) -> Tensor:
    """Log-probabilities `[tokens, vocabulary]` of what follows the document, token by token, by an empty cache."""
    prefill(model, document, cache)
    return follow(model, document, cache, at_once=False)


def scale_copy(model: PreTrainedModel, spread: float) -> PreTrainedModel:
    """A copy of the model under `scale_keys`; the model itself without a spread."""
    if not spread:
        return model
    scale_keys(scaled := copy.deepcopy(model), spread)
    return scaled


@torch.no_grad()
def scale_keys(model: PreTrainedModel, spread: float, seed: int = 0) -> None:
    """Scale the keys of each KV head and rotary pair by a factor, in place. Factors' logarithms are Gaussian numbers of
    deviation `spread`.

    Raises:
        ValueError: the model is of another kind.
    """
    config = model.config
    if config.model_type not in TYPES:
        raise ValueError(f"{config.model_type} has no keys that are scaled here, only {' and '.join(TYPES)} have")
    generator = torch.Generator("cpu").manual_seed(seed)
    heads, group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    for layer in model.base_model.layers:
        attention = layer.self_attn
        logs = torch.randn(heads, attention.head_dim // 2, generator=generator, dtype=torch.float32, device="cpu")
        factors = (spread * logs.double()).exp().repeat(1, 2)
        _scale_rows(attention.k_proj, factors.flatten())
        _scale_rows(attention.q_proj, 1 / factors.repeat_interleave(group, dim=0).flatten())


def _scale_rows(projection: torch.nn.Linear, factors: Tensor) -> None:
    for parameter in filter(lambda each: each is not None, (projection.weight, projection.bias)):
        parameter.mul_(factors.to(parameter.device, parameter.dtype).view(-1, *[1] * (parameter.dim() - 1)))
