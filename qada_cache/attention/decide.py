"""Which heads need the long context for the queries of one call, and whether that was right."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..criterion import StaticHeads, long_context
from ..kernels import decision
from ..key_moments.key_moments import KeyMoments
from ..key_moments.running import RunningMoments
from ..state.layer import QAdALayer
from ..storage.geometry import Geometry


def needs_long_context(
    layer: QAdALayer,
    moments: RunningMoments | None,
    packed: Tensor,
    scores: Tensor,
    far_lse: Tensor | None,
    geometry: Geometry,
    *,
    scaling: float,
) -> Tensor:
    """Heads that need the long context, False where there is no bulk.

    Args:
        layer: whose options decide.
        moments: running moments of its stored keys, if it keeps any.
        packed: queries `[batch, kv_heads, group * queries, dim]`.
        scores: of them over the near buffer, `[batch, kv_heads, group, queries, columns]` float32.
        far_lse: log-sum-exp of their scores over the stored bulk `[batch, kv_heads, group * queries]`, for the
            criterion that asks for it ("oracle"); else None.
        geometry: of the call.
        scaling: multiplies the scores.

    Returns:
        bool `[batch, kv_heads, group, queries]`.
    """
    options, log_bulk = layer.options, None
    criterion: str | StaticHeads | Tensor = options.criterion
    if isinstance(criterion, StaticHeads):
        kv_heads, group = scores.shape[1:3]
        criterion = static_heads(criterion, layer, kv_heads=kv_heads, group=group, device=scores.device)
    if far_lse is not None:
        log_bulk = log_bulk_mass(scores, far_lse, geometry)
    elif options.criterion == "gaussian":
        log_bulk = estimated_log_bulk(layer, moments, packed, scores, geometry, scaling=scaling)
    return decision.needs_long_context(
        scores,
        log_bulk,
        criterion=criterion,
        local=geometry.local,
        decided=geometry.decided,
        threshold=options.threshold,
        group_rule=options.group_rule,
    )


def static_heads(table: StaticHeads, layer: QAdALayer, *, kv_heads: int, group: int, device: torch.device) -> Tensor:
    """A layer's row of the table, for the heads that this process has: bool `[kv_heads, group]`."""
    shard = layer.shared.model.shard
    return table.of_layer(layer.index, kv_heads=kv_heads, group=group, device=device, rank=shard.rank, ranks=shard.size)


def other_moments(
    moments: KeyMoments, layer: QAdALayer, lengths: Sequence[int], device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """A layer's moments for bulks of these lengths, as `KeyMoments.layer`, of the heads that this process has."""
    own = layer.shared.model.shard.own
    return [(own(mean, 1), own(covariance, 1)) for mean, covariance in moments.layer(layer.index, lengths, device)]


def log_bulk_mass(scores: Tensor, far_lse: Tensor, geometry: Geometry) -> Tensor:
    """The true `log A_bulk`: of what is stored (`far_lse`), and of what still lies in the near buffer."""
    log_staged = decision.log_mass(scores, geometry.staged)
    return torch.logaddexp(log_staged, far_lse.view_as(log_staged))


def estimated_log_bulk(
    layer: QAdALayer,
    moments: RunningMoments | None,
    packed: Tensor,
    scores: Tensor,
    geometry: Geometry,
    *,
    scaling: float,
) -> Tensor:
    """Eq. 7's `log A_bulk` `[batch, kv_heads, group, queries]`, `+inf` where there are no moments yet."""
    options, current, other = layer.options, None, None
    if moments is not None:
        current = decision.current_log_bulk(
            packed.float(),
            scores,
            moments.mean,
            moments.covariance,
            moments.known,
            staged=geometry.staged if options.update_moments and geometry.any_staged else None,
            bulk_tokens=geometry.bulk_tokens,
            scaling=scaling,
        )
    if options.other_moments is not None:
        other = other_log_bulk(options.other_moments, layer, packed, scores, geometry, scaling=scaling)
    return decision.larger(current, other)


def other_log_bulk(
    moments: KeyMoments, layer: QAdALayer, packed: Tensor, scores: Tensor, geometry: Geometry, *, scaling: float
) -> Tensor:
    """Eq. 7's `log A_bulk` by another prompt's moments, for each query by those for its own bulk's length."""
    log_bulk = scores.new_full(scores.shape[:-1], -torch.inf)
    shortest = 0
    kept = other_moments(moments, layer, geometry.moment_lengths, packed.device)
    for length, pair in zip(geometry.moment_lengths, kept, strict=True):
        found = decision.other_log_bulk(
            packed.float(), scores, *pair, bulk_tokens=geometry.bulk_tokens, scaling=scaling
        )
        log_bulk = torch.where((geometry.bulk_tokens > shortest).unsqueeze(2), found, log_bulk)
        shortest = length
    return log_bulk


def audit(
    layer: QAdALayer, flags: Tensor, scores: Tensor, far_lse: Tensor, read_lse: Tensor, geometry: Geometry
) -> None:
    """Count how one call's decisions compare with the truth, on the device: see `CacheStats.audit`.

    `far_lse` is over the whole stored bulk, for every head, and `read_lse` over all that a head read
    `[batch, kv_heads, group * queries]`; the other arguments as for `needs_long_context`.
    """
    decided = geometry.decided.unsqueeze(2)
    log_local, log_bulk = decision.log_mass(scores, geometry.local), log_bulk_mass(scores, far_lse, geometry)
    needed = long_context(log_local, log_bulk, layer.options.threshold) & decided
    all_lse = torch.logaddexp(log_local, log_bulk)
    missed = -torch.expm1((read_lse.view_as(all_lse) - all_lse).clamp_max(0.0)).masked_fill(~decided, 0.0)
    tallies = (decided.expand_as(flags), needed, needed & flags, flags, missed)
    layer.counters.audit(torch.stack([tally.sum(dtype=torch.float64) for tally in tallies]))
