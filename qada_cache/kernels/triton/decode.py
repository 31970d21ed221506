"""One decode step of one layer in three or four Triton kernels, without a word between host and device.

`near_kernel` computes local attention and decides, `bulk_kernel` reads the bulk of KV heads that need it, in splits,
`merge_kernel` puts the parts together. With a sketch of the bulk, `estimate_kernel` estimates all scores by it, and
where `bulk_kernel` would read all, `chosen_kernel` reads the tokens that these choose and sums what they make of the
others, which `merge_kernel` gives to the mean value.

The launches depend on shapes alone: flags, lengths and choices stay on the device, programs of local heads return at
once, and a CUDA graph can hold all of it. The bulk may be device memory or pinned host memory, which is then read in
place over the bus: a byte that no head needs is never moved, and as the query heads of a group are packed, one that is
needed is moved once.

So far run under Triton's interpreter and compiled for CUDA, but not run on a GPU: block sizes and splits are first
guesses.
"""

import math

import torch
import triton
from torch import Tensor

from .. import sketch
from ..rules import check_operands, decision_rules
from .kernels import bulk_kernel, merge_kernel, near_kernel
from .sketch_kernels import chosen_kernel, estimate_kernel

SPLIT_TOKENS = 256  # a split has at least about this many tokens, as its result must be written and read again
MAX_SPLITS = 128  # one flagged KV head alone should still occupy most of a GPU
SCAN_TOKENS = 128  # among which a program chooses at once; a power of two, as:
SCAN_SCORES = 2048  # of so many estimates at most: with more, registers spill
UNPACKED_BYTES = 8192  # of codes in the registers of a program, a byte a value, and of no more tokens than:
MAX_ESTIMATES = 128
MOMENT_COLUMNS = 16  # of a covariance or rotation at once: with more, registers spill
BLOCK_BYTES = 16384  # of keys and values in flight for each stage of the pipeline of a program
CHOSEN_STAGES = 5  # half of them fetch indices: as many keys and values are in flight as in the default 3


def _padded(size: int) -> int:
    """The block that holds `size` rows or columns of a matrix product."""
    return max(16, triton.next_power_of_2(size))


