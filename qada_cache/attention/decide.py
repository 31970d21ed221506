"""What the heads of one layer decide by in one call, and whether that was right."""

import weakref

import torch
from torch import Tensor

from ..criterion import StaticHeads, fixed_log_bulk, log_mass, logit, long_context
from ..kernels.decode_call import Rule
from ..kernels.query_adaptive import Moments, Step, estimated_log_bulk
from ..key_moments import KeyMoments
from ..state.layer import QAdALayer
from ..storage.geometry import Geometry
from ..storage.store import TokenStore


def rule_of(layer: QAdALayer, store: TokenStore, query: Tensor, scaling: float) -> Rule:
    """How the layer decides, made once for as long as it is asked for the same."""
    options = layer.options
    asked = weakref.ref(options), scaling, query.shape[1], query.device
    if layer.binding.rule is None or layer.binding.rule[0] != asked:
        criterion: str | StaticHeads | Tensor = options.criterion
        if isinstance(criterion, StaticHeads):
            shard, kv_heads = layer.shared.model.shard, store.near_keys.shape[1]
            group = query.shape[1] // kv_heads
            sizes = {"kv_heads": kv_heads, "group": group, "rank": shard.rank, "ranks": shard.size}
            criterion = criterion.of_layer(layer.index, **sizes, device=query.device)
        rule = Rule(
            scaling=scaling,
            threshold=options.threshold,
            group_rule=options.group_rule,
            criterion=criterion,
            pool_staged=options.update_moments,
            token_threshold=options.token_threshold,
        )
        layer.binding.rule = asked, rule
    return layer.binding.rule[1]


def other_moments(
    moments: KeyMoments, layer: QAdALayer, lengths: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Mean `[lengths, kv_heads, dim]` and covariance for bulks of these lengths, of the heads of this process."""
    return layer.kept_moments.get(moments, layer.index, lengths, device, layer.shared.model.shard.own)


def log_bulk(layer: QAdALayer, store: TokenStore, step: Step, geometry: Geometry, far_lse: Tensor | None) -> Tensor:
    """The `log A_bulk` that the layer decides by, `[batch, kv_heads, group, queries]`.

    `far_lse` is of the scores over the stored bulk `[batch, kv_heads, group * queries]`, for the criterion that asks
    for it ("oracle"); else None.
    """
    if far_lse is not None:
        return true_log_bulk(step, far_lse)
    if step.rule.kind == "gaussian":
        return estimate(layer, store, step, geometry)
    return fixed_log_bulk(step.rule.criterion, step.scores[..., 0])


def true_log_bulk(step: Step, far_lse: Tensor) -> Tensor:
    """Of what is stored (`far_lse`), and of what still lies in the near buffer."""
    log_staged = log_mass(step.scores, step.masks.staged)
    return torch.logaddexp(log_staged, far_lse.view_as(log_staged))


def estimate(layer: QAdALayer, store: TokenStore, step: Step, geometry: Geometry) -> Tensor:
    """Eq. 7's, `+inf` where there are no moments yet."""
    if not geometry.moment_lengths:  # nothing is decided
        return torch.full_like(step.scores[..., 0], torch.inf)
    moments, others = store.moments, layer.options.other_moments
    return estimated_log_bulk(
        step,
        None if moments is None else (moments.mean, moments.covariance, moments.known),
        [] if others is None else by_length(others, layer, geometry),
        pool=step.rule.pool_staged and geometry.any_staged,
    )


def by_length(moments: KeyMoments, layer: QAdALayer, geometry: Geometry) -> list[Moments]:
    """Another prompt's, as `query_adaptive.other_log_bulk` takes them: of each query those for its bulk's length."""
    lengths = geometry.moment_lengths
    means, covariances = other_moments(moments, layer, lengths, geometry.local.device)
    return list(zip((0, *lengths), means.split(1), covariances.split(1), strict=False))


def audit(layer: QAdALayer, step: Step, flags: Tensor, far_lse: Tensor, read_lse: Tensor) -> None:
    """Count how one call's decisions compare with the truth, on the device: see `CacheStats.audit`.

    `far_lse` is over the whole stored bulk, for every head, and `read_lse` over all that a head read
    `[batch, kv_heads, group * queries]`.
    """
    decided = step.masks.decided.unsqueeze(2)
    log_local, log_far = log_mass(step.scores, step.masks.local), true_log_bulk(step, far_lse)
    needed = long_context(log_local, log_far, logit(layer.options.threshold)) & decided
    all_lse = torch.logaddexp(log_local, log_far)
    missed = -torch.expm1((read_lse.view_as(all_lse) - all_lse).clamp_max(0.0)).masked_fill(~decided, 0.0)
    tallies = (decided.expand_as(flags), needed, needed & flags, flags, missed)
    layer.counters.audit(torch.stack([tally.sum(dtype=torch.float64) for tally in tallies]))
