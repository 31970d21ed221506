"""The kernel that computes a layer's decode steps, and its operands: made once for each version of the storage."""

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

CHECKS = False  # True in tests: every plan that is used is compared with a new one


class TokenCall(NamedTuple):
    """The arguments, beside tensors, that a module gives to attention for one token, once a cache has checked them."""

    names: frozenset[str]  # of all arguments
    watched: tuple[str, ...]  # names of those that have to be None
    scaling: float


@dataclass(eq=False)
class Plan:
    """How calls with queries of one shape are computed. It keeps the storage's tensors alive, so a layer drops its plan
    before they are replaced. A copy of a layer has no plan, as its tensors are others."""

    kind: tuple[Any, ...]  # what the calls have in common, compared by `find_plan`
    version: tuple[int, ...]  # `TokenStore.version` that the operands are of
    kernel: Callable | None  # None: torch computes the calls
    operands: Operands
    queries: torch.Size  # `[batch, heads, queries, dim]`
    storer: Storer | None = None  # stores a single token before `kernel`; None: torch or the kernel stores it
    constant: Tensor | None = None  # see `find_constant`
    call: TokenCall | None = None  # the last call that was checked in full, if calls like it need not (`step.follow`)

    def __deepcopy__(self, memo: dict) -> None:
        return None  # the copy's tensors are others

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
    """The layer's plan for queries `states` `[batch, heads, queries, dim]`, with learned `sinks` or without. Unless
    `by_kernel`, torch computes them."""
    kind, version = (by_kernel, sinks, states.shape, states.dtype, states.device), store.version
    # Steps keep their plan over turns, so that a graph of them stays valid.
    name = "plan" if states.shape[2] == 1 else "turn_plan"
    plan: Plan | None = getattr(layer, name)
    if plan is None or plan.kind != kind or plan.version != version:
        layer.drop_old_plans(version)
        plan = _make_plan(layer, store, states, kind)
        setattr(layer, name, plan)
    elif CHECKS:
        _check_current(plan, _make_plan(layer, store, states, kind))
    return plan


def _make_plan(layer: Asker, store: TokenStore, states: Tensor, kind: tuple[Any, ...]) -> Plan:
    by_kernel, sinks = kind[:2]
    kernel = find_kernel(layer, store, states, sinks=sinks) if by_kernel else None
    operands = find_operands(layer, store, by_kernel=kernel is not None)
    return Plan(kind, store.version, kernel, operands, states.shape, find_storer(layer, store, states, kernel))


def find_operands(layer: Asker, store: TokenStore, *, by_kernel: bool) -> Operands:
    """The layer's tensors and options for a call. If a kernel computes it (`by_kernel`), also the records that it reads
    and the counters that it adds bytes to on the device."""
    bulk, sketch, options, counters = store.bulk, store.sketch, layer.options, layer.counters
    # Criteria that compare no masses need a finite threshold.
    cut = logit(options.threshold) if options.criterion in ("gaussian", "oracle") else 0.0
    near, far = (store.near_keys, store.near_values), (bulk.keys, bulk.values)
    operands = Operands(near[0], store.find_values(*near), far[0], store.find_values(*far), cut)
    operands.group_rule, operands.token_threshold = options.group_rule, options.token_threshold
    if sketch is not None and (sketch.in_use or not by_kernel):
        operands.sketch = sketch.tensors
    if by_kernel and bulk.sketch is not None and (records := bulk.records) is not None:
        # Records need the sketch to decode keys, even if no tokens are selected by it.
        operands.records, operands.sketch = records, bulk.sketch.tensors
        operands.token_threshold = options.token_threshold if store.selects else 0.0
    if by_kernel:
        device = store.near_keys.device
        operands.bulk_read_bytes = counters.find_on(device, "bulk_read_bytes")
        if operands.sketch is not None:
            operands.sketch_read_bytes = counters.find_on(device, "sketch_read_bytes")
    return operands


def find_kernel(layer: Asker, store: TokenStore, states: Tensor, *, sinks: bool = False) -> Callable | None:
    """The choice of `choice.choose_kernel` for queries `[batch, heads, queries, dim]`, with learned `sinks` or
    without."""
    bulk, sketch, options = store.bulk, store.sketch, layer.options
    records = bulk.records
    sketch = sketch if records is None else bulk.sketch  # records need it, even if it selects no tokens
    layout = sketch.layout if sketch is not None and sketch.in_use else None
    values = store.find_values(bulk.keys, bulk.values)
    call = states[:, :, :1], bulk.keys, values, options.criterion, options.kernels
    return choice.choose_kernel(*call, layout=layout, records=records, sinks=sinks, turn=states.shape[2] > 1)


def find_storer(layer: Asker, store: TokenStore, states: Tensor, kernel: Callable | None) -> Storer | None:
    """The storer of a token before `kernel` is launched for queries `[batch, heads, queries, dim]`; None if torch or
    the C++ kernel stores it."""
    if kernel is None or states.shape[2] > 1 or kernel is compiled_decode.fused_decode:
        return None
    return make_storer(layer.options.kernels, store.near_keys, store.near_values, states.shape[1])


def _check_current(plan: Plan, fresh: Plan) -> None:
    """Raise AssertionError if `plan` differs from `fresh`, which was made now."""
    held, wanted = (
        {name: value for name, value in vars(each.operands).items() if name not in ("bound", "checked_for")}
        for each in (plan, fresh)
    )
    old = [name for name in held if _describe(held[name]) != _describe(wanted[name])]
    if plan.kernel is not fresh.kernel or old:
        raise AssertionError(f"a plan of version {plan.version} is old: {old or plan.kernel}")


def _describe(part: Any) -> Any:
    """The addresses, layouts and numbers that a kernel reads of an operand."""
    if isinstance(part, Records):
        return part.layout, *map(_describe, (part.tensor, part.open, part.weights))
    if isinstance(part, Tensor):
        return part.data_ptr(), part.shape, part.stride(), part.dtype, part.device
    return [*map(_describe, part.to_tensors().values())] if isinstance(part, Sketch) else part
