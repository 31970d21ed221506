"""Decisions and counts of one layer of attention for its queries, which may attend to another layer's keys."""

from typing import Any

from torch import Tensor

from ..kernels.reference import has_gradients
from ..key_moments.of_layer import LayerMoments
from . import Options, Shared
from .counters import Counters


class Asker:
    """One layer's queries: what they have decided and read. A layer without keys of its own has this object alone: its
    queries attend to an earlier layer's keys in the same passes, and so see the same tokens."""

    def __init__(self, shared: Shared, index: int, keys_of: int) -> None:
        """Layer `index` attends to keys of layer `keys_of`, its own or another's."""
        self.shared, self.index, self.keys_of = shared, index, keys_of
        self.forget()

    def forget(self) -> None:
        """Drop what is known of earlier queries."""
        self.bound_module: Any = None  # weak reference to the attention module served
        self.counters, self.kept_moments = Counters(), LayerMoments()
        self.drop_plans()

    def drop_plans(self) -> None:
        """Drop the plans, `Plan` of attention/plan.py, as buffers of the storage may be replaced."""
        self.plan: Any = None  # of the last step
        self.turn_plan: Any = None  # of the last call with several tokens that heads decided for

    def drop_old_plans(self, version: tuple[int, ...]) -> None:
        """Drop the plans if one is of another version of the storage: it keeps buffers that were replaced."""
        if any(plan is not None and plan.version != version for plan in (self.plan, self.turn_plan)):
            self.drop_plans()

    @property
    def options(self) -> Options:
        """The cache's options."""
        return self.shared.options

    def find_query_energies(self, kv_heads: int, dim: int) -> Tensor | None:
        """Mean squares of the channels of another prompt's queries, float32 `[kv_heads, dim]`, by the keys that they
        ask; None if the options name none."""
        energies = self.options.query_energies
        return None if energies is None else self.shared.model.shard.take_own(energies[self.keys_of])[:kv_heads, :dim]

    def is_audited(self) -> bool:
        """Whether it is this layer's turn to be audited in the query-adaptive call under way."""
        every, managed, steps = self.options.audit_every, self.shared.model.layers, self.counters.steps
        return bool(every) and steps % every == 0 and managed[steps // every % len(managed)] == self.index

    def is_observed(self) -> bool:
        """Whether the query-adaptive call under way is audited or has an observer. If so, torch computes it, as kernels
        do not return which tokens they select."""
        return self.shared.observer is not None or self.is_audited()


def refuse_gradients(*parts: Tensor | None) -> None:
    """Raise RuntimeError if a result computed of these would have gradients: it is written in place, or by kernels."""
    if has_gradients(*parts):
        raise RuntimeError(
            "QAdACache serves inference only: call the model under torch.no_grad() (generate() does), "
            "or train without a cache"
        )
