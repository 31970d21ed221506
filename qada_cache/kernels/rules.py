"""What a fused kernel is told of how to decide."""

from torch import Tensor

from ..criterion import logit


def decision_rules(criterion: str | Tensor, group_rule: str, threshold: float) -> tuple[str, Tensor | None, str, float]:
    """The arguments of `decode_reference.fused_decode` as kernels take them.

    Returns:
        the criterion's name ("static" for a table), the table or None, the group rule that gives the reference's
        decision without its special cases, and the margin `log A_local - log A_bulk` below which a head is
        long-context, see `criterion.long_context`.
    """
    table = criterion if isinstance(criterion, Tensor) else None
    kind = "static" if table is not None else str(criterion)
    if kind in ("dense", "local"):
        group_rule = "head"  # nothing to agree on
    elif group_rule == "mean" and threshold >= 1.0:
        group_rule = "any"  # as in `criterion.group_decision`: a share that rounds to 1 is below 1
    return kind, table, group_rule, logit(threshold)
