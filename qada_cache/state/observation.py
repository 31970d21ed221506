"""Describes one query-adaptive call of one layer to an observer of the cache."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ..kernels.operands import Query, Rows
from ..kernels.query_adaptive import Chosen


@dataclass(eq=False)
class Observation:
    """A call's query, the decisions of heads, and the tokens that they read. Nobody may write to its tensors.

    Masses and decisions are `[batch, kv_heads, group, queries]`, masses float32. Tokens of a bulk are counted from the
    first after the sinks, padding left out.
    """

    layer: int  # its index in the cache
    query: Query
    rows: Rows  # `decided` is False for padding queries, `bulk_tokens` 0 for queries without a bulk
    log_local: Tensor  # `log A_local`
    log_bulk: Tensor  # the `log A_bulk` that heads decided by, `[batch or 1, kv_heads, group, queries or 1]`
    flags: Tensor  # bool, True for long-context
    read_lse: Tensor  # the log-sum-exp of the scores of all that was read, near and far, sinks learned by a model too
    bulk_lengths: tuple[int, ...]  # tokens of each row's stored bulk
    # `whole[row][kv_head]`: whether queries of this head read all tokens of the bulk. Those queries are in none of
    # `chosen`, and flagged, except under the oracle, which reads all. May be empty if there are none.
    whole: list[list[bool]]
    chosen: list[Chosen]  # the tokens that other queries read, of the same heads or of others
    find_true_log_bulk: Callable[[], Tensor]  # see `true_log_bulk`

    @cached_property
    def true_log_bulk(self) -> Tensor:
        """The true `log A_bulk`. The first to ask has the layer's whole bulk read once more; these bytes count as an
        audit's. RuntimeError, if nobody asked during the call: the bulk may be another by now."""
        return self.find_true_log_bulk()

    def close(self) -> None:
        """End the call: `true_log_bulk` can no longer be computed."""
        self.find_true_log_bulk = _refuse


def _refuse() -> Tensor:
    raise RuntimeError("the call that this Observation is of is over: ask for true_log_bulk in the observer itself")


Observer = Callable[[Observation], None]
