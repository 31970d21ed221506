"""What the fused kernel is told of one layer when it decodes one token."""

import weakref
from collections.abc import Callable

from torch import Tensor

from ..kernels import choice
from ..kernels.decode_call import DecodeCall
from ..state.layer import QAdALayer
from ..storage.geometry import Geometry
from ..storage.reading import learn
from ..storage.store import TokenStore
from .decide import other_moments, rule_of


def chosen_kernel(layer: QAdALayer, store: TokenStore, query: Tensor) -> Callable | None:
    """What `choice.decode_kernel` says of a query `[batch, heads, 1, dim]`, asked again when anything is different."""
    bulk, sketch, options = store.bulk, store.sketch, layer.options
    layout = sketch.layout if sketch is not None and sketch.in_use else None
    asked = weakref.ref(options), layout, bulk.capacity, query.shape, query.dtype, query.device
    if layer.binding.kernel is None or layer.binding.kernel[0] != asked:
        kernel = choice.decode_kernel(query, bulk.keys, bulk.values, options.criterion, options.kernels, layout=layout)
        layer.binding.kernel = asked, kernel
    return layer.binding.kernel[1]


def one_token(
    layer: QAdALayer, store: TokenStore, query: Tensor, geometry: Geometry, kernel: Callable, *, scaling: float
) -> tuple[Tensor, Tensor]:
    """Call `kernel`, a `fused_decode`, for `decode.query_adaptive` with one query a row (arguments as there).

    Nothing here waits for the device: small tensors of host numbers are copied to it without blocking.

    Returns:
        `[batch, heads, 1, value_dim]` in the query's dtype, bool flags `[batch, kv_heads, group, 1]`.
    """
    bulk, sketch, counters = store.bulk, store.sketch, layer.counters
    bulk_keys, bulk_values = bulk.in_place()
    call = DecodeCall(
        query,
        store.near_keys,
        store.near_values,
        bulk_keys,
        bulk_values,
        geometry.rows,
        rule_of(layer, store, query, scaling),
        pulled=counters.on(query.device, "pulled_bytes"),
        binding=layer.binding,
    )
    if call.rule.kind == "gaussian":
        _add_moments(call, layer, store, geometry)
    if sketch is not None and sketch.in_use:
        call.sketch, call.sketched = sketch.tensors, counters.on(query.device, "sketched_bytes")
    elsewhere = bulk.offloaded and layer.options.device_budget
    if elsewhere:
        call.places = bulk.residents.places(bulk.lengths)
        call.spared = counters.on(query.device, "spared_bytes")
    out, flags = kernel(call)
    if elsewhere and (moved := learn(bulk, flags.any(dim=-1))):
        counters.pulled_bytes += moved
    return out, flags.unsqueeze(-1)


def _add_moments(call: DecodeCall, layer: QAdALayer, store: TokenStore, geometry: Geometry) -> None:
    """Those that the layer decides by."""
    if (moments := store.moments) is not None:
        call.mean, call.covariance, call.count = moments.mean, moments.covariance, moments.known
    if (others := layer.options.other_moments) is not None:
        found = other_moments(others, layer, geometry.row_lengths, call.query.device)
        call.other_mean, call.other_covariance = found
