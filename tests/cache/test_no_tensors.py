"""Code that takes a cache for keys and values of each layer, or moves these itself, is told what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import exact, forced, generate, prompt, tiny
from transformers import DynamicCache, PreTrainedModel

from qada_cache import QAdACache


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny()


PAIR = (torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))
TAKEN_FOR_TENSORS: dict[str, tuple[Callable[[QAdACache], Any], type[Exception], str]] = {
    "index": (lambda cache: cache[0], TypeError, "cannot be indexed by 0: .*DynamicCache where tensors are needed"),
    "slice": (lambda cache: cache[:2], TypeError, r"cannot be indexed by slice.*save\(\)"),
    "write": (lambda cache: cache.__setitem__(0, PAIR), TypeError, "cannot be written to at 0: .*give the cache"),
    "search": (lambda cache: PAIR in cache, TypeError, "cannot be searched"),
    "zip": (lambda cache: list(zip(cache, [1], strict=False)), TypeError, "cannot be unpacked .*DynamicCache"),
    "reversed": (lambda cache: list(reversed(cache)), TypeError, "cannot be indexed"),
    "key_cache": (lambda cache: cache.key_cache[0], AttributeError, "no attribute 'key_cache': .*give the cache"),
    "value_cache": (lambda cache: cache.value_cache, AttributeError, "no attribute 'value_cache': "),
    "to legacy": (
        lambda cache: cache.to_legacy_cache(),
        AttributeError,
        "no attribute 'to_legacy_cache': .*DynamicCache",
    ),
    "from legacy": (
        lambda cache: type(cache).from_legacy_cache((PAIR,)),
        TypeError,
        "made of keys and values: .*model",
    ),
    "to": (lambda cache: cache.to("cpu"), AttributeError, "no attribute 'to': "),
    "unknown": (lambda cache: cache.unknown, AttributeError, "no attribute 'unknown'$"),
    "offload": (lambda cache: cache.offload(0), NotImplementedError, r"leave out offload\(\); offloading=False"),
    "prefetch": (lambda cache: cache.prefetch(0, True), NotImplementedError, r"by itself: leave out prefetch\(\)"),
    "layer's offload": (lambda cache: cache.layers[0].offload(), NotImplementedError, r"leave out offload\(\)"),
    "layer's prefetch": (lambda cache: cache.layers[0].prefetch(), NotImplementedError, r"leave out prefetch\(\)"),
}


@pytest.mark.parametrize("way", TAKEN_FOR_TENSORS)
def test_a_cache_taken_for_tensors(way: str, model: PreTrainedModel) -> None:
    use, error, message = TAKEN_FOR_TENSORS[way]
    cache, text = exact(model), prompt(60)[0]
    for filled in (False, True):
        if filled:
            forced(model, text[:, :50], [50], cache)
        with pytest.raises(error, match=message):
            use(cache)
    got = forced(model, text[:, 50:], [10], cache)
    assert (got - forced(model, text, [60], None)[:, 50:]).abs().max() < 1e-3
    assert not any(hasattr(cache, name) for name in ("key_cache", "to_legacy_cache", "unknown"))


def test_keys_put_in_from_outside(model: PreTrainedModel) -> None:
    """Keys that `update()` gets from outside a model, as a DynamicCache can, raise an error with the way out."""
    told = (
        r"did not come back.*not filled by update\(\) from outside.*reset\(\) it, then read tokens by model\(input_ids"
    )
    cache = exact(model)
    for use in (
        lambda: cache.update(*PAIR, 1),
        lambda: cache.update(*PAIR, 0),
        lambda: cache.layers[0].update(*PAIR),
    ):
        cache.reset()
        cache.update(*PAIR, 0)
        with pytest.raises(RuntimeError, match=told):
            use()
    with pytest.raises(RuntimeError, match=r"put in by update\(\) from outside \(read tokens by"):
        cache.crop(-1)  # which cannot tell
    with pytest.raises(RuntimeError, match=r"put in by update\(\) from outside \(read tokens by model\(input_ids"):
        generate(model, prompt(9)[0], cache)
    cache.reset()
    wanted = generate(model, prompt(60)[0], DynamicCache(config=model.config)).sequences
    assert torch.equal(generate(model, prompt(60)[0], cache).sequences, wanted)