def _code_block(size: int, bits: int) -> int:
    """The block that holds a token's bytes, of which products of 8-bit integers take at least 32 values."""
    return max(32 * bits // 8, triton.next_power_of_2(size))


def _sketch(
    bulk_keys: Tensor, codes: Tensor | None, scales: Tensor | None, centre: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, int] | None:
    """Codes, scales, centre and the bits of a code; None where there are none, or no room for a bulk that has some."""
    if codes is None or scales is None or centre is None or bulk_keys.shape[2] < sketch.MIN_TOKENS:
        return None
    if scales.stride(2) != 1:
        raise ValueError("the scales of a head do not lie one after the other")
    return codes, scales, centre, codes.shape[3] * 8 // bulk_keys.shape[3]


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
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    centre: Tensor | None = None,
    mean_square: Tensor | None = None,
    mean_value: Tensor | None = None,
    token_threshold: float = 0.0,
    sketched: Tensor | None = None,
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
        coded=(codes, scales, centre, mean_square, mean_value),
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
    in_flight = BLOCK_BYTES // ((sizes["BLOCK_D"] + sizes["BLOCK_V"]) * query.element_size())
    sizes["BLOCK_N"] = 64 if in_flight >= 64 else 32 if in_flight >= 32 else 16
    local, staged, bulk_lengths, decided = (
        t.expand(batch, *t.shape[1:]) for t in (local, staged, bulk_lengths, decided)
    )
    moments = (mean, covariance, count, other_mean, other_covariance)
    # A shared row has stride 0.
    row_strides = [0 if t is None else t.expand(batch, *t.shape[1:]).stride(0) for t in moments]
    kind, table, group_rule, limit = decision_rules(criterion, group_rule, threshold)
    coded = _sketch(bulk_keys, codes, scales, centre)
    # What `near_kernel` leaves for the choice: the queries rotated, the number of tokens in each bulk.
    rotation = None if coded is None else sketch.rotation(dim, query.device)
    turned = None if coded is None else query.new_empty(batch, heads, dim, dtype=torch.float32)
    tokens = None if coded is None else bulk_lengths.new_empty(batch, kv_heads)
    far_strides = (*bulk_keys.stride()[:3], *bulk_values.stride()[:3], bulk_lengths.stride(0))
    spread, max_spread = 0.0, 0.0
    if coded is not None:
        spread, max_spread = sketch.spread_of(coded[3]) * scaling**2, sketch.MAX_SPREAD[coded[3]]
    rest = None
    with torch.cuda.device_of(query):  # Triton launches on the current device
        near_kernel[(kv_heads, batch)](
            query, near_keys, near_values, local, staged, bulk_lengths, decided, *moments, table,
            parts, lse, flags, pulled if coded is None else None, places, spared, rotation, turned, tokens,
            mean_square,
            *near_keys.stride()[:3], *near_values.stride()[:3], local.stride(0), staged.stride(0),
            bulk_lengths.stride(0), decided.stride(0), *row_strides, columns, 1 + splits, scaling, limit,
            spread, max_spread,
            CRITERION=kind, GROUP_RULE=group_rule, POOL=pool_staged,
            TOKEN_BYTES=token_bytes, MIN_TOKENS=sketch.MIN_TOKENS, BLOCK_C=MOMENT_COLUMNS, **sizes,
        )  # fmt: skip
        if coded is not None:
            codes, scales, centre, bits = coded
            # Of whole blocks, and as many for every split.
            scan = min(SCAN_TOKENS, SCAN_SCORES // triton.next_power_of_2(group))
            room = splits * triton.cdiv(triton.cdiv(bulk_keys.shape[2], scan), splits) * scan
            estimates = query.new_empty(batch, heads, room, dtype=torch.float32)
            masses = query.new_empty(batch, heads, splits, dtype=torch.float32)
            index = query.new_empty(batch, kv_heads, room, dtype=torch.int32)
            if mean_value is not None:
                rest, mean_value = torch.empty_like(masses), mean_value.contiguous()
            size, blocks = codes.shape[3], ("G", "BLOCK_G", "D", "BLOCK_D")
            estimate_kernel[(splits, kv_heads, batch)](
                query, turned, codes, scales, centre, bulk_lengths, tokens, flags, estimates, masses, sketched,
                *codes.stride()[:2], *scales.stride()[:2], *centre.stride()[:2], bulk_lengths.stride(0),
                room, scaling, spread, codes.stride(2),
                BITS=bits, BYTES=size, BLOCK_B=_code_block(size, bits), TOKEN_BYTES=size + scales.element_size(),
                BLOCK_N=min(UNPACKED_BYTES // sizes["BLOCK_D"], MAX_ESTIMATES),
                **{name: sizes[name] for name in blocks},
            )  # fmt: skip
            chosen_kernel[(splits, kv_heads, batch)](
                query, bulk_keys, bulk_values, places, bulk_lengths, tokens, flags, estimates, masses, index,
                parts, lse, rest, pulled, spared, *far_strides, room, scaling, math.log(token_threshold),
                BLOCK_S=scan, BLOCK_P=triton.next_power_of_2(splits), BLOCK_Q=triton.next_power_of_2(group),
                TOKEN_BYTES=token_bytes, **sizes, num_stages=CHOSEN_STAGES,
            )  # fmt: skip
        elif splits:
            bulk_kernel[(splits, kv_heads, batch)](
                query, bulk_keys, bulk_values, places, bulk_lengths, flags, parts, lse, *far_strides, scaling, **sizes
            )
        merge_kernel[(batch * heads,)](
            parts, lse, flags, rest, mean_value, out, 1 + splits, sketch.REST_WEIGHT,
            G=group, V=value_dim, BLOCK_V=sizes["BLOCK_V"],
            BLOCK_P=triton.next_power_of_2(1 + splits), BLOCK_N=16,
        )  # fmt: skip
    return out, flags
