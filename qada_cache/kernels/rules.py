"""How fused kernels are told to decide, and checks of the tensors whose addresses they are given."""

import torch
from torch import Tensor

from ..criterion import logit
from . import sketch


def decision_rules(criterion: str | Tensor, group_rule: str, threshold: float) -> tuple[str, Tensor | None, str, float]:
    """The arguments of `decode_reference.fused_decode` as kernels take them.

    Returns:
        the criterion's name ("static" for a table); the table, or None; the group rule, "head" where all heads of a
        group decide alike; and the margin `log A_local - log A_bulk` below which a head is long-context, see
        `criterion.long_context`.
    """
    table = criterion if isinstance(criterion, Tensor) else None
    kind = "static" if table is not None else str(criterion)
    if kind in ("dense", "local"):
        group_rule = "head"  # nothing to agree on
    return kind, table, group_rule, logit(threshold)


def check_operands(
    query: Tensor,
    *,
    near: tuple[Tensor, Tensor],
    bulk: tuple[Tensor, Tensor],
    moments: tuple[Tensor | None, Tensor | None],
    other_moments: tuple[Tensor | None, Tensor | None],
    masks: tuple[Tensor, Tensor],
    rows: tuple[Tensor | None, ...],
    coded: tuple[Tensor | None, ...] = (None, None, None, None, None),
) -> None:
    """Raise ValueError unless a kernel that goes by the query's sizes and dtype reads within all of these tensors.

    Args:
        query: as for `decode_reference.fused_decode`.
        near: its near_keys, near_values.
        bulk: its bulk_keys, bulk_values, which alone may lie on another device.
        moments: its mean, covariance.
        other_moments: its other_mean, other_covariance.
        masks: its local, staged.
        rows: its bulk_lengths, count, decided.
        coded: its codes, scales, centre, mean_square, all or none, and mean_value.
    """
    batch, heads, queries, dim = query.shape
    kv_heads, value_dim = near[0].shape[1], near[1].shape[3]
    fits = queries == 1 and kv_heads and heads % kv_heads == 0
    for keys, values in (near, bulk):
        fits = fits and keys.dtype == values.dtype == query.dtype
        fits = fits and keys.shape[:2] == (batch, kv_heads) and keys.shape[:3] == values.shape[:3]
        fits = fits and (keys.shape[3], values.shape[3]) == (dim, value_dim)
        fits = fits and keys.stride(3) == values.stride(3) == 1 and keys.device == values.device
    for pair in (moments, other_moments):
        for tensor, shape in zip(pair, ((kv_heads, dim), (kv_heads, dim, dim)), strict=True):
            if tensor is not None:
                fits = fits and tensor.dtype == torch.float32 and tensor.shape[1:] == shape
                fits = fits and tensor[0].is_contiguous()
    for tensor in masks:
        fits = fits and tensor.dtype == torch.bool and tensor.shape[1:] == near[0].shape[2:3] and tensor.stride(1) == 1
    for tensor, dtype in zip(rows, (torch.int64, torch.int64, torch.bool), strict=True):
        fits = fits and (tensor is None or (tensor.dtype == dtype and tensor.dim() == 1))
    for tensor in (*moments, *other_moments, *masks, *rows):
        fits = fits and (tensor is None or (tensor.shape[0] in (1, batch) and tensor.device == query.device))
    lengths = rows[0]
    if lengths is not None and lengths.is_cpu:  # on another device, to look would be to wait for it
        fits = fits and int(lengths.min()) >= 0 and int(lengths.max()) <= bulk[0].shape[2]
    fits = fits and _coded_fit(coded, query, bulk)
    if not (fits and near[0].device == query.device):
        tensors = (query, *near, *bulk, *moments, *other_moments, *coded)
        found = [(t.dtype, str(t.device), list(t.shape)) for t in tensors if t is not None]
        raise ValueError(f"the kernel cannot read these tensors as those of one layer: {found}")


def _coded_fit(coded: tuple[Tensor | None, ...], query: Tensor, bulk: tuple[Tensor, Tensor]) -> bool:
    """Whether codes, scales, centre and mean value are those of a sketch of this bulk, or none is given."""
    codes, scales, centre, mean_square, mean_value = coded
    if codes is None or scales is None or centre is None or mean_square is None:
        return codes is scales is centre is mean_square
    batch, kv_heads, capacity, size = codes.shape
    dim = query.shape[3]
    if mean_value is not None:
        of_values = mean_value.dtype == torch.float32 and mean_value.shape == (batch, kv_heads, bulk[1].shape[3])
        if not (of_values and mean_value.stride(2) == 1 and mean_value.device == query.device):
            return False
    return (
        (codes.dtype, scales.dtype) == (torch.uint8, torch.bfloat16)
        and centre.dtype == mean_square.dtype == torch.float32
        and (batch, kv_heads) == bulk[0].shape[:2]
        and scales.shape == codes.shape[:3]
        and centre.shape == (batch, kv_heads, dim)
        and mean_square.shape == (batch, kv_heads)
        and mean_square.is_contiguous()
        and any(size * 8 == dim * bits for bits in sketch.BITS)
        and codes.stride(3) == centre.stride(2) == 1
        and codes.device == scales.device == centre.device == mean_square.device == query.device
        and capacity >= bulk[0].shape[2]
    )
