"""What computes a layer's steps, and from what: made once, and used as long as storage is of one version."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..criterion import StaticHeads, logit
from ..kernels import choice
from ..kernels.cpu import compiled_decode
from ..kernels.operands import Operands
from ..kernels.storing import Storer, make_storer
from ..models import read_sizes
from ..sketch.codec import Sketch
from ..sketch.coded import Records
from ..state.asker import Asker
from ..storage import TokenStore

CHECKS = False  # whether every plan that is used is compared with one made anew, as the tests have it


class TokenCall(NamedTuple):
    """What a module gives to attention for one token, beside tensors, and a cache that has checked it."""

    names: frozenset[str]  # of all arguments
    watched: tuple[str, ...]  # of these, those that have to be None
    scaling: float


@dataclass(eq=False)
class Plan:
    """Of calls with queries of one shape. It keeps the tensors that it is of, so a layer has none while they are
    replaced; a copy of a layer begins without."""

    kind: tuple[Any, ...]  # of its calls
    version: tuple[int, ...]  # of the storage
    kernel: Callable | None  # None: torch computes them
    operands: Operands
    queries: torch.Size  # `[batch, heads, queries, dim]`
    storer: Storer | None = None  # of single tokens before `kernel`, which stores them itself or has torch do it
    constant: Tensor | None = None  # see `find_constant`
    call: TokenCall | None = None  # of the last call that took the long way, if others like it need not

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def find_constant(self, layer: Asker) -> Tensor:
        """`Query.log_bulk` of criteria that compare no masses, and of queries without a bulk: `+inf` for long-context
        heads, `-inf` for local ones, float32 `[1, kv_heads, group, 1]`."""
        if self.constant is None:
            kv_heads, criterion = self.operands.kv_heads, layer.options.criterion
            shape, device = (kv_heads, self.queries[1] // kv_heads), self.operands.near_keys.device
            long_context = torch.full(shape, criterion != "local", dtype=torch.bool, device="cpu")
            if isinstance(criterion, StaticHeads):
                own_heads = layer.shared.model.shard.take_own_queries(criterion.long_context[layer.index])
                config = layer.shared.model.config
                if config is not None and config.is_heterogeneous:  # a row is as wide as for the layer with most heads
                    by_query_heads = len(own_heads) == read_sizes(config)[1]
                    own_heads = own_heads[: self.queries[1] if by_query_heads else kv_heads]
                long_context &= own_heads.reshape(kv_heads, -1).cpu()  # one entry for a group broadcasts
            constant = torch.full(shape, -torch.inf, dtype=torch.float32, device="cpu")
            constant = constant.masked_fill_(long_context, torch.inf)[None, :, :, None]
            self.constant = constant.to(device, non_blocking=True)
        return self.constant


def find_plan(layer: Asker, store: TokenStore, states: Tensor, *, by_kernel: bool, sinks: bool = False) -> Plan:
    """The layer's, for queries `[batch, heads, queries, dim]`, with learned `sinks` or without; torch computes them
    unless `by_kernel` is allowed."""
    kind, version = (by_kernel, sinks, states.shape, states.dtype, states.device), store.version

    def make() -> Plan:
        kernel = find_kernel(layer, store, states, sinks=sinks) if by_kernel else None
        operands = find_operands(layer, store, by_kernel=kernel is not None)
        return Plan(kind, version, kernel, operands, states.shape, find_storer(layer, store, states, kernel))

    plan: Plan | None = layer.plan
    if plan is None or plan.kind != kind or plan.version != version:
        plan = layer.plan = make()
    elif CHECKS:
        _refuse_old(plan, make())
    return plan


def find_operands(layer: Asker, store: TokenStore, *, by_kernel: bool) -> Operands:
    """What the layer has for a call; what a kernel reads in place, and where it counts, if one computes it."""
    bulk, sketch, options, counters = store.bulk, store.sketch, layer.options, layer.counters
    # Criteria that compare no masses need a finite threshold.
    cut = logit(options.threshold) if options.criterion in ("gaussian", "oracle") else 0.0
    near, far = (store.near_keys, store.near_values), (bulk.keys, bulk.values)
    found = Operands(near[0], store.find_values(*near), far[0], store.find_values(*far), cut)
    found.group_rule, found.token_threshold = options.group_rule, options.token_threshold
    if sketch is not None and (sketch.in_use or not by_kernel):
        found.sketch = sketch.tensors
    if by_kernel and bulk.sketch is not None and (records := bulk.records) is not None:
        found.records, found.sketch = records, bulk.sketch.tensors  # keys follow from it, whether or not it selects
        found.token_threshold = options.token_threshold if store.selects else 0.0
    if by_kernel:
        device = store.near_keys.device
        found.bulk_read_bytes = counters.find_on(device, "bulk_read_bytes")
        if found.sketch is not None:
            found.sketch_read_bytes = counters.find_on(device, "sketch_read_bytes")
    return found


def find_kernel(layer: Asker, store: TokenStore, states: Tensor, *, sinks: bool = False) -> Callable | None:
    """What `choice.choose_kernel` says of queries `[batch, heads, queries, dim]`, with learned `sinks` or without."""
    bulk, sketch, options = store.bulk, store.sketch, layer.options
    records = bulk.records
    sketch = sketch if records is None else bulk.sketch  # which records lie behind, whether or not it selects
    layout = sketch.layout if sketch is not None and sketch.in_use else None
    values = store.find_values(bulk.keys, bulk.values)
    call = states[:, :, :1], bulk.keys, values, options.criterion, options.kernels
    return choice.choose_kernel(*call, layout=layout, records=records, sinks=sinks, turn=states.shape[2] > 1)


def find_storer(layer: Asker, store: TokenStore, states: Tensor, kernel: Callable | None) -> Storer | None:
    """What stores a token before `kernel` is launched for queries `[batch, heads, queries, dim]`."""
    if kernel is None or states.shape[2] > 1 or kernel is compiled_decode.fused_decode:  # which stores it itself
        return None
    return make_storer(layer.options.kernels, store.near_keys, store.near_values, states.shape[1])


def _refuse_old(plan: Plan, fresh: Plan) -> None:
    """Raise AssertionError, if a plan is not what it would be if made now."""
    found, wanted = (
        {name: value for name, value in vars(each.operands).items() if name not in ("bound", "checked_for")}
        for each in (plan, fresh)
    )
    old = [name for name in found if _describe(found[name]) != _describe(wanted[name])]
    if plan.kernel is not fresh.kernel or old:
        raise AssertionError(f"a plan of version {plan.version} is old: {old or plan.kernel}")


def _describe(part: Any) -> Any:
    """What a kernel goes by: where tensors lie, and how."""
    if isinstance(part, Records):
        return part.layout, *map(_describe, (part.tensor, part.open, part.weights))
    if isinstance(part, Tensor):
        return part.data_ptr(), part.shape, part.stride(), part.dtype, part.device
    return [*map(_describe, part.to_tensors().values())] if isinstance(part, Sketch) else part
