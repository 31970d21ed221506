"""One prefill for many ways of deciding: exact prefill does not depend on how a cache decides afterwards."""

import copy

from transformers import PreTrainedModel

from qada_cache import QAdACache
from qada_cache.layer import QAdALayer


def forked(cache: QAdACache, model: PreTrainedModel, **options: object) -> QAdACache:
    """A copy of what `cache` holds, its counters at zero, that decides by other `QAdACache` options.

    `cache` must hold nothing but an exact prefill, with the options' sizes, and running moments (`moments="current"`).
    """
    twin = copy.deepcopy(cache)
    twin._shared.options = QAdACache(model, **options)._shared.options  # type: ignore[arg-type]  # for it to check
    for layer in twin.layers:
        if isinstance(layer, QAdALayer) and layer.store is not None and not layer.options.tracks_moments:
            layer.store.moments = None
    return twin
