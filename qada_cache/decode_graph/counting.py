"""Decisions of replayed steps, which the graph counts on the device."""

import torch
from torch import Tensor

from .step import Step


def make_sums(step: Step) -> list[tuple[Tensor, Tensor]]:
    """Sums that a graph adds decisions to, all zero: for each asker `[kv_heads, group]` and `[kv_heads]`, int64, as
    `Counters.count_replays` takes them."""
    sizes = [(asker.plan.queries[1], asker.plan.operands.kv_heads) for asker in step.askers]
    with torch.inference_mode(False):  # they may be added to outside inference mode
        by_head = [
            torch.zeros(kv_heads, heads // kv_heads, dtype=torch.int64, device=step.device) for heads, kv_heads in sizes
        ]
        return [(each, each.new_zeros(len(each))) for each in by_head]


def add_local(flags: list[Tensor], sums: list[tuple[Tensor, Tensor]]) -> None:
    """Count local decisions, False in `flags` `[batch, kv_heads, group, 1]` of each asker, into its sums. Askers of the
    same shape are counted at once."""
    for shape in dict.fromkeys(each.shape for each in flags):
        alike = [(each, its_sums) for each, its_sums in zip(flags, sums, strict=True) if each.shape == shape]
        local = ~torch.stack([each for each, _ in alike])  # [layers, batch, kv_heads, group, 1]
        heads, groups = local.sum(dim=(1, 4)), local.all(dim=3).sum(dim=(1, 3))
        torch._foreach_add_([by_head for _, (by_head, _) in alike], list(heads.unbind()))
        torch._foreach_add_([by_kv_head for _, (_, by_kv_head) in alike], list(groups.unbind()))
