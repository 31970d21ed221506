"""One prefill for many ways of deciding: exact prefill does not depend on how a cache decides afterwards."""

import copy

from transformers import PreTrainedModel

from qada_cache import QAdACache
from qada_cache.layer import QAdALayer


def forked(cache: QAdACache, model: PreTrainedModel, **options: object) -> QAdACache:
    """A copy of what `cache` holds, its counters at zero, that decides by other `QAdACache` options.

    `cache` must hold nothing but an exact prefill, with the options' sizes, and running moments (`moments="current"`).
    """
    policy = QAdACache(model, **options)._policy  # type: ignore[arg-type]  # for QAdACache to check
    twin = copy.deepcopy(cache)
    policy.progress = twin._policy.progress
    twin._policy = policy
    for layer in twin.layers:
        if isinstance(layer, QAdALayer) and layer.store is not None:
            layer.policy = policy
            if not policy.tracks_moments:
                layer.store.moments = None
    return twin
