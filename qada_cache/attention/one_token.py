"""What the fused kernel is told of one layer when it decodes one token."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..criterion import StaticHeads
from ..state.layer import QAdALayer
from ..storage.geometry import Geometry
from ..storage.reading import learn
from ..storage.store import TokenStore
from .decide import other_moments, static_heads


def one_token(
    layer: QAdALayer, store: TokenStore, query: Tensor, geometry: Geometry, kernel: Callable, *, scaling: float
) -> tuple[Tensor, Tensor]:
    """Call `kernel`, a `fused_decode`, for `decode.query_adaptive` with one query a row (arguments as there).

    Nothing here waits for the device: small tensors of host numbers are copied to it without blocking.

    Returns:
        `[batch, heads, 1, value_dim]` in the query's dtype, bool flags `[batch, kv_heads, group]`.
    """
    options, bulk, columns = layer.options, store.bulk, slice(0, store.sinks + store.end)
    elsewhere: dict[str, Tensor] = {}
    if bulk.offloaded and options.device_budget:
        elsewhere = {
            "places": bulk.residents.places(bulk.lengths),
            "spared": layer.counters.on(query.device, "spared_bytes"),
        }
    out, flags = kernel(
        query,
        store.near_keys[:, :, columns],
        store.near_values[:, :, columns],
        *bulk.in_place(),
        local=geometry.local.flatten(1),
        staged=geometry.staged.flatten(1),
        bulk_lengths=geometry.stored.flatten(),
        decided=geometry.decided.flatten(),
        scaling=scaling,
        threshold=options.threshold,
        group_rule=options.group_rule,
        pulled=layer.counters.on(query.device, "pulled_bytes"),
        **_criterion(layer, store, query, geometry),
        **_tokens(layer, store, query),
        **elsewhere,
    )
    if elsewhere and (moved := learn(bulk, flags.any(dim=-1))):
        layer.counters.pulled_bytes += moved
    return out, flags


def _tokens(layer: QAdALayer, store: TokenStore, query: Tensor) -> dict[str, Any]:
    """The arguments that have tokens chosen."""
    if store.sketch is None or not store.sketch.in_use:
        return {}
    sketched = layer.counters.on(query.device, "sketched_bytes")
    return {"sketch": store.sketch.tensors, "sketched": sketched, "token_threshold": layer.options.token_threshold}


def _criterion(layer: QAdALayer, store: TokenStore, query: Tensor, geometry: Geometry) -> dict[str, Any]:
    """The kernel's arguments that say how to decide."""
    options, moments, kv_heads = layer.options, store.moments, store.near_keys.shape[1]
    if isinstance(options.criterion, StaticHeads):
        group = query.shape[1] // kv_heads
        table = static_heads(options.criterion, layer, kv_heads=kv_heads, group=group, device=query.device)
        return {"criterion": table}
    if options.criterion != "gaussian":
        return {"criterion": options.criterion}
    told: dict[str, Any] = {}
    if moments is not None:
        told |= {"mean": moments.mean, "covariance": moments.covariance, "count": moments.known}
        told |= {"pool_staged": options.update_moments}
    if options.other_moments is not None:
        kept = other_moments(options.other_moments, layer, geometry.row_lengths, query.device)
        # Rows of their own are put together; one row for all is not copied.
        mean, covariance = kept[0] if len(kept) == 1 else (torch.cat(parts) for parts in zip(*kept, strict=True))
        told |= {"other_mean": mean, "other_covariance": covariance}
    return told
