"""A record that contradicts itself is refused in words that say what it holds, and what it should."""

import re
from typing import Any

import pytest
from harness import Inputs, make_shared
from pair import Pair
from torch import Tensor

from qada_cache.state.layer import QAdALayer
from qada_cache.state.record import record_layer, restore_layer


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("mean", Tensor.double, "mean in torch.float64, which should be in torch.float32"),
        ("mean", lambda mean: mean[:, :1], "mean of shape [2, 1, 16], which should be of shape [2, 2, 16]"),
        ("near_values", lambda values: values[:, :, 1:], "near_values of shape [2, 2, 10, 16], which should be"),
        ("stored", lambda counts: [counts[0] + 1, counts[1]], "which should be [29, 29], as [32, 32] are flushed"),
        ("count", lambda counts: [counts[0], 7], "moments of [29, 7] tokens, which should be of [29, 29]"),
        ("steps", lambda _: -1, "steps of -1, which should be a count"),
        ("decoded", lambda _: 1, "decoded of 1, which should be a bool"),
    ],
)
def test_errors_say_what_should_be(name: str, change: Any, words: str) -> None:
    pair = Pair()
    pair.update(*Inputs()(40))
    record = record_layer(pair.layer)
    for tensor in ("bulk_keys", "bulk_values"):
        record[tensor] = getattr(pair.layer.store.bulk, tensor.removeprefix("bulk_"))
    restore_layer(QAdALayer(make_shared(), 0), record, None)
    record[name] = change(record[name])
    with pytest.raises(ValueError, match=re.escape(words)):
        restore_layer(QAdALayer(make_shared(), 0), record, None)
