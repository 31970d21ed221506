"""The short way of a decoded token through a layer in the same state as the pass's first layer: it takes over what that
layer has checked and found."""

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.operands import Query
from ..kernels.reference import has_gradients
from ..state.forward_pass import Lead
from ..state.layer import QAdALayer
from .checking import list_watched
from .decode import compute
from .plan import TokenCall, find_plan


def note_step(layer: QAdALayer, asked: Query, mask: Any, kwargs: dict[str, Any]) -> None:
    """After a call of attention for `asked` tokens, all of them stored: let the layer's next token `follow` the first
    layer of its pass, and later layers of this pass follow this one, if it is the first. Only calls count that a kernel
    has computed, with one token a row, which is no padding."""
    plan, forward_pass, store = layer.plan, layer.shared.forward_pass, layer.store
    single = asked.states.shape[2] == 1 and asked.valid is None and asked.visible is None
    # Budgets and audits are each layer's own; kinds of layers with more to do than to attend are not served.
    plain = not layer.options.device_budget and not layer.options.audit_every and type(layer) is QAdALayer
    if plan is None or plan.kernel is None or store is None or not (single and plain) or forward_pass.given is not None:
        return
    watched = list_watched(kwargs)
    if watched is not None and kwargs["scaling"] is not None and not layer.readers:
        plan.call = TokenCall(frozenset(kwargs), watched, asked.scaling)
    if layer.index == layer.shared.model.layers[0] and not torch.is_autocast_enabled(asked.states.device.type):
        state: dict[str, Any] = {"lengths": store.lengths, "flushed": store.flushed, "end": store.end}
        rows = forward_pass.find_rows(**state, queries=1, valid=None, device=asked.states.device)
        forward_pass.lead = Lead(layer.index, mask, layer.padding, **state, rows=rows)


def follow(
    lead: Lead,
    layer: QAdALayer,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """Attention `[batch, 1, heads, value_dim]` of a token, now stored. None, with nothing changed, if the call is not
    like the layer's last checked one (`plan.call`), or the layer's state differs from the first layer's (`lead`)."""
    store, plan = layer.store, layer.plan
    if store is None or plan is None or plan.call is None or layer.index == lead.layer or layer.incoming is not key:
        return None
    names, watched, scaling = plan.call
    alike = mask is lead.mask and layer.padding is lead.padding
    alike = alike and query.shape == plan.queries and query.device == lead.rows.device
    alike = alike and (store.end + 1, store.flushed) == (lead.end, lead.flushed) and store.has_room
    alike = alike and [length + 1 for length in store.lengths] == lead.lengths
    alike = alike and kwargs.keys() == names and all(kwargs[name] is None for name in watched)
    alike = alike and kwargs["scaling"] == scaling and not kwargs["dropout"]
    sinks = kwargs.get("s_aux")
    alike = alike and layer.bound_module() is module and not module.training and not has_gradients(query, sinks)
    if not alike or find_plan(layer, store, query, by_kernel=True, sinks=sinks is not None) is not plan:
        return None
    store.advance()
    asked = Query(query, scaling, sink_logits=None if sinks is None else sinks.reshape(-1), unstored=(key, value))
    out = compute(layer, store, asked, lead.rows, plan)
    layer.incoming = None
    return out.transpose(1, 2)  # still contiguous, as it has one token
