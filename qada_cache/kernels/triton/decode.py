"""One decode step of one layer in three Triton kernels, without a word between host and device.

`near_kernel` computes local attention and decides, `bulk_kernel` reads the bulk of KV heads that need it, in splits,
`merge_kernel` puts the parts together. The launches depend on shapes alone: flags and lengths stay on the device,
programs of local heads return at once, and a CUDA graph can hold all of it. The bulk may be device memory or pinned
host memory, which is then read in place over the bus: a byte that no head needs is never moved, and as the query heads
of a group are packed, one that is needed is moved once.

So far run under Triton's interpreter and compiled for CUDA, but not run on a GPU: block sizes and splits are first
guesses.
"""

import torch
import triton
from torch import Tensor

from ..rules import check_operands, decision_rules
from .kernels import bulk_kernel, merge_kernel, near_kernel

SPLIT_TOKENS = 256  # a split has at least about this many tokens, as its result must be written and read again
MAX_SPLITS = 128  # one flagged KV head alone should still occupy most of a GPU
BLOCK_BYTES = 16384  # of keys and values in flight for each stage of the pipeline of a program


def _padded(size: int) -> int:
    """The block that holds `size` rows or columns of a matrix product."""
    return max(16, triton.next_power_of_2(size))


def fused_decode(
    query: Tensor,
    near_keys: Tensor,
    near_values: Tensor,
    bulk_keys: Tensor,
    bulk_values: Tensor,
    *,
    local: Tensor,
    staged: Tensor,
    bulk_lengths: Tensor,
    decided: Tensor,
    scaling: float,
    threshold: float,
    group_rule: str = "head",
    criterion: str | Tensor = "gaussian",
    mean: Tensor | None = None,
    covariance: Tensor | None = None,
    count: Tensor | None = None,
    pool_staged: bool = False,
    other_mean: Tensor | None = None,
    other_covariance: Tensor | None = None,
    pulled: Tensor | None = None,
    places: Tensor | None = None,
    spared: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same contract as `decode_reference.fused_decode`, for the calls that `choice.obstacle` admits.

    A head may lie elsewhere than in the bulk buffers: `places`, int64 `[batch, kv_heads, 2]` and contiguous, holds the
    addresses of its keys and values, laid out token by token as there and a multiple of 16 bytes; 0 for a head that is
    in the buffers. Bytes of heads that lie elsewhere are then added to `spared`, int64 `[]`, and not to `pulled`.

    Everything but the bulk buffers lies on the query's device, and the last dimension of the buffers is contiguous.
    Nothing waits for the device. A captured graph can be replayed as long as the tensors stay where they are, so
    until the bulk grows; lengths, masks and moments may be written to in place.
    """
    batch, heads, _, dim = query.shape
    kv_heads, columns, value_dim = near_keys.shape[1], near_keys.shape[2], near_values.shape[3]
    group = heads // kv_heads
    check_operands(
        query,
        near=(near_keys, near_values),
        bulk=(bulk_keys, bulk_values),
        moments=(mean, covariance),
        other_moments=(other_mean, other_covariance),
        masks=(local, staged),
        rows=(bulk_lengths, count, decided),
    )
    splits = min(triton.cdiv(bulk_keys.shape[2], SPLIT_TOKENS), MAX_SPLITS)
    query = query.contiguous()
    out = query.new_empty(batch, heads, 1, value_dim)
    flags = query.new_empty(batch, kv_heads, group, dtype=torch.bool)
    parts = query.new_empty(batch, heads, 1 + splits, value_dim, dtype=torch.float32)
    lse = query.new_empty(batch, heads, 1 + splits, dtype=torch.float32)

    token_bytes = dim * bulk_keys.element_size() + value_dim * bulk_values.element_size()
    sizes = {"G": group, "BLOCK_G": _padded(group), "D": dim, "BLOCK_D": _padded(dim), "V": value_dim}
    sizes["BLOCK_V"] = _padded(value_dim)
    room = BLOCK_BYTES // ((sizes["BLOCK_D"] + sizes["BLOCK_V"]) * query.element_size())
    sizes["BLOCK_N"] = 64 if room >= 64 else 32 if room >= 32 else 16
    local, staged, bulk_lengths, decided = (
        t.expand(batch, *t.shape[1:]) for t in (local, staged, bulk_lengths, decided)
    )
    moments = (mean, covariance, count, other_mean, other_covariance)
    # A shared row has stride 0.
    row_strides = [0 if t is None else t.expand(batch, *t.shape[1:]).stride(0) for t in moments]
    kind, table, group_rule, limit = decision_rules(criterion, group_rule, threshold)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        near_kernel[(kv_heads, batch)](
            query, near_keys, near_values, local, staged, bulk_lengths, decided, *moments, table,
            parts, lse, flags, pulled, places, spared, *near_keys.stride()[:3], *near_values.stride()[:3],
            local.stride(0), staged.stride(0), bulk_lengths.stride(0), decided.stride(0), *row_strides,
            columns, 1 + splits, scaling, limit,
            CRITERION=kind, GROUP_RULE=group_rule, POOL=pool_staged,
            TOKEN_BYTES=token_bytes, BLOCK_C=min(sizes["BLOCK_D"], 32), **sizes,
        )  # fmt: skip
        if splits:
            bulk_kernel[(splits, kv_heads, batch)](
                query, bulk_keys, bulk_values, places, bulk_lengths, flags, parts, lse,
                *bulk_keys.stride()[:3], *bulk_values.stride()[:3], bulk_lengths.stride(0), scaling, **sizes,
            )  # fmt: skip
        merge_kernel[(batch * heads,)](
            parts, lse, flags, out, 1 + splits, V=value_dim, BLOCK_V=sizes["BLOCK_V"],
            BLOCK_P=triton.next_power_of_2(1 + splits), BLOCK_N=16,
        )  # fmt: skip
    return out, flags
