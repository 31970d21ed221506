"""Flex attention's masks, read as the tensors that `Padding.extend` takes."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.utils.weak import WeakIdKeyDictionary

_read: Any = WeakIdKeyDictionary()  # every layer of a pass is handed the same mask, which nothing writes to


def read_block_mask(mask: BlockMask) -> Tensor:
    """The pairs that a mask of `queries` new tokens and `seen` tokens shows, bool `[batch or 1, heads or 1, queries,
    seen]`, on its device. A prompt's mask, `queries == seen`, becomes bool `[batch or 1, seen]`, its real tokens: all
    pairs would be the largest tensor of the pass. ValueError, if it is not causal attention over the real tokens."""
    if mask not in _read:
        _read[mask] = _read_pairs(mask) if mask.shape[-2] < mask.shape[-1] else _read_tokens(mask)
    return _read[mask]


def _read_pairs(mask: BlockMask) -> Tensor:
    batch, heads, queries, seen = mask.shape
    return create_mask(mask.mask_mod, batch, heads, queries, seen, device=str(mask.kv_num_blocks.device))


def _read_tokens(mask: BlockMask) -> Tensor:
    """The tokens that the last query sees, bool `[batch or 1, seen]`. Under causal attention over the real tokens, they
    are also the tokens that see themselves; ValueError if not."""
    batch, heads, _, seen = mask.shape
    device, visible = str(mask.kv_num_blocks.device), mask.mask_mod
    by_last = create_mask(lambda b, h, q, k: visible(b, h, q + seen - 1, k), batch, heads, 1, seen, device=device)
    itself = create_mask(lambda b, h, q, k: visible(b, h, k, k), batch, heads, 1, seen, device=device)
    if heads != 1 or not torch.equal(by_last, itself):
        raise ValueError(
            "this block mask is more than causal attention and padding; QAdACache supports None and 2-D attention "
            "masks: pass one of those, or use DynamicCache"
        )
    return by_last[:, 0, 0]
