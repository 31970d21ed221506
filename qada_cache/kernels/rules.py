"""How fused kernels are told to decide, and checks of the tensors whose addresses they are given."""

import torch
from torch import Tensor

from ..criterion import logit
from ..sketch import BITS, Sketch, segments_of


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
    sketch: Sketch | None = None,
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
        sketch: its sketch.
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
    kept = () if sketch is None else tuple(sketch.tensors().values())
    fits = fits and (sketch is None or _sketch_fits(sketch, query, bulk))
    if not (fits and near[0].device == query.device):
        tensors = (query, *near, *bulk, *moments, *other_moments, *kept)
        found = [(t.dtype, str(t.device), list(t.shape)) for t in tensors if t is not None]
        raise ValueError(f"the kernel cannot read these tensors as those of one layer: {found}")


def _sketch_fits(sketch: Sketch, query: Tensor, bulk: tuple[Tensor, Tensor]) -> bool:
    """Whether it is one of this bulk, and where kernels that are given addresses alone take it to lie."""
    heads, dim, value_dim = tuple(bulk[0].shape[:2]), query.shape[3], bulk[1].shape[3]
    capacity = sketch.codes.shape[2]
    segments = segments_of(capacity) if capacity else 0
    expected = {
        "codes": (torch.uint8, (capacity, dim * sketch.bits // 8)),
        "scales": (torch.uint8, (capacity,)),
        "units": (torch.float32, (segments,)),
        "centres": (torch.bfloat16, (segments, dim)),
        "weights": (torch.bfloat16, (segments, dim)),
        "mean_squares": (torch.float32, (segments,)),
        "mean_value": (torch.float32, (value_dim,)),
        "slopes": (torch.int8, (value_dim, dim)),
        "slope_units": (torch.float32, (dim,)),
    }
    found = sketch.tensors()
    return (
        sketch.bits in BITS
        and capacity >= bulk[0].shape[2]
        and all(
            (tensor.dtype, tuple(tensor.shape)) == (dtype, heads + shape)
            and tensor.is_contiguous()
            and tensor.device == query.device
            for tensor, (dtype, shape) in ((found[name], expected[name]) for name in expected)
        )
    )
